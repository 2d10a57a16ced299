"""allocate: room for more tokens."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache import masked
from jaxkv._src.cache.checks import check_array
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.duplicates import num_earlier
from jaxkv._src.cache.groups import recurrent
from jaxkv._src.cache.groups.sizes import encoder_or_none
from jaxkv._src.cache.groups.sizes import overfull
from jaxkv._src.cache.groups.sizes import pages_for
from jaxkv._src.cache.pool import page_table
from jaxkv._src.cache.pool import reserve as grants
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import SlotHashes
from jaxkv._src.cache.state import counted
from jaxkv._src.cache.state import in_range
from jaxkv._src.cache.status import Code
from jaxkv._src.cache.status import first_code
from jaxkv._src.cache.status import is_failure
from jaxkv._src.cache.status import sticky
from jaxkv._src.cache.verb import verb


class Allocated(NamedTuple):
  """What `allocate` did.

  Attributes:
    code: int32[B] (int32[R] for named slots), a `Code` a slot.
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
  state: CacheState,
  num_tokens: Array,
  slots: Array | None = None,
  num_encoder_tokens: Array | None = None,
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
    slots: int32[R], the slots to serve, in this order, where there are R rows
      of `num_tokens` for some slots only; None for all B slots in order.
    num_encoder_tokens: int32[B] (int32[R] for named slots), tokens of the
      encoder for which slots that ask for room get pages too, if they have
      fewer; None for none.

  Returns:
    The cache, and per slot OK, BAD_LENGTH (negative), SLOT_FULL, OUT_OF_PAGES
    or BAD_SLOT (out of range, or named by an earlier row).

  Examples:
    >>> import jax.numpy as jnp, jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=4, num_slots=2, pages_per_slot=4))
    >>> state, out = jaxkv.allocate(state, jnp.asarray([5, 0], jnp.int32))
    >>> state.num_pages.tolist(), out.ok.tolist()
    ([[2, 0]], [True, True])
  """
  config = state.config
  length, held = state.length, state.num_pages.T
  bad_slot = jnp.bool_(False)
  if slots is None:
    place = jnp.arange(config.num_slots, dtype=jnp.int32)
  else:
    check_array("slots", slots, ("R",), jnp.int32)
    bad_slot = ~in_range(state, slots) | (num_earlier(slots) > 0)
    place = masked.where_valid(~bad_slot, slots)
    length, held = (masked.take(values, place) for values in (length, held))
  check_array("num_tokens", num_tokens, place.shape, jnp.int32)
  encoder = encoder_or_none(config, num_encoder_tokens, place.shape)
  target, code = _wanted(config, length, num_tokens, encoder)
  target, begins = jnp.maximum(target, held), held[:, config.lead_group] == 0
  fresh = recurrent.first_fresh(config, held, target, begins)
  code = jnp.where(bad_slot, jnp.int32(Code.BAD_SLOT), code)
  total = jnp.sum(target - fresh, axis=1, dtype=jnp.int32)
  granted = grants.in_order(total, code == Code.OK, state.pool.queue.num_free)
  code = jnp.where(
    (code == Code.OK) & ~granted, jnp.int32(Code.OUT_OF_PAGES), code
  )
  target, fresh = (
    jnp.where(granted[:, None], columns, held) for columns in (target, fresh)
  )
  table = recurrent.spread(
    config, state.page_table, place, held, target, begins
  )
  pool, table, evicted = page_table.grow(
    state.pool, table, page_table.rows_of(place, fresh, target)
  )
  total = jnp.where(granted, total, 0)
  starts, grown = begins & (total > 0), target - held
  if slots is not None:
    nobody = jnp.zeros((config.num_slots,), bool)
    starts = masked.put(nobody, place, values=starts)
    nothing = jnp.zeros_like(state.num_pages.T)
    grown = masked.put(nothing, place, values=grown)
  state = dataclasses.replace(
    state,
    page_table=table,
    num_pages=state.num_pages + grown.T,
    hashes=_started(state, starts),
    pool=pool,
    stats=counted(
      state.stats, popped=total, evicted=evicted, failed=is_failure(code)
    ),
    error=sticky(state.error, code),
  )
  return state, Allocated(code, total)


def _wanted(
  config: CacheConfig, length: Array, num_tokens: Array, encoder: Array
) -> tuple[Array, Array]:
  """Columns that rows ask for, int32[R, G], and codes of those that may not."""
  too_many = num_tokens > config.slot_tokens - length
  too_many |= encoder > config.slot_tokens
  more, encoded = (
    jnp.where(too_many, 0, jnp.maximum(n, 0)) for n in (num_tokens, encoder)
  )
  target = pages_for(config, length + more, encoded)
  target = jnp.where(num_tokens[:, None] > 0, target, 0)
  code = first_code(
    ((num_tokens < 0) | (encoder < 0), Code.BAD_LENGTH),
    (too_many | overfull(config, target), Code.SLOT_FULL),
  )
  return target, code


def _started(state: CacheState, starts: Array) -> SlotHashes | None:
  """Slots that start a sequence begin at the epoch's unsalted root."""
  if state.hashes is None:
    return None
  hashes = state.hashes
  root = hashing.root_key(state.config, state.epoch, None)
  hashes = dataclasses.replace(
    hashes,
    root=jnp.where(starts[:, None], root[None], hashes.root),
    chain=jnp.where(starts[:, None], root[None], hashes.chain),
  )
  if hashes.prompt is None or hashes.junction is None:
    return hashes
  return dataclasses.replace(
    hashes,
    prompt=jnp.where(starts, 0, hashes.prompt),
    junction=jnp.where(starts, 0, hashes.junction),
  )
