"""K/V memory: the pages themselves, a second pytree beside the cache state.

The cache state (which page belongs to which slot) is small and may be kept as a
snapshot. The pages are large and meant to be donated. A `View` joins the two
for one call.

| function | what it does |
|---|---|
| `init` | empty pages for all layers |
| `write` | stores the keys and values of new tokens |
| `share` | finds the pages that rows have in common, to be read once |
| `refresh_shared` | checks which rows still share pages, once for all layers |
| `plan_decode` | cuts a decode step's work, once for all layers |
| `attend` | causal attention of new queries over all tokens so far |
| `copy` | copies pages in every layer, as a fork or a swap requires |
| `gather` | sequences as dense arrays |
| `check` | checks that the memory has the pages of a cache |

All are pure and donate nothing: donate in your own `jit`, or carry the pages
through a loop, and every write is in place.

An old cache state is right only with the pages of its time, or with later ones
as long as no page that it holds or has cached was given to another sequence
since.
"""

from jaxkv._src.kv.append import write
from jaxkv._src.kv.attention import attend
from jaxkv._src.kv.check import check
from jaxkv._src.kv.decode_plan import plan_decode
from jaxkv._src.kv.memory import KVPages
from jaxkv._src.kv.memory import copy
from jaxkv._src.kv.memory import gather
from jaxkv._src.kv.memory import init
from jaxkv._src.kv.shared_prefix import refresh_shared
from jaxkv._src.kv.shared_prefix import share
from jaxkv._src.kv.view import FreshView
from jaxkv._src.kv.view import View

__all__ = [
  "FreshView",
  "KVPages",
  "View",
  "attend",
  "check",
  "copy",
  "gather",
  "init",
  "plan_decode",
  "refresh_shared",
  "share",
  "write",
]
