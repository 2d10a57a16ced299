"""K/V memory: the pages themselves, a second pytree beside the cache state.

The cache state (which page belongs to whom) is small and may be kept as a
snapshot; this is large and is meant to be donated. A `View` joins the two
for one call.

| function | what it does |
|---|---|
| `init` | empty pages for all layers |
| `write` | stores the keys and values of new tokens |
| `share` | finds the pages that rows have in common, to be read once |
| `fit` | finds what of that still holds, once for all layers |
| `plan` | cuts a decode step's work, once for all layers |
| `attend` | causal attention of new queries over all tokens so far |
| `copy` | page contents, in every layer: what a fork or a swap owes |
| `gather` | sequences as dense arrays |
| `check` | that the memory has the pages of a cache |

All are pure, take the pages first and donate nothing: donate in your own
`jit`, or carry the pages through a loop, and every write is in place.

An old cache state is right only with the pages of its time, or with later ones
as long as no page that it holds or has cached was given to somebody else since.
"""

from jaxkv.kv.attend import attend
from jaxkv.kv.check import check
from jaxkv.kv.pages import KVPages
from jaxkv.kv.pages import copy
from jaxkv.kv.pages import gather
from jaxkv.kv.pages import init
from jaxkv.kv.plan import plan
from jaxkv.kv.share import fit
from jaxkv.kv.share import share
from jaxkv.kv.view import View
from jaxkv.kv.write import write

__all__ = [
  "KVPages",
  "View",
  "attend",
  "check",
  "copy",
  "fit",
  "gather",
  "init",
  "plan",
  "share",
  "write",
]
