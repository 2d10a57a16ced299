"""Models and trainers of others, on the paged cache.

| module                        | for                                         |
|-------------------------------|---------------------------------------------|
| `jaxkv.integrations.nnx`      | any decoder written in `flax.nnx`           |
| `jaxkv.integrations.tunix`    | GRPO and agents of tunix                    |
| `jaxkv.integrations.skyrl_tx` | SkyRL-tx, a Tinker server                   |

None of them is needed by the rest of the library, and none imports its package
before it is used. `pip install "jaxkv[clients]"` brings flax and tunix;
SkyRL-tx needs an environment of its own.
"""
