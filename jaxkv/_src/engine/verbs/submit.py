"""submit: adds prompts to a rollout in progress."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.cache.state import Outcome
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import first_code
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.queue.enqueue import new_queue
from jaxkv._src.engine.queue.enqueue import sequence_keys
from jaxkv._src.engine.queue.find_sequences import as_counts
from jaxkv._src.engine.queue.find_sequences import as_mask
from jaxkv._src.engine.queue.queue import FIRST_DRAFT_RATE
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.queue import first_of
from jaxkv._src.engine.queue.queue import order_of
from jaxkv._src.engine.queue.requests import Requests
from jaxkv._src.engine.queue.requests import as_requests
from jaxkv._src.engine.queue.requests import check_columns
from jaxkv._src.engine.queue.requests import check_extra
from jaxkv._src.engine.queue.requests import check_stop_strings
from jaxkv._src.engine.queue.requests import check_tokens
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import check_single
from jaxkv._src.sampling import settings

_OF_WHOLE_QUEUE = {"draft_rates", "next_id", "order", "place", "sampling"}
"""Fields of `Queue` that `put_rows` does not write like the others."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Submitted(Outcome):
  """Result of `submit`; a row is OK if its prompt entered the queue.

  Attributes:
    code: a `Status` for each prompt.  # int32[P]
    ids: the id of each prompt's first sample; the other samples have the next
      G - 1 ids. -1 if the prompt was refused.  # int32[P]
  """

  ids: Array


def submit(
  state: RolloutState,
  requests: Requests,
  *,
  ids: Array | None = None,
  mask: Array | None = None,
) -> tuple[RolloutState, Submitted]:
  """Adds prompts to the queue, in EMPTY rows.

  A prompt needs a group of G rows that are all EMPTY. If there is none, the
  prompt is refused, and can be submitted again after a `harvest`.

  Args:
    state: the rollout.
    requests: P prompts, of fewer than W columns. `salts` and stop strings are
      required if and only if `init` had them. Stop strings must have the
      automata of those in `init`, as the results of `StopStrings.select` have;
      under `jax.jit`, only their shapes are compared. `priority`,
      `log_probs_from`, and the fields of `sampling` except `max_tokens` and
      `seed`, must be None if they were None in `init`. If `init` had them, None
      means priority 0, or turns the field off. `extra` has the tree, row shapes
      and dtypes of `extra` in `init`.
    ids: int32[P], the id of each prompt's first sample. The other samples have
      the next G - 1 ids. Without `Sampling.seed`, a sample's random key depends
      on its id. None to continue after the largest id so far.
    mask: bool[P], the prompts to process; None for all.

  Returns:
    The rollout, and per prompt OK, SKIPPED, QUEUE_FULL, BAD_SEQUENCE (an
    id is in use, out of range, as after 2**31 ids, or that of an earlier prompt
    with valid ids) or BAD_LENGTH (`lengths`, `num_samples` or `max_tokens` is
    out of range, or a sequence could exceed W tokens). `ids`, int32[P], has the
    id of each prompt's first sample, or -1 for a prompt that was refused.

  Raises:
    ValueError: the fields of `requests` do not match those of `init`.
  """
  check_single(state)
  requests = as_requests(requests, state.config)
  requests = matching(state.queue, requests, state.config)
  num_prompts = requests.tokens.shape[0]
  if ids is not None:
    ids = as_counts("ids", ids, num_prompts)
  mask = as_mask(mask, num_prompts)
  check_tokens("requests.tokens", requests.tokens, requests.lengths, mask=mask)
  return _submit(state, requests, ids, mask)


def matching(
  queue: Queue, requests: Requests, config: RolloutConfig
) -> Requests:
  """Returns requests with the optional fields of the queue, or raises."""
  check_columns(requests.tokens.shape[1], queue.width, config)
  if (requests.salts is None) != (queue.salts is None):
    presence = "none" if requests.salts is None else "some"
    raise ValueError(
      "`requests.salts` must be given if and only if `init` had salts, got "
      f"{presence}."
    )
  sampling = requests.sampling
  assert sampling is not None  # `as_requests` sets it.
  strings = queue.sampling.stop_strings
  if strings is not None:
    if sampling.stop_strings is None:
      raise ValueError(
        "`requests.sampling.stop_strings` must be given, because `init` had "
        "some; select those of the new sequences with StopStrings.select."
      )
    check_stop_strings(sampling.stop_strings, strings, "in `init`")
  check_extra(requests.extra, queue.extra, "in `init`")
  return _with_defaults(queue, requests, config)


def _with_defaults(
  queue: Queue, requests: Requests, config: RolloutConfig
) -> Requests:
  """Fills the fields that the queue has and `requests` lack, or raises."""
  num_prompts = requests.tokens.shape[0]
  defaults = {
    "priority": np.zeros((num_prompts * config.num_samples,), np.int32),
    "log_probs_from": np.full((num_prompts,), indexing.NOWHERE, np.int32),
  }
  for name, default in defaults.items():
    is_absent = getattr(requests, name) is None
    if getattr(queue, name) is not None and is_absent:
      requests = dataclasses.replace(requests, **{name: jnp.asarray(default)})
    elif getattr(queue, name) is None and not is_absent:
      raise ValueError(
        f"`requests.{name}` must be None, because it was None in `init`, got "
        "an array; also set it in `init`."
      )
  return requests


@jax.jit
def _submit(
  state: RolloutState, requests: Requests, ids: Array | None, mask: Array
) -> tuple[RolloutState, Submitted]:
  state, requests, ids, mask = sharding.match_varying_axes(
    (state, requests, ids, mask)
  )
  queue = state.queue
  samples = state.config.num_samples
  sampling = requests.sampling
  assert sampling is not None  # `as_requests` sets it.
  new, is_bad = new_rows(state, requests)
  is_taken = jnp.zeros_like(is_bad)
  if ids is not None:
    is_used = are_used(queue, ids, samples)
    is_taken = is_used | are_repeated(ids, mask & ~is_bad & ~is_used, samples)
  code = first_code(
    (~mask, Status.SKIPPED),
    (is_bad, Status.BAD_LENGTH),
    (is_taken, Status.BAD_SEQUENCE),
  )
  first_ids, group, code = places(queue, code, samples, ids)
  is_served = code == Status.OK
  sample = jnp.arange(samples, dtype=jnp.int32)
  sample_ids = (first_ids[:, None] + sample[None]).reshape(-1)
  keys = sequence_keys(state.key, sample_ids, sampling.seed)
  new = dataclasses.replace(new, ids=sample_ids, keys=keys)
  rows = (
    indexing.where_valid(is_served, group * samples)[:, None] + sample[None]
  )
  queue = put_rows(queue, rows.reshape(-1), new)
  queue = with_ids_used(queue, first_ids, is_served, samples)
  state = dataclasses.replace(state, queue=queue)
  return state, Submitted(code=code, ids=jnp.where(is_served, first_ids, -1))


def places(
  queue: Queue, code: Array, samples: int, ids: Array | None = None
) -> tuple[Array, Array, Array]:
  """Finds a group of EMPTY rows for each of R prompts with the code OK.

  `ids`, int32[R], are those of their first samples; None for the next ones.

  Returns:
    int32[R], the ids of the first samples; int32[R], the groups; int32[R], the
    codes with BAD_SEQUENCE and QUEUE_FULL.
  """
  is_valid = code == Status.OK
  rank = jnp.cumsum(is_valid, dtype=jnp.int32) - 1
  first_ids = queue.next_id + rank * samples if ids is None else ids
  # The sum may wrap around to a negative number.
  has_ids = (first_ids >= 0) & (first_ids <= 2**31 - 1 - samples)
  empty = (queue.status == SequenceStatus.EMPTY).reshape(-1, samples)
  groups = first_of(jnp.all(empty, axis=1), code.shape[0])
  group = indexing.take(groups, rank, fill=empty.shape[0])
  code = first_code(
    (~is_valid, code),
    (~has_ids, Status.BAD_SEQUENCE),
    (group >= empty.shape[0], Status.QUEUE_FULL),
  )
  return first_ids, group, code


def with_ids_used(
  queue: Queue, first_ids: Array, is_served: Array, samples: int
) -> Queue:
  """Continues `next_id` after the ids of served prompts, int32[R]."""
  end_id = jnp.max(jnp.where(is_served, first_ids + samples, 0), initial=0)
  return dataclasses.replace(queue, next_id=jnp.maximum(queue.next_id, end_id))


def new_rows(state: RolloutState, requests: Requests) -> tuple[Queue, Array]:
  """Returns rows for P prompts, without ids; bool[P], True for BAD_LENGTH."""
  memory = state.memory
  config = state.config
  num_prompts = requests.tokens.shape[0]
  samples = config.num_samples
  new = new_queue(
    requests,
    jnp.zeros((num_prompts,), jnp.int32),
    state.key,
    state.queue.width,
    memory.cache,
    memory.kv,
    config,
  )
  is_bad = (new.status == SequenceStatus.FAILED).reshape(-1, samples)
  is_bad = jnp.any(is_bad, axis=1)
  counts = requests.num_samples
  if counts is not None:
    counts = jnp.asarray(counts)
    is_bad |= (counts < 1) | (counts > samples)
  return new, is_bad


def are_used(queue: Queue, ids: Array, samples: int) -> Array:
  """Returns bool[P], prompts with ids out of range or of the queue."""
  exists = queue.status != SequenceStatus.EMPTY
  offset = queue.ids[None] - ids[:, None]
  is_used = (offset >= 0) & (offset < samples) & exists[None]
  is_used = jnp.any(is_used, axis=1)
  return is_used | (ids < 0) | (ids > 2**31 - 1 - samples)


def are_repeated(ids: Array, mask: Array, samples: int) -> Array:
  """Returns bool[P], prompts with ids of an earlier prompt in `mask`."""
  overlap = jnp.abs(ids[:, None] - ids[None]) < samples
  is_earlier = jnp.tril(jnp.ones(overlap.shape, bool), k=-1)
  return jnp.any(overlap & is_earlier & mask[None], axis=1)


def put_rows(queue: Queue, rows: Array, new: Queue) -> Queue:
  """Writes the sequences of another queue into rows, int32[X]."""

  def put(name: str) -> Any:
    return jax.tree.map(
      lambda old, values: indexing.put(old, rows, values=values),
      getattr(queue, name),
      getattr(new, name),
    )

  names = [field.name for field in dataclasses.fields(Queue)]
  # Rows out of range are those of refused sequences, and are not written.
  fields = {name: put(name) for name in names if name not in _OF_WHOLE_QUEUE}
  sampling = settings.put(queue.sampling, rows, new.sampling)
  strings = queue.sampling.stop_strings
  if strings is not None:
    start = new.sampling.stop_strings.start
    start = indexing.put(strings.start, rows, values=start)
    strings = dataclasses.replace(strings, start=start)
  sampling = dataclasses.replace(sampling, stop_strings=strings)
  rates = queue.draft_rates
  if rates is not None:
    rates = indexing.put(rates, rows, values=jnp.float32(FIRST_DRAFT_RATE))
  queue = dataclasses.replace(
    queue, sampling=sampling, draft_rates=rates, **fields
  )
  # New rows can precede old rows in the order, so all rows are sorted again.
  order, position = order_of(queue.ids, queue.priority)
  return dataclasses.replace(queue, order=order, place=position)


def take_rows(queue: Queue, rows: Array) -> Queue:
  """Copies rows int32[R] of a queue; zeros for a row out of range."""

  def taken(path: Any, array: Array) -> Array:
    name, strings = jax.tree_util.keystr(path), ".sampling.stop_strings."
    if name == ".next_id":
      return array + 0
    # The tables are large, and the other rollout has them too.
    if name.startswith(strings) and name != f"{strings}start":
      return array[:0]
    # Keys have no fill value.
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
      return array.at[rows].get(mode="clip")
    return indexing.take(array, rows)

  queue = dataclasses.replace(queue, page_keys=None, draft_rates=None)
  queue = jax.tree_util.tree_map_with_path(taken, queue)
  order, position = order_of(queue.ids, queue.priority)
  return dataclasses.replace(queue, order=order, place=position)
