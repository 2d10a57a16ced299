"""recycle: pages behind a window go back while a sequence runs."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache.checks import check_shape
from jaxkv._src.cache.groups import recurrent
from jaxkv._src.cache.groups import sizes
from jaxkv._src.cache.pool import page_table
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Rows
from jaxkv._src.cache.state import recorded
from jaxkv._src.cache.state import rows_of
from jaxkv._src.cache.state import verb
from jaxkv._src.cache.status import Outcome
from jaxkv._src.cache.status import Status
from jaxkv._src.cache.status import first_code


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Recycled(Outcome):
  """What `recycle` did.

  Attributes:
    code: a `Status` for each slot.  # int32[R]
    num_recycled_pages: pages that the slot gave back, all groups together.
      # int32[R]
  """

  num_recycled_pages: Array


@verb
def recycle(
  state: CacheState,
  *,
  lengths: Array | None = None,
  slots: Array | None = None,
  mask: Array | None = None,
) -> tuple[CacheState, Recycled]:
  """Gives back pages that no later token of their sequence attends to.

  A sliding window or a chunk leaves pages behind. The null page takes their
  places in the page table, the last of them first. Published pages stay cached
  until they are taken from the free queue. Costs next to nothing where nothing
  fell behind. Called before `allocate` in a loop, it bounds what a sequence
  holds: of a window of w tokens, at most `ceil((w - 1) / S) + 1` pages besides
  those for new tokens.

  Args:
    state: the cache.
    lengths: int32[R], tokens whose K/V no write in flight still needs; None
      for `state.length`. Negative for none.
    slots: int32[R], the slots of the rows; None for all B slots in order.
    mask: bool[R], the rows that count; None for all.

  Returns:
    The cache, and per row OK, SKIPPED or BAD_SLOT (out of range, or named by
    an earlier row).

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4,
    ...   groups=(jaxkv.SlidingWindow(3),)))
    >>> state, _ = jaxkv.allocate(state, [7])
    >>> state, _ = jaxkv.commit(state, [[1, 2, 3, 4, 5, 6, 7]], [7])
    >>> state, out = jaxkv.recycle(state)
    >>> out.num_recycled_pages.tolist(), state.page_table[0].tolist()
    ([2], [[0, 0, 3, 4]])
  """
  rows = rows_of(state, slots, mask)
  lengths = rows.read(state.length) if lengths is None else lengths
  check_shape("lengths", lengths, rows.slots.shape, ", one for each slot")
  code = first_code((rows.skipped, Status.SKIPPED), (rows.bad, Status.BAD_SLOT))
  code = jnp.broadcast_to(code, rows.slots.shape)
  state, num_pages = drop_behind(state, rows, lengths, code == Status.OK)
  out = Recycled(code=code, num_recycled_pages=num_pages)
  return recorded(state, code), out


def drop_behind(
  state: CacheState, rows: Rows, lengths: Array, served: Array
) -> tuple[CacheState, Array]:
  """Gives back what int32[R] tokens of the rows served have left behind.

  Returns:
    The cache, and int32[R]: pages given back.
  """
  config = state.config
  if not config.skips_pages:
    return state, jnp.zeros_like(lengths)
  held, first = rows.read(state.num_pages), rows.read(state.num_skipped_pages)
  lengths = jnp.clip(lengths, 0, config.slot_tokens)
  behind = jnp.minimum(sizes.skipped_pages(config, lengths), held)
  behind = jnp.where(served[:, None], jnp.maximum(first, behind), first)
  slots = rows.where(served)
  num_pages = recurrent.num_pages(
    config, state.page_table, slots, first, behind
  )
  pool, table = page_table.shrink(
    state.pool,
    state.page_table,
    page_table.ranges(slots, first, behind),
    left=0,
  )
  skipped = rows.write(state.num_skipped_pages, served, behind)
  state = dataclasses.replace(
    state, page_table=table, num_skipped_pages=skipped, pool=pool
  )
  return state, num_pages
