"""allocate: room for more tokens."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxkv.cache import grants
from jaxkv.cache import hashing
from jaxkv.cache import page_table
from jaxkv.cache.arguments import check_array
from jaxkv.cache.codes import Code
from jaxkv.cache.codes import first_code
from jaxkv.cache.codes import is_failure
from jaxkv.cache.codes import sticky
from jaxkv.cache.state import CacheState
from jaxkv.cache.state import SlotHashes
from jaxkv.cache.state import counted
from jaxkv.cache.state import pages_for
from jaxkv.cache.verbs import verb


class Allocated(NamedTuple):
  """What `allocate` did.

  Attributes:
    code: int32[B], a `Code` a slot.
    num_new_pages: int32[B], pages attached, all groups together.
  """

  code: Array
  num_new_pages: Array

  @property
  def ok(self) -> Array:
    """bool[B]: whether the slot has the room it asked for."""
    return self.code == Code.OK


@verb
def allocate(
  state: CacheState, num_tokens: Array
) -> tuple[CacheState, Allocated]:
  """Makes room for more tokens in every slot.

  All-or-nothing per slot, in slot order: a slot whose pages are not there
  keeps what it had, and a later slot that needs fewer may still be served.
  Pages come from the front of the free queue; a cached page among them is
  evicted. A slot that holds nothing starts a new, unsalted sequence.

  Writes no K/V and does not move `length`: `commit` does when the tokens are
  final. Room that turns out not to be needed goes back with `truncate`.

  Args:
    state: the cache.
    num_tokens: int32[B], tokens past `length` that there must be room for,
      drafts included; 0 asks for nothing.

  Returns:
    The cache, and per slot OK, BAD_LENGTH (negative), SLOT_FULL or
    OUT_OF_PAGES.

  Examples:
    >>> import jax.numpy as jnp, jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=4, num_slots=2, pages_per_slot=4))
    >>> state, out = jaxkv.allocate(state, jnp.asarray([5, 0], jnp.int32))
    >>> state.num_pages.tolist(), out.ok.tolist()
    ([[2, 0]], [True, True])
  """
  config = state.config
  check_array("num_tokens", num_tokens, (config.num_slots,), jnp.int32)
  too_many = num_tokens > config.slot_tokens - state.length
  target = pages_for(
    config, state.length + jnp.where(too_many, 0, jnp.maximum(num_tokens, 0))
  )
  held = state.num_pages.T
  need = jnp.maximum(target[:, None] - held, 0)
  need = jnp.where(num_tokens[:, None] > 0, need, 0)
  code = first_code(
    (num_tokens < 0, Code.BAD_LENGTH), (too_many, Code.SLOT_FULL)
  )
  total = jnp.sum(need, axis=1, dtype=jnp.int32)
  granted = grants.in_order(total, code == Code.OK, state.pool.queue.num_free)
  code = jnp.where(
    (code == Code.OK) & ~granted, jnp.int32(Code.OUT_OF_PAGES), code
  )
  need = jnp.where(granted[:, None], need, 0)
  slots = jnp.arange(config.num_slots, dtype=jnp.int32)
  pool, table, evicted = page_table.grow(
    state.pool,
    state.page_table,
    page_table.rows_of(slots, held, held + need),
  )
  total = jnp.sum(need, axis=1, dtype=jnp.int32)
  state = dataclasses.replace(
    state,
    page_table=table,
    num_pages=state.num_pages + need.T,
    hashes=_started(state, (held[:, 0] == 0) & (total > 0)),
    pool=pool,
    stats=counted(
      state.stats, popped=total, evicted=evicted, failed=is_failure(code)
    ),
    error=sticky(state.error, code),
  )
  return state, Allocated(code, total)


def _started(state: CacheState, starts: Array) -> SlotHashes | None:
  """Slots that start a sequence begin at the epoch's unsalted root."""
  if state.hashes is None:
    return None
  root = hashing.root_key(state.config, state.epoch, None)
  return dataclasses.replace(
    state.hashes,
    root=jnp.where(starts[:, None], root[None], state.hashes.root),
    chain=jnp.where(starts[:, None], root[None], state.hashes.chain),
  )
