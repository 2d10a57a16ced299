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
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.expert_records import save_experts
from jaxkv._src.engine.queue.find_sequences import as_ids
from jaxkv._src.engine.queue.find_sequences import as_mask
from jaxkv._src.engine.queue.find_sequences import find
from jaxkv._src.engine.queue.queue import NOT_SAMPLED
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.queue import has_ended
from jaxkv._src.engine.queue.queue import set_status
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import check_single
from jaxkv._src.sampling.statistics import Records


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
    prompt_lengths: the length of each prompt in `Requests`.  # int32[R]
    turn_starts: the length at the start of the last turn.  # int32[R]
    mask: True for sampled tokens, which a loss uses.  # bool[R, W]
    log_probs: the log-prob of each sampled token in the distribution that it
      was sampled from, after `Sampling` and `process`; 0 elsewhere.
      # float32[R, W]
    versions: the version of the weights that sampled each token; -1 elsewhere.
      # int32[R, W]
    records: optional statistics, see `RolloutConfig`.
    experts: the experts of each token in each MoE layer, for
      `jaxkv.models.forward_uncached(experts=)`; -1 for tokens that were never
      computed, such as the last one. If the next token was sampled, they are
      the experts with which its log-prob was computed, also if the token was
      recomputed later; else those of the last computation. None unless
      `RolloutConfig.record_experts`.
      # int16 or int32[R, W, J, k]
    finish: the reason for the end of each sequence, a `Finish`.  # int32[R]
    code: why a sequence failed, a `jaxkv.Status`; OK for other sequences.
      # int32[R]
    stop: the stop token, or the index of the stop string, that ended the
      sequence; -1 for none.  # int32[R]
    is_new: True for sequences that ended in the last call of `generate`.
      # bool[R]
    valid: True for rows with a sequence. Other rows are 0, but -1 in `ids`,
      `versions`, `stop` and `experts`. `positions` are the same in all rows.
      # bool[R]
    config: the options of the rollout, from which `grouped` takes its sizes.
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
  code: Array
  stop: Array
  is_new: Array
  valid: Array
  config: RolloutConfig = dataclasses.field(metadata={"static": True})


def generated(state: RolloutState) -> Generated:
  """Returns the sequences of all Q rows in order, ended or not."""
  check_single(state)
  return _generated(state)


@jax.jit
def _generated(state: RolloutState) -> Generated:
  memory = state.memory
  # Expert ids of running sequences are still in their pages.
  queue = save_experts(state.queue, memory.kv, memory.cache, state.slots.row)
  rows = jnp.arange(queue.size, dtype=jnp.int32)
  rows = indexing.where_valid(queue.status != SequenceStatus.EMPTY, rows)
  return _take_rows(queue, rows, state.config)


def _take_rows(queue: Queue, rows: Array, config: RolloutConfig) -> Generated:
  """Returns sequences of rows int32[R]; rows out of range are not valid."""

  def taken(array: Array, fill: int = 0) -> Array:
    return indexing.take(array, rows, fill=fill)

  versions = taken(queue.versions, NOT_SAMPLED)
  column = jnp.arange(queue.width, dtype=jnp.int32)[None]
  experts = queue.experts
  return Generated(
    ids=taken(queue.ids, -1),
    tokens=taken(queue.tokens),
    positions=jnp.broadcast_to(column, versions.shape),
    lengths=taken(queue.length),
    prompt_lengths=taken(queue.prompt_length),
    turn_starts=taken(queue.start),
    mask=versions != NOT_SAMPLED,
    log_probs=taken(queue.log_probs),
    versions=versions,
    records=jax.tree.map(taken, queue.records),
    experts=None if experts is None else taken(experts, -1),
    finish=taken(queue.finish),
    code=taken(queue.code),
    stop=taken(queue.stop, -1),
    is_new=taken(queue.is_new),
    valid=rows < queue.no_row,
    config=config,
  )


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
  whole_prompts: bool = False,
) -> tuple[RolloutState, Harvested]:
  """Removes ended sequences from the queue, and returns their tokens.

  Their rows become EMPTY. `submit` reuses the rows of a whole EMPTY group.

  Args:
    state: the rollout.
    ids: int32[R], ids of sequences. None for all Q rows; rows without an ended
      sequence are then SKIPPED.
    mask: bool[R], the rows to process; None for all.
    whole_prompts: static; True to remove a sequence only after all samples of
      its prompt have ended or were removed.

  Returns:
    The rollout, and per row OK, SKIPPED, BAD_SEQUENCE, or UNFINISHED if the
    sequence, or with `whole_prompts` a sample of its prompt, has not ended.
  """
  check_single(state)
  if ids is not None:
    ids = as_ids(ids)
  rows = state.queue.size if ids is None else ids.shape[0]
  return _harvest(state, ids, as_mask(mask, rows), bool(whole_prompts))


@jax.jit(static_argnums=3)
def _harvest(
  state: RolloutState, ids: Array | None, mask: Array, whole_prompts: bool
) -> tuple[RolloutState, Harvested]:
  state, ids, mask = sharding.match_varying_axes((state, ids, mask))
  queue, samples = state.queue, state.config.num_samples
  is_ready = has_ended(queue.status)
  if whole_prompts:
    status = queue.status.reshape(-1, samples)
    is_whole = jnp.all(status >= SequenceStatus.DONE, axis=1)
    is_ready &= jnp.repeat(is_whole, samples)
  if ids is None:
    rows = jnp.arange(queue.size, dtype=jnp.int32)
    code = first_code((~mask | ~is_ready, Status.SKIPPED))
    code = jnp.broadcast_to(code, rows.shape)
  else:
    rows, _, code = find(queue, ids, mask)
    is_early = ~indexing.take(is_ready, rows, fill=False)
    code = first_code((code != Status.OK, code), (is_early, Status.UNFINISHED))
  is_served = code == Status.OK
  target_rows = indexing.where_valid(is_served, rows)
  results = _take_rows(queue, target_rows, state.config)
  queue = set_status(queue, rows, is_served, SequenceStatus.EMPTY)
  state = dataclasses.replace(state, queue=queue)
  return state, Harvested(code=code, results=results)
