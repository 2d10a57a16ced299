"""rebalance: moves sequences to shards with less work."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.sharding.mesh_axes import MeshAxes
from jaxkv._src.sharding.mesh_axes import check_axes
from jaxkv._src.sharding.shards import each_shard
from jaxkv._src.sharding.state_shardings import check_one_shard_each
from jaxkv._src.transfer.export import export
from jaxkv._src.transfer.import_sequences import import_sequences


def rebalance(
  state: RolloutState,
  *,
  axes: MeshAxes,
  max_groups: int = 4,
  max_pages: int = 0,
) -> RolloutState:
  """Moves sequences from shards with more left work to others.

  Call it, jitted with the state donated, between calls of `generate` with
  `Until(steps=...)`. Sequences keep their ids and sample the same tokens.

  The work of a shard is the number of tokens that its unfinished sequences may
  still sample; limits such as `Sampling.max_tokens` make this more accurate. In
  each of ceil(log2(X)) rounds, each of the X shards exchanges groups of samples
  with at most one other shard. The shard with more work sends its last groups,
  first those without a slot, and gets as many ended or EMPTY groups in return.
  A group stays where it is if the other shard uses one of its ids.

  Args:
    state: the rollout, from `jaxkv.sharding.init`.
    axes: the mesh, with `axes.data`, and one shard on each of its devices.
    max_groups: static; the maximum number of groups that two shards exchange.
    max_pages: static; the maximum number of pages that a shard sends in an
      exchange. During the exchange, its device has copies of these pages. With
      0, only sequences without a slot move.

  Returns:
    The rollout. Two shards with different versions of weights exchange nothing.

  Raises:
    TypeError: `max_groups` or `max_pages` is not an int.
    ValueError: `max_groups` or `max_pages` is out of range, `axes.data` is
      None, or a device has several shards.
  """
  max_groups = as_count("max_groups", max_groups, 1)
  max_pages = as_count("max_pages", max_pages, 0)
  check_axes(axes)
  check_one_shard_each(state, axes)
  return _rebalance(state, axes, max_groups, max_pages)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _rebalance(
  state: RolloutState, axes: MeshAxes, max_groups: int, max_pages: int
) -> RolloutState:
  def of_shard(state: RolloutState) -> RolloutState:
    bit = 1
    while bit < axes.num_shards:
      state = _exchange(state, bit, axes, max_groups, max_pages)
      bit *= 2
    return state

  return each_shard(of_shard, state, axes=axes)


def _exchange(
  state: RolloutState, bit: int, axes: MeshAxes, max_groups: int, max_pages: int
) -> RolloutState:
  """Exchanges groups in each pair of shards whose numbers differ in `bit`."""
  pairs = [
    (shard, shard ^ bit)
    for shard in range(axes.num_shards)
    if shard ^ bit < axes.num_shards
  ]

  def other(tree):
    return lax.ppermute(tree, axes.data, pairs)

  queue = state.queue
  samples = state.config.num_samples
  status = queue.status.reshape(-1, samples)
  queue_position = jnp.max(queue.place.reshape(status.shape), axis=1)
  # Floats, because the sum over a queue can exceed int32.
  left = jnp.maximum(queue.limit - queue.length, 1).astype(jnp.float32)
  left = jnp.where(queue.status < SequenceStatus.DONE, left, jnp.float32(0))
  left = jnp.sum(left.reshape(status.shape), axis=1)
  runs = jnp.any(status == SequenceStatus.RUNNING, axis=1)
  is_empty = jnp.all(status == SequenceStatus.EMPTY, axis=1)
  # An id that both shards use would be refused there, and its sequence lost.
  sample = jnp.arange(samples, dtype=jnp.int32)
  first_ids = queue.ids.reshape(status.shape) - sample[None]
  first_ids = jnp.where(status != SequenceStatus.EMPTY, first_ids, -samples)
  first_ids = jnp.max(first_ids, axis=1)
  overlaps = jnp.abs(first_ids[:, None] - other(first_ids)[None]) < samples
  may_move = is_empty | ~jnp.any(overlaps, axis=1)
  load = jnp.sum(left)
  # A shard without a partner receives zeros, so `is_paired` is False.
  is_paired = other(jnp.ones((), bool))
  is_paired &= other(state.memory.cache.epoch) == state.memory.cache.epoch
  excess = jnp.where(is_paired, load - other(load), jnp.float32(0))
  is_candidate = may_move if max_pages else may_move & ~runs
  work = jnp.where(is_candidate, left, jnp.float32(0))
  # The last groups move, first those without a slot.
  last_first = _sorted(work == 0, runs, -queue_position)
  loads = work[last_first]
  # A group moves if this reduces the difference between the two shards.
  moves = (loads > 0) & (2 * jnp.cumsum(loads) - loads < excess)
  count = jnp.minimum(jnp.sum(moves), max_groups)
  # The partner sends as many groups without work as it receives. EMPTY groups
  # come first, because they have no sequences to move.
  free = may_move & (left == 0)
  count = jnp.minimum(count, other(jnp.sum(free)))
  count = jnp.where(excess > 0, count, other(count))
  order = jnp.where(
    excess > 0, last_first, _sorted(~free, ~is_empty, queue_position)
  )
  max_groups = min(max_groups, status.shape[0])
  rank = jnp.arange(max_groups, dtype=jnp.int32)
  groups = jnp.where(rank < count, order[:max_groups], status.shape[0])
  rows = (groups[:, None] * samples + sample[None]).reshape(-1)
  exists = indexing.take(queue.status, rows, fill=SequenceStatus.EMPTY)
  state, exported = export(
    state,
    indexing.take(queue.ids, rows, fill=-1),
    mask=exists != SequenceStatus.EMPTY,
    max_pages=max_pages,
  )
  mask = jnp.broadcast_to(is_paired, rows.shape)
  return import_sequences(state, other(exported), mask=mask)[0]


def _sorted(*keys: Array) -> Array:
  """Returns the groups int32[P], sorted by the first key, then the next."""
  return jnp.lexsort(keys[::-1]).astype(jnp.int32)
