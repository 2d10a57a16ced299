"""One transition that allocates for requests.

Built from the mechanisms of `jaxkv._src.cache`, as its verbs are. The state is
donated: a manager keeps the newest one only.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.cache import masked
from jaxkv._src.cache.groups import recurrent
from jaxkv._src.cache.groups import sizes as groups
from jaxkv._src.cache.pool import page_table
from jaxkv._src.cache.pool import reserve as grants
from jaxkv._src.cache.pool.page_table import Rows
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.prefix import publish as publishing
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import counted
from jaxkv._src.cache.state import with_sequences
from jaxkv._src.cache.verbs import recycle as recycling
from jaxkv._src.host.planning import Call
from jaxkv._src.host.planning import Hits
from jaxkv._src.host.planning import Plan
from jaxkv._src.host.planning import columns_for
from jaxkv._src.host.planning import fits
from jaxkv._src.host.planning import planned
from jaxkv._src.host.planning import sound
from jaxkv._src.host.transitions import transition

_POLLS = 2000

NEW_PAGES = 2
"""New pages of a group and a request that come back from the device at once."""


class Allocated(NamedTuple):
  """What became of R requests; numpy arrays on the host.

  Attributes:
    ok: bool[R].
    sound: bool[R], whether the hits given hold the tokens of the request.
    length: int32[R], tokens published.
    begin: int32[R, G], the first new column.
    stop: int32[R, G], one past the last.
    pages: int32[G, R, M], their page tables, where hits were given, else
      int32[G, R, NEW_PAGES], the first new pages.
  """

  ok: np.ndarray
  sound: np.ndarray
  length: np.ndarray
  begin: np.ndarray
  stop: np.ndarray
  pages: np.ndarray


@functools.partial(transition, static_argnames="caps")
def allocate(
  state: CacheState,
  fields: Array,
  begin: tuple[Array, Array, Array] | None,
  tokens: Array,
  *,
  caps: tuple[int, ...],
) -> tuple[CacheState, Array]:
  """Recycles, attaches hits, allocates and publishes.

  Requests are served in order, all-or-nothing, and what fell behind a window
  is given back even where nothing can be allocated. Of several requests, all
  give back first, then all take pages, then all publish.

  Args:
    state: the cache.
    fields: int32[F, R], the fields of `Call`: what is asked.
    begin: the fields of `Hits`: what requests whose slots are empty begin
      with; None if there are none such.
    tokens: int32[R, T], those after the ones published; all tokens of a
      request that begins.
    caps: most pages by group that one sequence ever holds.

  Returns:
    The cache, and what became of the rows, for `unpacked`: one array, because
    each one that is fetched costs as much as it.
  """
  config, call = state.config, Call(*fields)
  hits = None if begin is None else Hits(*begin)
  held = masked.take(state.num_pages.T, call.slots)
  begins = (held[:, config.lead_group] == 0) & (call.slots < config.num_slots)
  served = fits(state, call, hits, held, begins, caps)
  holds = sound(state, call, hits, tokens)
  served &= holds
  running = masked.where_valid(served & ~begins, call.slots)
  state, _ = recycling.drop_behind(state, call.behind, running)
  columns = columns_for(config, call, call.room, call.tokens)
  plan = planned(state, call, hits, held, begins, columns)
  ok = grants.in_order(
    jnp.sum(plan.need, axis=1, dtype=jnp.int32) + call.spare,
    served,
    state.pool.queue.num_free - call.reserved[0],
  )
  plan = Plan(*(jnp.where(ok[:, None], columns, 0) for columns in plan))
  slots = masked.where_valid(ok, call.slots)
  if hits is not None:
    state = _begun(state, call, hits, plan, slots, ok & begins)
  table = recurrent.spread(
    config, state.page_table, slots, plan.external, plan.stop, begins
  )
  ahead = _joined_rows(
    page_table.rows_of(slots, plan.hit, plan.external),
    page_table.rows_of(slots, plan.fresh, plan.stop),
  )
  pool, table, evicted = page_table.grow(state.pool, table, ahead)
  num_pages = state.num_pages.at[:, slots].set(plan.stop.T, mode="drop")
  popped = jnp.sum(ahead.stop - ahead.start, dtype=jnp.int32)
  state = dataclasses.replace(
    state,
    page_table=table,
    num_pages=num_pages,
    pool=pool,
    stats=counted(state.stats, popped=popped, evicted=evicted),
  )
  state = _published(state, call, plan, slots, begins, tokens)
  columns = jnp.arange(config.pages_per_slot, dtype=jnp.int32)[None, None]
  if hits is None:
    columns = jnp.arange(NEW_PAGES, dtype=jnp.int32)[None, None]
    columns = columns + plan.external.T[..., None]
  numbers = jnp.arange(config.num_groups, dtype=jnp.int32)[:, None, None]
  pages = masked.take(
    state.page_table, numbers, call.slots[None, :, None], columns
  )
  length = masked.take(state.length, call.slots)
  packed = (ok, holds, length, plan.external, plan.stop, pages)
  packed = [part.astype(jnp.int32).reshape(-1) for part in packed]
  return state, jnp.concatenate(packed)


def unpacked(packed: Array, num_rows: int, num_groups: int) -> Allocated:
  """What `allocate` packed, on the host.

  Stays awake for a while: a thread that falls asleep and is woken loses as much
  time as a decode step takes on a CPU.
  """
  for _ in range(_POLLS):
    if packed.is_ready():  # pyright: ignore[reportAttributeAccessIssue]
      break
  flat, pairs = np.asarray(packed), num_rows * num_groups
  rows, pages = flat[: 3 * num_rows], flat[3 * num_rows + 2 * pairs :]
  columns = flat[3 * num_rows : 3 * num_rows + 2 * pairs]
  rows = rows.reshape(3, num_rows)
  return Allocated(
    ok=rows[0] != 0,
    sound=rows[1] != 0,
    length=rows[2],
    begin=columns[:pairs].reshape(num_rows, num_groups),
    stop=columns[pairs:].reshape(num_rows, num_groups),
    pages=pages.reshape(num_groups, num_rows, -1),
  )


def _begun(
  state: CacheState,
  call: Call,
  hits: Hits,
  plan: Plan,
  slots: Array,
  begins: Array,
) -> CacheState:
  """Touches and attaches hits, and begins the keys of their sequences."""
  slots = masked.where_valid(begins, slots)
  stop = jnp.where(begins[:, None], plan.hit, 0)
  pool, table = page_table.attach(
    state.pool, state.page_table, slots, plan.null, stop, hits.pages
  )
  table = page_table.fill_before(table, slots, plan.null, 0)
  first_page = state.first_page.at[:, slots].set(plan.null.T, mode="drop")
  hashes = state.hashes
  if hashes is not None:
    root = hashing.root_key(state.config, state.epoch, hits.salts)
    hashes = with_sequences(
      hashes,
      slots,
      root=root,
      chain=root,
      prompt=call.prompt,
      junction=call.junction,
    )
  return dataclasses.replace(
    state, page_table=table, first_page=first_page, hashes=hashes, pool=pool
  )


def _published(
  state: CacheState,
  call: Call,
  plan: Plan,
  slots: Array,
  begins: Array,
  tokens: Array,
) -> CacheState:
  """Publishes rows up to where the call says."""
  length = masked.take(state.length, slots)
  room = groups.tokens_with_room(state.config, plan.stop)
  counts = jnp.minimum(call.publish, room) - length
  counts = jnp.clip(counts, 0, tokens.shape[1])
  counts = jnp.where(slots < state.config.num_slots, counts, 0)
  known = jnp.where(
    begins[:, None], plan.hit, groups.final_pages(state.config, length)
  )
  state, _ = publishing.publish(state, slots, tokens, counts, known)
  return state


def _joined_rows(one: Rows, other: Rows) -> Rows:
  return Rows(
    *(jnp.concatenate(parts) for parts in zip(one, other, strict=True))
  )
