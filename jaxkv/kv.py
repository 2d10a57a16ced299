"""K/V memory: the pages themselves, a second pytree beside the cache state.

The cache state (which page belongs to which slot) is small and may be kept as a
snapshot. The pages are large and meant to be donated. A `View` joins the two
for one call.

| function | what it does |
|---|---|
| `init` | empty pages for all layers |
| `write` | stores the keys and values of new tokens |
| `share` | finds the pages that rows have in common, to read them once |
| `refresh_shared` | checks which rows still share pages, once for all layers |
| `plan_decode` | cuts a decode step's work, once for all layers |
| `attend` | attention of new queries over all tokens so far, or an encoder's |
| `attend_with_lse` | the same, with log-sum-exps |
| `copy` | copies pages in every layer, as a fork or a swap requires |
| `gather` | sequences as dense arrays |
| `init_states` | empty states of recurrent layers, one in each page |
| `read_state`, `write_state` | the states before and after new tokens |
| `init_tokens` | empty pages of small numbers of each token |
| `write_tokens`, `read_tokens` | the numbers of new tokens, of sequences |
| `check` | checks that the memory has the pages of a cache |

All are pure and donate nothing: donate in your own `jit`, or carry the pages
through a loop, and every write is in place.

An old cache state is valid with the pages of its time. It is valid with later
pages only if no page that it holds or has cached has been given to another
sequence.

Shared prefixes. Rows whose page tables begin with the same pages, such as forks
of one prompt, read those pages once if the view has `shared`:

  view = jaxkv.kv.share(kv, view, num_clusters=4, cluster_size=8)

Call `share` once a decode step. Call `refresh_shared` once in a function that
takes a view and loops over layers, as `jaxkv.models.forward` does. Otherwise
`attend` repeats the check in every layer: compiled for an H200 with `triton`, a
layer of such a loop starts 25 kernels instead of 17. Pages are read per row if
sharing would save too little. With 4 prompts of 1,024 tokens, 8 samples each
and 128 more tokens per sample, two CPU cores are 2.2 times as fast (8 K/V heads
of 64, 4 query heads each). They are 1.7 to 1.9 times as fast where arithmetic
costs more than reads (2 K/V heads, 7 query heads each).

Mixed steps. A `PackedView` has the tokens of many sequences in one row: a token
of each sequence that decodes, then chunks of prompts. `write` and `attend` take
it like a `View`, and everything else in a model is the same for each token, so
a model that takes tokens [B, T] computes such a step as tokens [1, C].

Plans. `plan_decode` puts a `DecodePlan` into a view for `mosaic_gpu`, the only
backend that takes plans. With a plan all pieces of work are equally long, and a
layer starts 8 kernels instead of 12. Without one, long rows have longer pieces.

Latents. Pages made with `value_dim` hold one vector a token, whose leading
elements are its value, as multi-head latent attention (MLA) needs. `write`
takes no values, and `attend` takes absorbed queries:

  kv = jaxkv.kv.init(
    config, num_layers=27, num_kv_heads=1, head_dim=576, value_dim=512
  )
  kv = jaxkv.kv.write(kv, view, layer, latents)  # [B, T, 1, 576]
  options = jaxkv.kernels.AttentionOptions(scale=192**-0.5)
  out = jaxkv.kv.attend(kv, view, layer, q, options=options)  # [B, T, H, 512]

Backends `xla` and `triton` serve them, prompts and drafts included.

Encoders. A group of `CrossAttention` holds an encoder's tokens, which are
written once. Then each query of the decoder sees all of them:

  view = jaxkv.view(
    state, group=1, counts=counts, num_encoder_tokens=lengths
  )
  out = jaxkv.kv.attend(kv, view, layer, q, causal=False)

Recurrent layers. `init_states` makes `StatePages` for groups of kind
`Recurrent`: a page holds the state after its last token. A layer reads the
state before its new tokens and writes the one after them:

  before = jaxkv.kv.read_state(states, view, layer)
  out, after = recurrence(before, x, counts=view.counts)
  states = jaxkv.kv.write_state(states, view, layer, after)

A call computes tokens up to the end of a page, so that the state there is kept
for others; `write_state` says how to go past it.

Numbers of tokens. `init_tokens` makes `ExpertIdPages`: in the page of a token also
a few small whole numbers of it, such as the experts that it used. Who finds the
page in the cache finds them, too. `jaxkv.models.init_kv(experts=True)` does so.

Several pools. Where groups need memory of different shapes, a tuple of pools is
the memory of one cache, such as `(kv, states)`. All have the pages of the
cache. `copy`, `check` and `jaxkv.rollout` take the tuple, and the other
functions take the pool of the group at hand.

Formats. Pools hold float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or
int8. The last three have a scale for each token and head.
"""

from jaxkv._src.kv.attend import attend
from jaxkv._src.kv.attend import attend_with_lse
from jaxkv._src.kv.check import check
from jaxkv._src.kv.decode_plan import plan_decode
from jaxkv._src.kv.expert_ids import ExpertIdPages
from jaxkv._src.kv.expert_ids import init_tokens
from jaxkv._src.kv.expert_ids import read_tokens
from jaxkv._src.kv.expert_ids import write_tokens
from jaxkv._src.kv.memory import KVPages
from jaxkv._src.kv.memory import gather
from jaxkv._src.kv.memory import init
from jaxkv._src.kv.pools import Pools
from jaxkv._src.kv.pools import copy
from jaxkv._src.kv.recurrent_pages import StatePages
from jaxkv._src.kv.recurrent_pages import init_states
from jaxkv._src.kv.recurrent_pages import read_state
from jaxkv._src.kv.recurrent_pages import write_state
from jaxkv._src.kv.shared_prefix import refresh_shared
from jaxkv._src.kv.shared_prefix import share
from jaxkv._src.kv.view import FreshView
from jaxkv._src.kv.view import PackedView
from jaxkv._src.kv.view import View
from jaxkv._src.kv.write import write

__all__ = [
  "ExpertIdPages",
  "FreshView",
  "KVPages",
  "PackedView",
  "Pools",
  "StatePages",
  "View",
  "attend",
  "attend_with_lse",
  "check",
  "copy",
  "gather",
  "init",
  "init_states",
  "init_tokens",
  "plan_decode",
  "read_state",
  "read_tokens",
  "refresh_shared",
  "share",
  "write",
  "write_state",
  "write_tokens",
]
