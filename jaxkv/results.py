"""The result types of the verbs of `jaxkv`, for type annotations.

The results with a `code` also have `ok`, which is True for rows that succeeded.
"""

from jaxkv._src.cache.pool.offload_pages import Moves
from jaxkv._src.cache.state import Copied
from jaxkv._src.cache.state import Copies
from jaxkv._src.cache.state import Outcome
from jaxkv._src.cache.stats import Stats
from jaxkv._src.cache.verbs.admit import Admitted
from jaxkv._src.cache.verbs.admit import Matched
from jaxkv._src.cache.verbs.allocate import Allocated
from jaxkv._src.cache.verbs.commit import Committed
from jaxkv._src.cache.verbs.pin import Pinned
from jaxkv._src.cache.verbs.recycle import Recycled

__all__ = [
  "Admitted",
  "Allocated",
  "Committed",
  "Copied",
  "Copies",
  "Matched",
  "Moves",
  "Outcome",
  "Pinned",
  "Recycled",
  "Stats",
]
