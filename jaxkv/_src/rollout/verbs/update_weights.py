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
from jaxkv._src.rollout import sequences as queue
from jaxkv._src.rollout.sequences import Sequences
from jaxkv._src.rollout.state import RolloutState
from jaxkv._src.rollout.state import rehashed
from jaxkv._src.rollout.verbs.find import leave_slots

Policy = Literal["recompute", "keep", "drop"]


def update_weights(
  state: RolloutState, policy: Policy = "recompute"
) -> RolloutState:
  """Starts a new version of the weights, before `generate` receives them.

  The version, `state.cache.epoch`, increases by one. Pages of earlier versions
  are never hit again, in this rollout or a later one of the same cache.
  `Generated.versions` has the version that sampled each token.

  | `policy`    | unfinished sequences                                       |
  |-------------|------------------------------------------------------------|
  | "recompute" | keep their tokens; the new weights recompute all K/V       |
  | "keep"      | keep running with their K/V                                |
  | "drop"      | lose their samples, and restart from the first prompt      |

  Sequences that have ended are unchanged. With "keep", log-probs of later
  tokens belong to a mixture of versions.

  Args:
    state: the rollout.
    policy: static; see the table.

  Returns:
    The rollout.

  Raises:
    ValueError: `policy` is not in the table.
  """
  if policy not in get_args(Policy):
    known = ", ".join(map(repr, get_args(Policy)))
    raise ValueError(f"`policy` must be one of {known}, got {policy!r}.")
  return _update_weights(state, policy)


@jax.jit(static_argnums=1)
def _update_weights(state: RolloutState, policy: Policy) -> RolloutState:
  state = sharding.match_varying_axes(state)
  none, slots = state.sequences.length.shape[0], state.running.shape[0]
  if policy != "keep":
    state = leave_slots(state, jnp.ones((slots,), bool))
  if policy == "drop":
    waits = state.sequences.status == queue.SequenceStatus.WAITING
    state = dataclasses.replace(
      state,
      sequences=_begun_again(state.sequences, waits),
      computed=jnp.where(
        waits,
        jnp.minimum(state.computed, state.sequences.prompt_length),
        state.computed,
      ),
    )
  cache, _ = new_epoch(state.cache)
  state = dataclasses.replace(state, cache=cache)
  rows = jnp.arange(none, dtype=jnp.int32)
  waits = state.sequences.status == queue.SequenceStatus.WAITING
  return rehashed(state, indexing.where_valid(waits, rows))


def _begun_again(sequences: Sequences, mask: Array) -> Sequences:
  """Resets the sequences in `mask`, bool[Q], to their first prompt."""
  width = sequences.tokens.shape[1]
  column = jnp.arange(width, dtype=jnp.int32)[None]
  prompt = sequences.prompt_length
  lost = mask[:, None] & (column >= prompt[:, None])

  def cleared(array: Array) -> Array:
    where = lost.reshape(*lost.shape, *(1,) * (array.ndim - 2))
    return jnp.where(where, jnp.zeros((), array.dtype), array)

  budget, experts = sequences.budget, sequences.experts
  if experts is not None:
    experts = jnp.where(
      mask[:, None, None, None], jnp.full_like(experts, -1), experts
    )
  return dataclasses.replace(
    sequences,
    tokens=cleared(sequences.tokens),
    length=jnp.where(mask, prompt, sequences.length),
    start=jnp.where(mask, prompt, sequences.start),
    limit=jnp.where(mask, prompt + budget, sequences.limit),
    log_probs=cleared(sequences.log_probs),
    versions=jnp.where(lost, queue.NOT_DRAWN, sequences.versions),
    records=jax.tree.map(cleared, sequences.records),
    experts=experts,
  )
