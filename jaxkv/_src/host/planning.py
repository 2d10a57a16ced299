"""What requests ask for, and what it would cost."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.cache import masked
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.groups import recurrent
from jaxkv._src.cache.groups import sizes as groups
from jaxkv._src.cache.groups.kinds import GroupKind
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.state import CacheState


class Call(NamedTuple):
  """Allocations for R requests, in order; int32[R] each.

  Attributes:
    slots: their slots, out of range for a row that is none.
    behind: tokens computed before the new ones, here or elsewhere.
    external: those of them that come from elsewhere.
    room: tokens to have room for.
    tokens: those of them that states are for, without lookahead.
    encoder: tokens of the encoder to have pages for.
    whole: tokens for which there must be pages now, or nothing is done; 0 for
      no such wish.
    spare: pages that must stay free, even for a whole sequence.
    reserved: pages that must stay free beside them; the same in all rows.
    publish: tokens to publish up to; less than are published for none.
    prompt, junction: see `SlotHashes`.
    since: value of `PrefixIndex.clock` when the scheduling step began, as
      bits; states published after it are not written yet.
  """

  slots: Array
  behind: Array
  external: Array
  room: Array
  tokens: Array
  encoder: Array
  whole: Array
  spare: Array
  reserved: Array
  publish: Array
  prompt: Array
  junction: Array
  since: Array


class Hits(NamedTuple):
  """Pages that requests begin with; P of them at most.

  Attributes:
    pages: int32[G, R, P], the null page where a window has moved on.
    stop: int32[R, G], how many.
    salts: uint32[R, 4].
  """

  pages: Array
  stop: Array
  salts: Array


class Plan(NamedTuple):
  """Columns of the rows' page tables; int32[R, G] each.

  Attributes:
    null: leading null pages.
    hit: pages that are held before, or found.
    external: one past those for tokens from elsewhere.
    fresh: the first column that is filled from the free queue.
    stop: one past all.
    need: pages that leave the free queue.
  """

  null: Array
  hit: Array
  external: Array
  fresh: Array
  stop: Array
  need: Array


def fits(
  state: CacheState,
  call: Call,
  hits: Hits | None,
  held: Array,
  begins: Array,
  caps: tuple[int, ...],
) -> Array:
  """bool[R]: rows whose whole sequences have room, where that was asked."""
  asked = call.slots < state.config.num_slots
  if hits is None:
    return asked
  columns = columns_for(state.config, call, call.whole, call.whole)
  columns = jnp.minimum(columns, jnp.asarray(caps, jnp.int32)[None])
  plan = planned(state, call, hits, held, begins, columns)
  need = jnp.sum(plan.need, axis=1, dtype=jnp.int32) + call.spare
  return asked & ((call.whole == 0) | (need <= state.pool.queue.num_free))


def planned(
  state: CacheState,
  call: Call,
  hits: Hits | None,
  held: Array,
  begins: Array,
  required: Array,
) -> Plan:
  """Where so many columns int32[R, G] come from, and what they cost."""
  config = state.config
  if hits is None:
    stop = jnp.maximum(required, held)
    fresh = recurrent.first_fresh(config, held, stop, begins)
    nothing = jnp.zeros_like(held)
    return Plan(nothing, held, held, fresh, stop, stop - fresh)
  skipped = groups.skipped_pages(config, call.behind)
  attaches = jnp.any(hits.stop > 0, axis=1) | (call.external > 0)
  attaches = (begins & attaches)[:, None]
  null = jnp.where(attaches, skipped, 0)
  hit = jnp.where(attaches, jnp.maximum(skipped, hits.stop), held)
  arriving = groups.by_group(
    config, lambda kind, _: call.behind > kind.num_skipped(call.behind)
  )
  arriving &= attaches & (call.external > 0)[:, None]
  arriving &= ~groups.holds_encoder(config, arriving.shape)
  reached = groups.by_group(config, lambda _, size: -(-call.behind // size))
  external = jnp.where(arriving, jnp.maximum(hit, reached), hit)
  covered = jnp.where(begins[:, None], jnp.maximum(skipped, hit), held)
  used = _used(hits, null)
  waking = used & page_pool.is_free(state.pool, hits.pages)
  waking = jnp.sum(waking & attaches.T[..., None], axis=2, dtype=jnp.int32).T
  stop = jnp.maximum(required, external)
  fresh = recurrent.first_fresh(config, external, stop, begins)
  need = jnp.maximum(required - covered, 0)
  if config.holds_states:
    states = jnp.asarray([[kind.holds_states for kind in config.groups]])
    need = jnp.where(states, external - hit + stop - fresh, need)
    waking += jnp.where(
      states & _unwritten(state, call, hits), config.num_pages, 0
    )
  return Plan(null, hit, external, fresh, stop, need + waking)


def columns_for(
  config: CacheConfig, call: Call, room: Array, tokens: Array
) -> Array:
  """int32[R, G]: columns for so much room, or tokens in groups with states."""

  def columns(kind: GroupKind, size: int) -> Array:
    if kind.holds_encoder:
      return kind.num_columns(call.encoder, size)
    return kind.num_columns(tokens if kind.holds_states else room, size)

  return groups.by_group(config, columns)


def _unwritten(state: CacheState, call: Call, hits: Hits) -> Array:
  """bool[R, G]: whether the last page of hits was published in this step."""
  index = state.pool.index
  if index is None:
    return hits.stop < 0
  last = (hits.stop.T - 1)[..., None]
  page = jnp.take_along_axis(hits.pages, jnp.maximum(last, 0), axis=2)[..., 0]
  page = jnp.where(hits.stop.T > 0, page, 0).reshape(-1)
  keys, tokens = (
    prefix_index.key_of(index, page),
    masked.take(index.tokens, page),
  )
  newest = prefix_index.lookup(index, keys, tokens, newest=True)
  age = index.clock - prefix_index.stamp_of(index, newest)
  age = age.reshape(hits.stop.T.shape).T
  since = index.clock - lax.bitcast_convert_type(call.since, jnp.uint32)
  return (hits.stop > 0) & (age <= since[:, None])


def _used(hits: Hits, first: Array) -> Array:
  """bool[G, R, P]: the pages of hits from columns `first` int32[R, G] on."""
  column = jnp.arange(hits.pages.shape[2], dtype=jnp.int32)[None, None]
  stop = hits.stop.T[..., None]
  return (column >= first.T[..., None]) & (column < stop)


def sound(
  state: CacheState, call: Call, hits: Hits | None, tokens: Array
) -> Array:
  """bool[R]: whether the pages of hits hold what their requests begin with.

  Between the lookup and now they may have been handed to somebody else.
  """
  config, index = state.config, state.pool.index
  if hits is None:
    return call.slots >= 0
  used = _used(hits, groups.skipped_pages(config, call.behind))
  if index is None:
    return ~jnp.any(used, axis=(0, 2))

  def compare() -> Array:
    columns = tokens.shape[1] // config.page_size
    held = tokens[:, : columns * config.page_size]
    held = held.reshape(-1, columns, config.page_size)
    root = hashing.root_key(config, state.epoch, hits.salts)
    chain = hashing.row_keys(config, root, held)
    sound = call.slots >= 0
    for group in range(config.num_groups):
      keys = hashing.keys_of_group(config, chain, group)
      width = min(hits.pages.shape[2], keys.shape[1])
      pages, own = hits.pages[group, :, :width], used[group, :, :width]
      same = prefix_index.key_of(index, pages) == keys[:, :width]
      same = jnp.all(same, axis=2) & prefix_index.contains(index, pages)
      sound &= jnp.all(same | ~own, axis=1)
      sound &= ~jnp.any(used[group, :, width:], axis=1)
    return sound

  return lax.cond(jnp.any(used), compare, lambda: call.slots >= 0)
