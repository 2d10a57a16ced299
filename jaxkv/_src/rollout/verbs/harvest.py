"""generated, harvest: what a rollout has drawn, aligned for a loss."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.cache.state import Outcome
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import first_code
from jaxkv._src.rollout import sequences as queue
from jaxkv._src.rollout.routing import with_experts
from jaxkv._src.rollout.sequences import Records
from jaxkv._src.rollout.sequences import Sequences
from jaxkv._src.rollout.state import RolloutState
from jaxkv._src.rollout.until import has_ended
from jaxkv._src.rollout.verbs.find import as_ids
from jaxkv._src.rollout.verbs.find import as_mask
from jaxkv._src.rollout.verbs.find import find


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
  """R sequences of up to W tokens, with what is known of each token.

  Every array has what it says of a token in the column of that token. So a loss
  shifts the model's logits by one column, and nothing else:
  `logits[:, :-1]` are for `tokens[:, 1:]`, with `mask[:, 1:]`.

  Attributes:
    ids: the number of each sequence.  # int32[R]
    tokens: the prompt, what was drawn, and what others said; then 0.
      # int32[R, W]
    positions: 0 .. W - 1.  # int32[R, W]
    lengths: tokens of each sequence, with its prompt.  # int32[R]
    prompt_lengths: tokens of the first prompt.  # int32[R]
    turn_starts: tokens before what was drawn in the last turn.  # int32[R]
    mask: the tokens that were drawn; all others are no part of a loss.
      # bool[R, W]
    log_probs: of the drawn tokens, in the distribution that each was drawn
      from: after temperature, top-k, and all that `Sampling` and `process`
      change. 0 elsewhere.  # float32[R, W]
    versions: of the weights that drew each token; -1 elsewhere.
      # int32[R, W]
    records: what else is kept of each token, where `RolloutConfig` asks.
    experts: that each token used in each layer with experts, if
      `RolloutConfig` asks, for `jaxkv.models.forward_uncached(experts=)`; -1
      for those that the model never ran, such as the last one. After a
      preemption, in a later turn, or with new weights they are those of the K/V
      computed last.  # int16 or int32[R, W, J, k]
    finish: why each sequence ended, a `Finish`.  # int32[R]
    stop: the stop token, or the index of the stop string, that ended it; -1
      for none.  # int32[R]
    valid: the rows that are sequences; in the others all is 0, and `ids`,
      `versions` and `stop` are -1.  # bool[R]
  """

  ids: Array
  tokens: Array
  positions: Array
  lengths: Array
  prompt_lengths: Array
  turn_starts: Array
  mask: Array
  log_probs: Array
  versions: Array
  records: Records
  experts: Array | None
  finish: Array
  stop: Array
  valid: Array


def generated(state: RolloutState) -> Generated:
  """What the sequences of all Q rows have become so far, in their order."""
  return _generated(state)


@jax.jit
def _generated(state: RolloutState) -> Generated:
  sequences = with_experts(
    state.sequences, state.kv, state.cache, state.running
  )
  state = dataclasses.replace(state, sequences=sequences)
  rows = jnp.arange(state.sequences.length.shape[0], dtype=jnp.int32)
  valid = state.sequences.status != queue.SequenceStatus.EMPTY
  return _rows(state, indexing.where_valid(valid, rows))


def _rows(state: RolloutState, rows: Array) -> Generated:
  """The sequences of some rows, int32[R]; those out of range are not valid."""
  sequences = state.sequences
  versions = indexing.take(sequences.versions, rows, fill=queue.NOT_DRAWN)
  width = sequences.tokens.shape[1]
  column = jnp.arange(width, dtype=jnp.int32)[None]
  return Generated(
    ids=indexing.take(sequences.ids, rows, fill=-1),
    tokens=indexing.take(sequences.tokens, rows),
    positions=jnp.broadcast_to(column, versions.shape),
    lengths=indexing.take(sequences.length, rows),
    prompt_lengths=indexing.take(sequences.prompt_length, rows),
    turn_starts=indexing.take(sequences.start, rows),
    mask=versions != queue.NOT_DRAWN,
    log_probs=indexing.take(sequences.log_probs, rows),
    versions=versions,
    records=_taken(sequences.records, rows),
    experts=_experts(sequences, rows),
    finish=indexing.take(sequences.finish, rows),
    stop=indexing.take(sequences.stop, rows, fill=-1),
    valid=rows < sequences.length.shape[0],
  )


def _experts(sequences: Sequences, rows: Array) -> Array | None:
  experts = sequences.experts
  return None if experts is None else indexing.take(experts, rows, fill=-1)


def _taken(records: Records, rows: Array) -> Records:
  return jax.tree.map(lambda leaf: indexing.take(leaf, rows), records)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Harvested(Outcome):
  """What `harvest` took out; a row is OK if its sequence is among them.

  Attributes:
    code: a `Status` for each sequence.  # int32[R]
    results: the sequences; those of rows that are not OK are not valid.
  """

  results: Generated


def harvest(
  state: RolloutState,
  ids: Array | None = None,
  *,
  mask: Array | None = None,
  groups: bool = False,
) -> tuple[RolloutState, Harvested]:
  """Takes sequences that have ended out of the queue. Their rows are EMPTY.

  `submit` uses the rows of a prompt again when all of them are EMPTY.

  Args:
    state: the rollout.
    ids: int32[R], numbers of sequences; None for those of all Q rows, of which
      the ones that have not ended are skipped.
    mask: bool[R], the rows that count; None for all.
    groups: static; whether to leave sequences whose prompt has samples that
      have not ended.

  Returns:
    The rollout, and per row OK, SKIPPED, BAD_SEQUENCE, or UNFINISHED for one
    that has not ended, or with `groups` for one whose group has not.

  Raises:
    TypeError: `ids` are no integers, or `mask` holds no bools.
    ValueError: one of them has another shape.
  """
  if ids is not None:
    ids = as_ids(ids)
  total = state.sequences.ids.shape[0] if ids is None else ids.shape[0]
  return _harvest(state, ids, as_mask(mask, total), bool(groups))


@jax.jit(static_argnums=3)
def _harvest(
  state: RolloutState, ids: Array | None, mask: Array, groups: bool
) -> tuple[RolloutState, Harvested]:
  state, ids, mask = sharding.match_varying_axes((state, ids, mask))
  sequences = state.sequences
  ready = has_ended(sequences.status)
  if groups:
    together = sequences.status.reshape(-1, state.config.num_samples)
    whole = jnp.all(together >= queue.SequenceStatus.DONE, axis=1)
    ready &= jnp.repeat(whole, state.config.num_samples)
  if ids is None:
    rows = jnp.arange(sequences.ids.shape[0], dtype=jnp.int32)
    code = first_code((~mask | ~ready, Status.SKIPPED))
    code = jnp.broadcast_to(code, rows.shape)
  else:
    rows, _, code = find(state, ids, mask)
    early = ~indexing.take(ready, rows, fill=False)
    code = first_code((code != Status.OK, code), (early, Status.UNFINISHED))
  served = code == Status.OK
  results = _rows(state, indexing.where_valid(served, rows))
  sequences = queue.with_status(
    sequences, rows, served, queue.SequenceStatus.EMPTY
  )
  state = dataclasses.replace(state, sequences=sequences)
  return state, Harvested(code=code, results=results)
