"""branch: copies sequences, which continue independently."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.cache.state import Outcome
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import first_code
from jaxkv._src.engine.expert_records import save_experts
from jaxkv._src.engine.queue.enqueue import sequence_keys
from jaxkv._src.engine.queue.find_sequences import as_ids
from jaxkv._src.engine.queue.find_sequences import as_mask
from jaxkv._src.engine.queue.find_sequences import find
from jaxkv._src.engine.queue.page_keys import rehash
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import check_single
from jaxkv._src.engine.verbs.submit import places
from jaxkv._src.engine.verbs.submit import put_rows
from jaxkv._src.engine.verbs.submit import take_rows
from jaxkv._src.engine.verbs.submit import with_ids_used


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Branched(Outcome):
  """Result of `branch`; a row is OK if its sequence was copied.

  Attributes:
    code: a `Status` for each sequence.  # int32[R]
    ids: the id of the first copy of each sequence; the other copies have the
      next ids. -1 if the sequence was refused.  # int32[R]
  """

  ids: Array


def branch(
  state: RolloutState,
  ids: Array,
  num_branches: int,
  *,
  mask: Array | None = None,
) -> tuple[RolloutState, Branched]:
  """Copies sequences, for example to search a tree of continuations.

  A copy has the tokens, masks, log-probs and settings of its sequence, and a
  random key of its own. A copy of a running sequence waits, and continues from
  the full pages of the sequence, which they share. So at most one page of
  tokens is computed again; in models with windows or states more, possibly all
  tokens. A copy of an ended sequence has ended too, until `extend` resumes it.

  The copies of a sequence take the rows of one prompt in the queue, and are
  samples of the same prompt in `harvest(whole_prompts=True)`.

  Args:
    state: the rollout.
    ids: int32[R], ids of sequences.
    num_branches: static; n, the number of copies of each sequence, 1 .. G.
    mask: bool[R], the rows to process; None for all.

  Returns:
    The rollout, and per row OK, SKIPPED, BAD_SEQUENCE (no sequence has the id,
    or all ids are used), ENDED for a failed sequence, or QUEUE_FULL.

  Raises:
    ValueError: `num_branches` is out of range.
  """
  check_single(state)
  ids = as_ids(ids)
  count = as_count("num_branches", num_branches, 1)
  if count > state.config.num_samples:
    raise ValueError(
      "`num_branches` must be at most RolloutConfig.num_samples, "
      f"{state.config.num_samples}, got {count}; call `branch` several times."
    )
  return _branch(state, ids, as_mask(mask, ids.shape[0]), count)


@functools.partial(jax.jit, static_argnums=3)
def _branch(
  state: RolloutState, ids: Array, mask: Array, count: int
) -> tuple[RolloutState, Branched]:
  state, ids, mask = sharding.match_varying_axes((state, ids, mask))
  queue, memory = state.queue, state.memory
  samples = state.config.num_samples
  rows, status, code = find(queue, ids, mask)
  code = first_code(
    (code != Status.OK, code),
    (status == SequenceStatus.FAILED, Status.ENDED),
  )
  first_ids, groups, code = places(queue, code, samples)
  is_served = code == Status.OK
  first_rows = indexing.where_valid(is_served, groups * samples)[:, None]
  copy = jnp.arange(count, dtype=jnp.int32)
  new_rows = (first_rows + copy[None]).reshape(-1)
  # Expert ids of running sequences are still in their pages.
  saved = save_experts(queue, memory.kv, memory.cache, state.slots.row)
  parents = indexing.where_valid(is_served, rows)
  copies = take_rows(saved, jnp.repeat(parents, count))
  runs = copies.status == SequenceStatus.RUNNING
  copy_ids = (first_ids[:, None] + copy[None]).reshape(-1)
  copies = dataclasses.replace(
    copies,
    ids=copy_ids,
    keys=sequence_keys(state.key, copy_ids, None),
    status=jnp.where(runs, int(SequenceStatus.WAITING), copies.status),
    overtaken=jnp.zeros_like(copies.overtaken),
    is_new=jnp.zeros_like(copies.is_new),
    page_keys=jax.tree.map(
      lambda keys: jnp.zeros((copy_ids.shape[0], *keys.shape[1:]), keys.dtype),
      queue.page_keys,
    ),
  )
  queue = put_rows(queue, new_rows, copies)
  queue = with_ids_used(queue, first_ids, is_served, samples)
  queue = rehash(queue, memory.cache, new_rows)
  state = dataclasses.replace(state, queue=queue)
  return state, Branched(code=code, ids=jnp.where(is_served, first_ids, -1))
