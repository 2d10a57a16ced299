"""generated, harvest: return tokens and log-probs, aligned for a loss."""

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
  """R sequences of up to W tokens, with statistics of each token.

  All arrays [R, W] are aligned with `tokens`. So a loss only shifts the logits
  by one column: `logits[:, :-1]` predict `tokens[:, 1:]`, with `mask[:, 1:]`.

  Attributes:
    ids: the id of each sequence.  # int32[R]
    tokens: the prompt, sampled tokens and those of `extend`; then 0.
      # int32[R, W]
    positions: 0 .. W - 1.  # int32[R, W]
    lengths: the length of each sequence, including its prompt.  # int32[R]
    prompt_lengths: the length of the first prompt.  # int32[R]
    turn_starts: the number of tokens before the last turn's samples.
      # int32[R]
    mask: True for sampled tokens, which a loss uses.  # bool[R, W]
    log_probs: the log-prob of each sampled token in the distribution that it
      was sampled from, after `Sampling` and `process`; 0 elsewhere.
      # float32[R, W]
    versions: the version of the weights that sampled each token; -1 elsewhere.
      # int32[R, W]
    records: optional statistics, see `RolloutConfig`.
    experts: the experts of each token in each MoE layer, for
      `jaxkv.models.forward_uncached(experts=)`; -1 for tokens that were never
      computed, such as the last one. Recomputed tokens have the experts of
      their last computation. None unless `RolloutConfig.record_experts`.
      # int16 or int32[R, W, J, k]
    finish: the reason for the end of each sequence, a `Finish`.  # int32[R]
    stop: the stop token, or the index of the stop string, that ended it; -1 for
      none.  # int32[R]
    valid: True for rows with a sequence. Other rows are 0, and -1 in `ids`,
      `versions` and `stop`.  # bool[R]
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
  """Returns the current tokens of the sequences of all Q rows, in order."""
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
  """Returns sequences of `rows`, int32[R]; rows out of range are not valid."""
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
  """Result of `harvest`; a row is OK if its sequence was removed.

  Attributes:
    code: a `Status` for each sequence.  # int32[R]
    results: the sequences; only rows that are OK are valid.
  """

  results: Generated


def harvest(
  state: RolloutState,
  ids: Array | None = None,
  *,
  mask: Array | None = None,
  groups: bool = False,
) -> tuple[RolloutState, Harvested]:
  """Removes ended sequences from the queue, and sets their rows to EMPTY.

  `submit` can reuse the rows of a prompt when all of them are EMPTY.

  Args:
    state: the rollout.
    ids: int32[R], ids of sequences; None for all Q rows, where sequences that
      have not ended are SKIPPED.
    mask: bool[R], the rows to process; None for all.
    groups: static; whether to keep sequences until all samples of their prompt
      have ended.

  Returns:
    The rollout, and per row OK, SKIPPED, BAD_SEQUENCE, or UNFINISHED if the
    sequence, or with `groups` its group, has not ended.

  Raises:
    TypeError: `ids` does not hold integers, or `mask` bools.
    ValueError: an argument has the wrong shape.
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
