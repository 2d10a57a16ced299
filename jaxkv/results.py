"""The result types of the verbs of `jaxkv`, for type annotations.

Every result with a `code` also has `ok`, which is True for rows that succeeded.
"""

from jaxkv._src.cache.pool.host_pages import Moves
from jaxkv._src.cache.state import Copies
from jaxkv._src.cache.state import Outcome
from jaxkv._src.cache.stats import Stats
from jaxkv._src.cache.verbs.admit import Admitted
from jaxkv._src.cache.verbs.admit import Matched
from jaxkv._src.cache.verbs.allocate import Allocated
from jaxkv._src.cache.verbs.commit import Committed
from jaxkv._src.cache.verbs.fork import Forked
from jaxkv._src.cache.verbs.pin import Pinned
from jaxkv._src.cache.verbs.recycle import Recycled
from jaxkv._src.cache.verbs.reset import ClearedError
from jaxkv._src.cache.verbs.reset import NewEpoch
from jaxkv._src.cache.verbs.truncate import Truncated

__all__ = [
  "Admitted",
  "Allocated",
  "ClearedError",
  "Committed",
  "Copies",
  "Forked",
  "Matched",
  "Moves",
  "NewEpoch",
  "Outcome",
  "Pinned",
  "Recycled",
  "Stats",
  "Truncated",
]
