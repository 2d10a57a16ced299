"""K/V memory: the contents of pages, a second pytree beside the cache state.

The cache state records which page belongs to which slot. It is small, so a
snapshot of it is cheap. The pages are large, so donate them. A `View` has the
part of the cache state that one call on the pages needs. `help(jaxkv)` defines
the letters of array shapes.

| function | description |
|---|---|
| `init` | makes empty pages for all layers |
| `write` | stores the keys and values of new tokens |
| `share` | finds pages that several rows begin with, to read them once |
| `refresh_shared` | checks which rows still share pages, for all layers |
| `attend` | computes attention over the tokens of a sequence |
| `attend_with_lse` | the same, and returns the log-sum-exps |
| `copy` | copies pages in every layer, as `fork` and `truncate` require |
| `page_bytes` | counts the bytes of a page of each pool |
| `init_offload` | makes empty pages in host memory, for evicted pages |
| `move` | moves pages between device and host, as verbs require |
| `init_states` | makes empty states of recurrent layers, one in each page |
| `read_state`, `write_state` | read and write states of recurrent layers |
| `init_expert_ids` | makes empty pages of expert ids |
| `write_expert_ids`, `read_expert_ids` | write and read expert ids |
| `check` | checks that the memory has the pages of a cache, and its moves |
| `plan_layers` | divides the layers of a model into groups by window |

| type | description |
|---|---|
| `View`, `PackedView`, `FreshView` | the part of the state that a call reads |
| `Batch` | the tokens of one call of a model, and their views |
| `LayerPlan`, `LayerMemory` | layers of a model, and their memory in a call |
| `KVPages`, `StatePages`, `ExpertIdPages` | memories: the pages of a pool |
| `Pools` | a memory or a tuple of memories |

All functions are pure and donate nothing. Writes are in place if you donate the
pages to your own `jit`, or carry them through a loop. An argument whose type or
dtype is not supported raises TypeError, one whose shape or value is not
supported ValueError, and an unknown backend NotImplementedError.

A snapshot of the cache state is valid with the pages of the same step, and with
those of later steps until one of these steps overwrites a token in its pages.

Models in plain JAX. A model is a function of its weights, a `Batch` and the
memory, and returns logits and the new memory. `plan_layers` divides its layers
into groups of the cache. In a call, a `LayerMemory` gives each layer its view
and its part of the pages:

  plan = jaxkv.kv.plan_layers((512, 512, None))  # the window of each layer
  sizes = plan.cache_config(num_slots=4, max_length=2048)
  kv = plan.init_kv(sizes, num_kv_heads=2, head_dim=64)

  def model(params, batch, kv):
    memory = jaxkv.kv.LayerMemory(plan, batch, kv)
    x = params["embed"][batch.tokens]
    for layer in params["layers"]:
      q, k, v = heads_of(layer, x, batch.positions)
      x += project(layer, memory.attend(q, k, v))
    return memory.logits(memory.pick(x) @ params["output"]), memory.kv

`jaxkv.rollout.generate(params, state, model=model)` calls the model in each
step. The tokens of all sequences are in one row, and `batch.rows` has the
sequence of each token. Given `config`, `jaxkv.models.forward` is such a model.

Shared prefixes. The page tables of several rows can begin with the same pages,
for example after a fork. `share` lets `attend` read such pages once:

  view = jaxkv.kv.share(kv, view, num_clusters=4, cluster_size=8)

Call `share` before one or more decode steps, and `refresh_shared` once in each
step, before the layers, as `jaxkv.models.forward` does. On two CPU cores, with
8 samples of 4 prompts of 1,024 tokens, a step is then about twice as fast.

Mixed steps. A `PackedView` has the tokens of many sequences in one row: one
token of each decoding sequence, then chunks of prompts. `write` and `attend`
accept it in place of a `View`. Outside of attention and recurrent layers, a
model treats tokens independently. So the same model can take tokens [B, T], or
tokens [1, C] in a mixed step of C tokens.

Latents. With `value_dim`, pages hold one vector for each token, as in
multi-head latent attention (MLA), and `attend` takes absorbed queries:

  kv = jaxkv.kv.init(
    config, num_layers=27, num_kv_heads=1, head_dim=576, value_dim=512
  )
  kv = jaxkv.kv.write(kv, view, layer, latents)  # [B, T, 1, 576]
  options = jaxkv.kernels.AttentionOptions(scale=192**-0.5)
  out = jaxkv.kv.attend(kv, view, layer, q, options=options)  # [B, T, H, 512]

Only the backends `xla` and `triton` support latents.

Recurrent layers. `init_states` makes `StatePages` for layer groups of kind
`Recurrent`. A page holds the state after the last token of the page. A layer
reads the state before its new tokens and writes the state after them:

  before = jaxkv.kv.read_state(states, view, layer)
  out, after = recurrence(before, x, num_tokens=view.num_tokens)
  states = jaxkv.kv.write_state(states, view, layer, after)

Sequences that reuse a full page start from its state. So the tokens of one call
should not cross the end of a page whose state is kept. `write_state` explains
the exceptions. With a `jaxkv.StateRetention`, few states are kept.

Expert ids. `ExpertIdPages` hold the ids of the experts that computed a token. A
sequence that reuses a cached page also reuses its ids. With
`record_experts=True`, `jaxkv.models.init_kv` makes such pages for a model.

Several memories. A memory has the pages of one pool of the cache, that of its
layer group. If layer groups need memory of different shapes, the memory of a
cache is a tuple, such as `(kv, states)`:

  groups = (jaxkv.FullAttention(), jaxkv.Recurrent(pool=1))
  config = jaxkv.CacheConfig(num_pages=(4096, 64), groups=groups, ...)
  kv = jaxkv.kv.init(config, group=0, num_layers=8, ...)
  states = jaxkv.kv.init_states(config, group=1, num_layers=24, shapes=shapes)

Page numbers are those of the cache everywhere, and a memory ignores pages of
other pools. `copy`, `check`, `page_bytes`, `init_offload`, `move` and
`jaxkv.rollout` take the tuple. The other functions take one memory.

Offload memory. With `CacheConfig.offload_pages`, cached pages that the device
evicts move to offload memory, and return to the device when a sequence hits
them. Both memories together keep the most recently used pages of each pool.
With several pools, `offload_pages` has a number for each pool. Verbs that use
free pages return the necessary moves. Perform the moves before you write to any
page:

  offload = jaxkv.kv.init_offload(kv, config)
  state, out = jaxkv.admit(state, slots, tokens, lengths)
  kv, offload = jaxkv.kv.move(kv, offload, out.moves)

Each verb numbers its moves, and the offload memory counts those that it made.
`check` raises if a loop forgot moves, or made them twice:

  jaxkv.kv.check(kv, config, offload=offload, state=state)

A return can cost more than it saves. With an `OffloadPolicy`, pages return only
if this takes less time than computing their tokens again. With several pools,
all pages of a hit return, or none:

  policy = jaxkv.OffloadPolicy(bytes_per_second=16e9, tokens_per_second=23e3)
  size = jaxkv.kv.page_bytes(jax.eval_shape(init_kv))
  config = jaxkv.CacheConfig(..., offload_policy=policy, page_bytes=size)

A lookup prefers a page on the device to an equal offloaded page. A page in use
never moves, and `merge_duplicates` does not replace a page with an offloaded
one. All counts of free pages, `keep_free` and the watermark of a rollout count
device pages only. Pools as large as both memories would have the same hits,
unless equal pages are cached twice, for example because two sequences computed
them at once. In tests, moves run on CPUs and GPUs and are compiled for TPUs.
"""

from jaxkv._src.kv.attend import attend
from jaxkv._src.kv.attend import attend_with_lse
from jaxkv._src.kv.check import check
from jaxkv._src.kv.expert_ids import ExpertIdPages
from jaxkv._src.kv.expert_ids import init_expert_ids
from jaxkv._src.kv.expert_ids import read_expert_ids
from jaxkv._src.kv.expert_ids import write_expert_ids
from jaxkv._src.kv.kv_pages import KVPages
from jaxkv._src.kv.kv_pages import init
from jaxkv._src.kv.layer_memory import LayerMemory
from jaxkv._src.kv.layer_memory import LayerPlan
from jaxkv._src.kv.layer_memory import plan_layers
from jaxkv._src.kv.offload_memory import init_offload
from jaxkv._src.kv.offload_memory import move
from jaxkv._src.kv.pools import Pools
from jaxkv._src.kv.pools import copy
from jaxkv._src.kv.pools import page_bytes
from jaxkv._src.kv.recurrent_pages import StatePages
from jaxkv._src.kv.recurrent_pages import init_states
from jaxkv._src.kv.recurrent_pages import read_state
from jaxkv._src.kv.recurrent_pages import write_state
from jaxkv._src.kv.share import refresh_shared
from jaxkv._src.kv.share import share
from jaxkv._src.kv.view import Batch
from jaxkv._src.kv.view import FreshView
from jaxkv._src.kv.view import PackedView
from jaxkv._src.kv.view import View
from jaxkv._src.kv.write import write

__all__ = [
  "Batch",
  "ExpertIdPages",
  "FreshView",
  "KVPages",
  "LayerMemory",
  "LayerPlan",
  "PackedView",
  "Pools",
  "StatePages",
  "View",
  "attend",
  "attend_with_lse",
  "check",
  "copy",
  "init",
  "init_expert_ids",
  "init_offload",
  "init_states",
  "move",
  "page_bytes",
  "plan_layers",
  "read_expert_ids",
  "read_state",
  "refresh_shared",
  "share",
  "write",
  "write_expert_ids",
  "write_state",
]
