"""Runs `flax.nnx` decoders with a jaxkv cache, without changing their code.

`paged_module` replaces the attention of a decoder with a function of yours. The
function computes queries, keys and values, calls `memory.attend`, and projects
the output. `memory.attend` also writes the keys and values to the cache. The
decoder then runs in `jaxkv.rollout.generate`. For the Qwen3 of tunix:

  def attention(layer, memory, x, positions, *_, **__):
    rotated = functools.partial(apply_rope, head_dim=layer.head_dim)
    q = rotated(layer.q_norm(layer.q_proj(x)), positions)
    k = rotated(layer.k_norm(layer.k_proj(x)), positions)
    out = memory.attend(q, k, layer.v_proj(x), scale=layer.scale)
    return None, layer.o_proj(out)

  def call(module, memory, tokens, positions):
    return module(tokens, positions, None, None)[0]

  decoder = paged_module(
    module, call=call, methods={Attention: attention},
    windows=[None] * model_config.num_layers, dtype=model_config.dtype,
    num_kv_heads=model_config.num_kv_heads, head_dim=model_config.head_dim,
  )

`memory` is a `jaxkv.kv.LayerMemory`, which models in plain JAX use, too.
`decoder.model` is a `jaxkv.rollout.Model`: it takes weights, a `jaxkv.kv.Batch`
and the pages. The weights are `decoder.params`, or a tree of other weights with
the same structure.

  sizes = decoder.cache_config(num_slots=4, max_length=128)
  state = rollout.init(
    jaxkv.init(sizes), decoder.init_kv(sizes),
    rollout.Requests(prompts, lengths), key, rollout_config,
  )
  state = rollout.generate(decoder.params, state, model=decoder.model)

| feature of the decoder             | support                                 |
|------------------------------------|-----------------------------------------|
| grouped-query attention            | with equal K/V heads in all layers      |
| sliding windows in some layers     | `windows`, one for each layer           |
| soft caps, sinks, a query scale    | arguments of `attend`                   |
| logits of the needed tokens only   | `memory.pick` before the output layer   |
| LoRA as variables of the module    | yes, as part of `params`                |
| data of a sequence, like an adapter| `memory.batch.rows.extra`               |
| `nnx.remat` around the attention   | list the wrapped method in `methods` too|
| `nnx.scan` over layers             | no, layers must be traced one by one    |
| K/V heads that differ by layer, MLA| no                                      |
| encoders, images, bidirectional    | no                                      |

`jaxkv.integrations.tunix.paged_module_of` adapts tunix's own models.
"""

from jaxkv._src.integrations.paged_module import PagedModule
from jaxkv._src.integrations.paged_module import bind
from jaxkv._src.integrations.paged_module import paged_module
from jaxkv.kv import LayerMemory
from jaxkv.kv import LayerPlan
from jaxkv.kv import plan_layers

__all__ = [
  "LayerMemory",
  "LayerPlan",
  "PagedModule",
  "bind",
  "paged_module",
  "plan_layers",
]
