"""update_weights: starts a new version of the weights."""

import dataclasses
from typing import Literal
from typing import get_args

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.cache.verbs.reset import new_epoch
from jaxkv._src.engine.queue.page_keys import rehash
from jaxkv._src.engine.queue.queue import NOT_SAMPLED
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import check_single
from jaxkv._src.engine.verbs.leave_slots import leave_slots

Policy = Literal["recompute", "keep", "drop"]


def update_weights(
  state: RolloutState, policy: Policy = "recompute"
) -> RolloutState:
  """Starts a new version of the weights; call it before using new weights.

  The version, `state.memory.cache.epoch`, increases by one. Pages of earlier
  versions are never hit again, in this rollout or a later one of the same
  cache. `Generated.versions` has the version that sampled each token.

  | `policy`    | unfinished sequences                                       |
  |-------------|------------------------------------------------------------|
  | "recompute" | keep their tokens; the new weights recompute all K/V       |
  | "keep"      | keep their K/V if they are running                         |
  | "drop"      | lose all tokens after their prompt, and restart from it    |

  Ended sequences and `queue.extra` are unchanged. With "keep", later tokens
  attend to K/V of several versions, so their log-probs match none of them.

  Args:
    state: the rollout.
    policy: static; see the table.

  Raises:
    ValueError: `policy` is not in the table.
  """
  check_single(state)
  if policy not in get_args(Policy):
    policies = ", ".join(map(repr, get_args(Policy)))
    raise ValueError(f"`policy` must be one of {policies}, got {policy!r}.")
  return _update_weights(state, policy)


@jax.jit(static_argnums=1)
def _update_weights(state: RolloutState, policy: Policy) -> RolloutState:
  state = sharding.match_varying_axes(state)
  if policy != "keep":
    state = leave_slots(state, jnp.ones((state.slots.size,), bool))
  queue = state.queue
  waits = queue.status == SequenceStatus.WAITING
  if policy == "drop":
    queue = _restart(queue, waits)
  # The epoch changes before `rehash`, which uses it.
  cache, _ = new_epoch(state.memory.cache)
  rows = jnp.arange(queue.size, dtype=jnp.int32)
  queue = rehash(queue, cache, indexing.where_valid(waits, rows))
  memory = dataclasses.replace(state.memory, cache=cache)
  return dataclasses.replace(state, queue=queue, memory=memory)


def _restart(queue: Queue, mask: Array) -> Queue:
  """Resets the sequences in `mask`, bool[Q], to their prompts."""
  column = jnp.arange(queue.width, dtype=jnp.int32)[None]
  prompt = queue.prompt_length
  is_lost = mask[:, None] & (column >= prompt[:, None])

  def cleared(array: Array) -> Array:
    lost = is_lost.reshape(*is_lost.shape, *(1,) * (array.ndim - 2))
    return jnp.where(lost, jnp.zeros((), array.dtype), array)

  experts = queue.experts
  if experts is not None:
    experts = jnp.where(
      mask[:, None, None, None], jnp.full_like(experts, -1), experts
    )
  computed = jnp.minimum(queue.computed, prompt)
  return dataclasses.replace(
    queue,
    tokens=cleared(queue.tokens),
    length=jnp.where(mask, prompt, queue.length),
    start=jnp.where(mask, prompt, queue.start),
    limit=jnp.where(mask, prompt + queue.budget, queue.limit),
    log_probs=cleared(queue.log_probs),
    versions=jnp.where(is_lost, NOT_SAMPLED, queue.versions),
    records=jax.tree.map(cleared, queue.records),
    experts=experts,
    computed=jnp.where(mask, computed, queue.computed),
  )
