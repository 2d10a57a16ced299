"""commit: declares tokens final; hashes and publishes full pages."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Outcome
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import first_code
from jaxkv._src.cache.state import rows_of
from jaxkv._src.cache.state import verb
from jaxkv._src.cache.steps.publish import publish


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Committed(Outcome):
  """The result of `commit`; a row is OK if its tokens were committed.

  Attributes:
    code: a `Status` for each slot.  # int32[R]
    num_published_pages: pages that were published or merged.  # int32[R]
  """

  num_published_pages: Array


@verb
def commit(
  state: CacheState,
  tokens: Array,
  num_tokens: Array,
  *,
  slots: Array | None = None,
  mask: Array | None = None,
) -> tuple[CacheState, Committed]:
  """Declares tokens final: their K/V is written and will not change.

  Advances `length`. Full pages get a key, a hash of the page's tokens and of
  the tokens before them, once a hit can end after them. The pages that
  `CacheConfig.prefix_rules` selects are published, so that `match` and `admit`
  find them by their keys. See also `CacheConfig.merge_duplicates`.

  A slot for which `allocate` or `admit` made too little room does not change.

  Args:
    state: the cache.
    tokens: int32[R, T]; the first `num_tokens[r]` tokens of row r follow the
      tokens of its slot.
    num_tokens: int32[R], 0 .. T; a slot with 0 does not change.
    slots: int32[R], the slots of the rows; None for all B slots in order.
    mask: bool[R], the rows to process; None for all.

  Returns:
    The cache, and per row OK, SKIPPED, BAD_SLOT (out of range, or repeated),
    SLOT_EMPTY, BAD_LENGTH (negative or more than T) or NO_ROOM (too few pages
    in the slot for the tokens).

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> state, _ = jaxkv.allocate(state, [3])
    >>> state, out = jaxkv.commit(state, [[7, 8, 9]], [3])
    >>> int(state.length[0]), int(out.num_published_pages[0])
    (3, 1)
  """
  rows = rows_of(state, slots, mask)
  room = rows.read(state.config.sizes.tokens_with_room(state.num_pages))
  # An empty slot accepts 0 tokens, because decode loops pass 0 for idle slots.
  code = first_code(
    (rows.skipped, Status.SKIPPED),
    (rows.bad, Status.BAD_SLOT),
    ((num_tokens != 0) & (room == 0), Status.SLOT_EMPTY),
    ((num_tokens < 0) | (num_tokens > tokens.shape[1]), Status.BAD_LENGTH),
    (num_tokens > room - rows.read(state.length), Status.NO_ROOM),
  )
  num_tokens = jnp.where(code == Status.OK, num_tokens, 0)
  state, published = publish(state, rows, tokens, num_tokens)
  return state, Committed(code=code, num_published_pages=published)
