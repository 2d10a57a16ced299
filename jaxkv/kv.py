"""K/V memory: the pages themselves, a second pytree beside the cache state.

The cache state (which page belongs to whom) is small and may be kept as a
snapshot; this is large and is meant to be donated. A `View` joins the two
for one call.

| function | what it does |
|---|---|
| `init` | empty pages for all layers |
| `write` | stores the keys and values of new tokens |
| `share` | finds the pages that rows have in common, to be read once |
| `refresh_shared` | drops what no longer holds of that, once for all layers |
| `plan_decode` | cuts a decode step's work, once for all layers |
| `attend` | causal attention of new queries over all tokens so far |
| `copy` | page contents, in every layer: what a fork or a swap owes |
| `gather` | sequences as dense arrays |
| `check` | that the memory has the pages of a cache |

All are pure, take the pages first and donate nothing: donate in your own
`jit`, or carry the pages through a loop, and every write is in place.

An old cache state is right only with the pages of its time, or with later ones
as long as no page that it holds or has cached was given to somebody else since.
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
from jaxkv._src.kv.view import View

__all__ = [
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
