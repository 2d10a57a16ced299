"""submit: adds prompts to the shards with the least work."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import first_code
from jaxkv._src.engine.queue.find_sequences import as_counts
from jaxkv._src.engine.queue.find_sequences import as_mask
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.requests import Requests
from jaxkv._src.engine.queue.requests import as_requests
from jaxkv._src.engine.queue.requests import check_tokens
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import check_rollout
from jaxkv._src.engine.verbs import submit as verb
from jaxkv._src.engine.verbs.submit import Submitted
from jaxkv._src.sharding.mesh_axes import MeshAxes
from jaxkv._src.sharding.mesh_axes import check_axes
from jaxkv._src.sharding.shards import each_shard
from jaxkv._src.sharding.shards import placed
from jaxkv._src.sharding.state_shardings import check_one_shard_each


def submit(
  state: RolloutState,
  requests: Requests,
  *,
  axes: MeshAxes,
  ids: Array | None = None,
  mask: Array | None = None,
) -> tuple[RolloutState, Submitted]:
  """Adds prompts to the shards that have the fewest unfinished sequences.

  Args:
    state: the rollout.
    requests: P prompts, see `jaxkv.rollout.submit`.
    axes: the mesh.
    ids: int32[P], the id of each prompt's first sample; None to continue after
      the largest id of all shards.
    mask: bool[P], the prompts to process; None for all.

  Returns:
    The rollout, and per prompt a `Status` and an id, see
    `jaxkv.rollout.submit`. QUEUE_FULL means that no shard has a group of
    EMPTY rows left.

  Raises:
    TypeError: see `jaxkv.rollout.submit`.
    ValueError: see `jaxkv.rollout.submit`; or a device has several shards.
  """
  check_axes(axes)
  check_rollout(state)
  requests = as_requests(requests, state.config)
  if axes.data is None:
    return verb.submit(state, requests, ids=ids, mask=mask)
  check_one_shard_each(state, axes)
  mask = as_mask(mask, requests.tokens.shape[0])
  check_tokens("requests.tokens", requests.tokens, requests.lengths, mask=mask)
  if ids is not None:
    ids = as_counts("ids", ids, requests.tokens.shape[0])
  return _submit(state, requests, ids, mask, axes)


@functools.partial(jax.jit, static_argnums=4)
def _submit(state, requests, ids, mask, axes):
  num_prompts = requests.tokens.shape[0]
  samples = state.config.num_samples

  def of_shard(state, requests, ids, mask):
    queue = state.queue
    requests = verb.matching(queue, requests, state.config)
    _, is_bad = verb.new_rows(state, requests)
    is_bad |= ~mask
    # All shards continue after the largest id of any shard.
    next_id = lax.pmax(queue.next_id, axes.data)
    if ids is None:
      ids = next_id + _rank(~is_bad) * samples
    is_used = lax.pmax(verb.are_used(queue, ids, samples), axes.data)
    is_taken = is_used | verb.are_repeated(ids, ~is_bad & ~is_used, samples)
    # Refused prompts take no rows, so shards are chosen for valid prompts only.
    owners = _choose_shards(queue.status, num_prompts, samples, axes)
    owner = indexing.take(owners, _rank(~is_bad & ~is_taken))
    code = first_code(
      (~mask, Status.SKIPPED),
      (is_bad, Status.BAD_LENGTH),
      (is_taken, Status.BAD_SEQUENCE),
      (owner < 0, Status.QUEUE_FULL),
    )
    is_valid = code == Status.OK
    is_mine = is_valid & (owner == lax.axis_index(axes.data))
    queue = dataclasses.replace(queue, next_id=next_id)
    state = dataclasses.replace(state, queue=queue)
    state, _ = verb.submit(state, requests, ids=ids, mask=is_mine)
    # All shards compute the same codes and ids.
    return state, Submitted(code=code, ids=jnp.where(is_valid, ids, -1))

  state, out = each_shard(of_shard, state, requests, ids, mask, axes=axes)
  out = placed(out, axes.everywhere())
  return state, jax.tree.map(lambda leaf: leaf[0], out)


def _rank(is_valid: Array) -> Array:
  """Returns the number of valid prompts before each valid one, int32[P]."""
  return jnp.cumsum(is_valid, dtype=jnp.int32) - 1


def _choose_shards(
  status: Array, num_prompts: int, samples: int, axes: MeshAxes
) -> Array:
  """Returns the least loaded shard for each prompt, int32[P].

  A prompt gets -1 if no shard has a group of EMPTY rows left for it.
  """
  groups = status.reshape(-1, samples)
  is_free = jnp.all(groups == SequenceStatus.EMPTY, axis=1)
  num_free = jnp.sum(is_free, dtype=jnp.int32)
  load = jnp.sum(status < SequenceStatus.DONE, dtype=jnp.int32)
  num_free, load = lax.all_gather((num_free, load), axes.data)
  # `loads[x, i]` is the load of shard x after it gets i prompts with all of
  # their samples. The lowest P loads determine the shards.
  further = jnp.arange(num_prompts, dtype=jnp.int32)
  loads = load[:, None] + further[None] * samples
  is_free = further[None] < num_free[:, None]
  loads = jnp.where(is_free, loads, 2**31 - 1).reshape(-1)
  chosen = jnp.argsort(loads)[:num_prompts]
  owner = (chosen // num_prompts).astype(jnp.int32)
  return jnp.where(loads[chosen] < 2**31 - 1, owner, -1)
