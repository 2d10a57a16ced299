"""allocate: reserves pages for more tokens."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays.indexing import SlotRows
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Outcome
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import first_code
from jaxkv._src.cache.state import roots
from jaxkv._src.cache.state import rows_of
from jaxkv._src.cache.state import verb
from jaxkv._src.cache.steps.reserve import reservation
from jaxkv._src.cache.steps.reserve import reserve


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Allocated(Outcome):
  """The result of `allocate`; a row is OK if its slot has the requested room.

  Attributes:
    code: a `Status` for each slot.  # int32[R]
    num_new_pages: pages popped for the slot, over all groups.  # int32[R]
  """

  num_new_pages: Array


@verb
def allocate(
  state: CacheState,
  num_tokens: Array,
  *,
  slots: Array | None = None,
  mask: Array | None = None,
) -> tuple[CacheState, Allocated]:
  """Makes room for more tokens.

  Rows are served in order, each completely or not at all. A refused slot keeps
  its pages, and a later slot that needs fewer pages can still be served. Pages
  come from the front of the free queue, and cached pages among them are
  evicted. An empty slot starts a new sequence without a salt.

  Does not write K/V or advance `length`. `commit` advances `length` when the
  tokens are final. `truncate` releases room that was not needed.

  Args:
    state: the cache.
    num_tokens: int32[R], tokens past `length` for which to make room, including
      draft tokens. A slot with 0 does not change.
    slots: int32[R], the slots of the rows; None for all B slots in order.
    mask: bool[R], the rows to process; None for all.

  Returns:
    The cache, and per row OK, SKIPPED, BAD_SLOT (out of range, or repeated),
    BAD_LENGTH (a negative number), SLOT_FULL or OUT_OF_PAGES.

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=4, num_slots=2, pages_per_slot=4))
    >>> state, out = jaxkv.allocate(state, [5, 0])
    >>> state.num_pages.tolist(), out.ok.tolist()
    ([[2], [0]], [True, True])
  """
  rows = rows_of(state, slots, mask)
  is_new = rows.read(state.num_pages)[:, 0] == 0
  state, out = make_room(state, rows, num_tokens)
  # Refused rows popped no page, so only served rows start their hashes.
  hashes = hashing.start_slots(
    state.hashes, rows, is_new & (out.num_new_pages > 0), roots(state, None)
  )
  return dataclasses.replace(state, hashes=hashes), out


def make_room(
  state: CacheState,
  rows: SlotRows,
  num_tokens: Array,
  *,
  suffices: bool = False,
) -> tuple[CacheState, Allocated]:
  """Makes room as `allocate` does, but does not start the hashes of new slots.

  `suffices` is True if the free pages are known to be enough for all rows.
  """
  num_held_pages = rows.read(state.num_pages)
  stop_column, code = _required_columns(state, rows, num_tokens)
  code = first_code(
    (rows.skipped, Status.SKIPPED),
    (rows.bad, Status.BAD_SLOT),
    (code > 0, code),
  )
  plan = reservation(
    state,
    hit=num_held_pages,
    # A slot can have more columns than its tokens need, and keeps them.
    stop=jnp.maximum(stop_column, num_held_pages),
    begins=num_held_pages[:, 0] == 0,
    length=rows.read(state.length),
  )
  state, code = reserve(state, rows, plan, code, suffices=suffices)
  num_new = jnp.sum(plan.num_fresh, axis=1, dtype=jnp.int32)
  num_new = jnp.where(code == Status.OK, num_new, 0)
  return state, Allocated(code=code, num_new_pages=num_new)


def _required_columns(
  state: CacheState, rows: SlotRows, num_tokens: Array
) -> tuple[Array, Array]:
  """Returns the columns that rows need, int32[R, G], and the rows' statuses."""
  config = state.config
  length = rows.read(state.length)
  # `length + num_tokens` can overflow int32, so this test subtracts instead.
  # The sum below uses 0 for numbers that are too large.
  too_many = num_tokens > config.slot_tokens - length
  num_new = jnp.where(too_many, 0, jnp.maximum(num_tokens, 0))
  stop_column = config.sizes.columns_for(length + num_new)
  # A slot with 0 new tokens must not change.
  stop_column = jnp.where(num_tokens[:, None] > 0, stop_column, 0)
  code = first_code(
    (num_tokens < 0, Status.BAD_LENGTH), (too_many, Status.SLOT_FULL)
  )
  return stop_column, code
