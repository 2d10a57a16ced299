"""Programs of an engine whose state is split into shards, see `MeshAxes.data`.

They have the arguments and results of the programs of one device, and take
`axes`. The rows of all shards follow each other.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.verbs.admit import match as match_rows
from jaxkv._src.engine.generate import Until
from jaxkv._src.engine.hooks import StaticFunction
from jaxkv._src.engine.results.generated import harvest as harvest_rows
from jaxkv._src.engine.score import score as score_groups
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.verbs import branch as branch_verb
from jaxkv._src.engine.verbs import update_weights as weights_verb
from jaxkv._src.engine.verbs.update_weights import Policy
from jaxkv._src.sharding import rollouts
from jaxkv._src.sharding.mesh_axes import MeshAxes
from jaxkv._src.sharding.shards import each_shard


def advance(
  state: RolloutState,
  params: Any,
  until: Until,
  *,
  functions: tuple[StaticFunction, ...],
  axes: MeshAxes,
) -> tuple[RolloutState, Array]:
  """Generates tokens; returns the steps of the shard that made the most."""
  model, process, draft = (static.function for static in functions)
  first_step = state.counters.steps
  state = rollouts.generate(
    params, state, until, axes=axes, model=model, process=process, draft=draft
  )
  return state, jnp.max(state.counters.steps.since(first_step))


def harvest(
  state: RolloutState, *, mask: Array, whole_prompts: bool, axes: MeshAxes
) -> tuple[RolloutState, Any]:
  def of_shard(split: tuple[RolloutState, Array]) -> tuple[RolloutState, Any]:
    state, mask = split
    return harvest_rows(state, mask=mask, whole_prompts=whole_prompts)

  masks = mask.reshape(axes.num_shards, -1)
  state, out = each_shard(of_shard, (state, masks), axes=axes)
  return state, _joined(out)


def of_ids(verb: Callable) -> Callable:
  """Adapts a verb of sequences, whose ids are in any shard."""

  def run(
    state: RolloutState,
    ids: Array,
    *rows: Array,
    axes: MeshAxes,
    **options: Array,
  ) -> tuple[RolloutState, Any]:
    state, out = each_shard(
      lambda state, ids, rows, options: verb(state, ids, *rows, **options),
      state,
      ids,
      rows,
      options,
      axes=axes,
    )
    # The other shards do not know the sequence.
    shard = jnp.argmin(out.code == Status.BAD_SEQUENCE, axis=0)
    row = jnp.arange(shard.shape[0])
    return state, jax.tree.map(lambda leaf: leaf[shard, row], out)

  run.__name__ = verb.__name__
  return run


def branch(
  state: RolloutState,
  ids: Array,
  *,
  mask: Array,
  num_branches: int,
  axes: MeshAxes,
) -> tuple[RolloutState, Any]:
  """Copies sequences to rows of the same shard."""

  def of_shard(
    state: RolloutState, ids: Array, mask: Array
  ) -> tuple[RolloutState, Any]:
    # Each shard gives ids of its own.
    next_id = lax.pmax(state.queue.next_id, axes.data)
    num_ids = ids.shape[0] * state.config.num_samples
    next_id += lax.axis_index(axes.data) * num_ids
    queue = dataclasses.replace(state.queue, next_id=next_id)
    state = dataclasses.replace(state, queue=queue)
    return branch_verb.branch(state, ids, num_branches=num_branches, mask=mask)

  return of_ids(of_shard)(state, ids, mask, axes=axes)


def update_weights(
  state: RolloutState, *, policy: Policy, axes: MeshAxes
) -> tuple[RolloutState, None]:
  def of_shard(state: RolloutState) -> RolloutState:
    return weights_verb.update_weights(state, policy)

  return each_shard(of_shard, state, axes=axes), None


def score(
  state: RolloutState,
  params: Any,
  *groups: Array,
  function: StaticFunction,
  axes: MeshAxes,
  salts: Array | None = None,
  extra: Any = None,
  **options: Any,
) -> tuple[RolloutState, Any]:
  """Scores an equal part of the groups on each shard."""
  num_groups = groups[0].shape[0]
  padding = -num_groups % axes.num_shards

  def parts(array: Array) -> Array:
    widths = [(0, padding)] + [(0, 0)] * (array.ndim - 1)
    array = jnp.pad(array, widths)
    return array.reshape(axes.num_shards, -1, *array.shape[1:])

  def of_shard(split: Any, params: Any) -> tuple[RolloutState, Any]:
    state, groups, salts, extra = split
    return score_groups(
      params,
      state,
      *groups,
      model=function.function,
      salts=salts,
      extra=extra,
      **options,
    )

  split = state, *jax.tree.map(parts, (groups, salts, extra))
  state, scored = each_shard(of_shard, split, params, axes=axes)
  num_computed = jnp.sum(scored.computed_tokens)
  scored = jax.tree.map(lambda leaf: leaf[:num_groups], _joined(scored))
  return state, dataclasses.replace(scored, computed_tokens=num_computed)


def match(
  cache: CacheState,
  tokens: Array,
  lengths: Array,
  salts: Array | None,
  *,
  axes: MeshAxes,
) -> Array:
  """Returns the most tokens of each prompt that a shard has cached."""

  def of_shard(
    cache: CacheState, tokens: Array, lengths: Array, salts: Array | None
  ) -> Array:
    matched = match_rows(cache, tokens, lengths, salts=salts)
    return matched.num_cached_tokens

  counts = each_shard(of_shard, cache, tokens, lengths, salts, axes=axes)
  return jnp.max(counts, axis=0)


def _joined(tree: Any) -> Any:
  """Joins the rows of all shards."""
  return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)
