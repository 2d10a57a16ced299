"""Adapters that run models and trainers of other packages on the paged cache.

| module                     | adapts                                      |
|----------------------------|---------------------------------------------|
| `jaxkv.integrations.nnx`   | any decoder written in `flax.nnx`           |
| `jaxkv.integrations.tunix` | the GRPO and agent trainers of tunix        |
| `jaxkv.integrations.ray`   | Ray, for the workers of a pool              |

The rest of the library does not need these packages. An adapter imports its
package when it is first used. `pip install "jaxkv[clients]"` installs flax and
tunix, and `jaxkv[ray]` installs Ray.
"""
