"""commit: tokens become final, full pages are hashed and published."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache import masked
from jaxkv._src.cache.checks import check_array
from jaxkv._src.cache.duplicates import num_earlier
from jaxkv._src.cache.groups.sizes import tokens_with_room
from jaxkv._src.cache.prefix.publish import publish
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import counted
from jaxkv._src.cache.state import in_range
from jaxkv._src.cache.status import Code
from jaxkv._src.cache.status import first_code
from jaxkv._src.cache.status import is_failure
from jaxkv._src.cache.status import sticky
from jaxkv._src.cache.verb import verb


class Committed(NamedTuple):
  """What `commit` did.

  Attributes:
    code: int32[B] (int32[R] for named slots), a `Code` a slot.
    num_published: int32[B], pages of the slot that were cached.
  """

  code: Array
  num_published: Array

  @property
  def ok(self) -> Array:
    """bool[B]: whether the slot's tokens were taken."""
    return self.code == Code.OK


@verb
def commit(
  state: CacheState, tokens: Array, counts: Array, slots: Array | None = None
) -> tuple[CacheState, Committed]:
  """Declares tokens final: their K/V is written and will not change.

  Advances `length`. A page that becomes full is hashed, chained to the page
  before it, and published: from now on `match` and `admit` find it. With
  `merge_duplicates`, a page that equals a cached one is replaced by that one
  in the page table, and its own page goes back to the pool.

  All-or-nothing per slot. The pages must have been allocated.

  Args:
    state: the cache.
    tokens: int32[B, T]; of row b the first `counts[b]` are the slot's next
      tokens.
    counts: int32[B], 0 .. T; 0 leaves the slot as it is.
    slots: int32[R], the slots of the rows, where there are R rows of tokens
      and counts for some slots only; None for all B slots in order.

  Returns:
    The cache, and per slot OK, SLOT_EMPTY, BAD_LENGTH (negative or more than
    T), NO_ROOM (beyond the slot's pages) or BAD_SLOT (out of range, or named
    by an earlier row).

  Examples:
    >>> import jax.numpy as jnp, jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> state, _ = jaxkv.allocate(state, jnp.asarray([3], jnp.int32))
    >>> tokens = jnp.asarray([[7, 8, 9]], jnp.int32)
    >>> state, out = jaxkv.commit(state, tokens, jnp.asarray([3], jnp.int32))
    >>> int(state.length[0]), int(out.num_published[0])
    (3, 1)
  """
  config = state.config
  rows = config.num_slots
  bad_slot = jnp.bool_(False)
  room = tokens_with_room(config, state.num_pages.T)
  length = state.length
  if slots is not None:
    check_array("slots", slots, ("R",), jnp.int32)
    rows = slots.shape[0]
    bad_slot = ~in_range(state, slots) | (num_earlier(slots) > 0)
    room, length = (masked.take(values, slots) for values in (room, length))
  check_array("tokens", tokens, (rows, "T"), jnp.int32)
  check_array("counts", counts, (rows,), jnp.int32)
  code = first_code(
    (bad_slot, Code.BAD_SLOT),
    ((counts != 0) & (room == 0), Code.SLOT_EMPTY),
    ((counts < 0) | (counts > tokens.shape[1]), Code.BAD_LENGTH),
    (counts > room - length, Code.NO_ROOM),
  )
  taken = code == Code.OK
  counts = jnp.where(taken, counts, 0)
  if slots is not None:
    slots = masked.where_valid(taken, slots)
  state, published = publish(state, slots, tokens, counts)
  state = dataclasses.replace(
    state,
    stats=counted(state.stats, failed=is_failure(code)),
    error=sticky(state.error, code),
  )
  return state, Committed(code, published)
