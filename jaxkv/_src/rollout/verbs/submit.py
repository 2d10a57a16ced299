"""submit: adds prompts to a rollout in progress."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.arrays.arguments import as_key
from jaxkv._src.arrays.arguments import check_shape
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.state import Outcome
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import first_code
from jaxkv._src.rollout import drafts
from jaxkv._src.rollout import sequences as queue
from jaxkv._src.rollout.routing import unknown_experts
from jaxkv._src.rollout.sequences import Sequences
from jaxkv._src.rollout.state import RolloutState
from jaxkv._src.rollout.state import as_user
from jaxkv._src.rollout.state import rehashed
from jaxkv._src.rollout.state import with_stop_strings
from jaxkv._src.rollout.verbs.find import as_counts
from jaxkv._src.rollout.verbs.find import as_mask
from jaxkv._src.sampling import settings
from jaxkv._src.sampling.settings import Sampling
from jaxkv._src.sampling.settings import as_sampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Submitted(Outcome):
  """Result of `submit`; a row is OK if its prompt entered the queue.

  Attributes:
    code: a `Status` for each prompt.  # int32[R]
    ids: the id of the first sample of each prompt, which the other samples' ids
      follow; -1 if the prompt was refused.  # int32[R]
  """

  ids: Array


def submit(
  state: RolloutState,
  prompts: Array,
  lengths: Array,
  *,
  ids: Array | None = None,
  num_samples: Array | None = None,
  priority: Array | None = None,
  sampling: Sampling | None = None,
  salts: Array | None = None,
  user: Any = None,
  mask: Array | None = None,
) -> tuple[RolloutState, Submitted]:
  """Adds prompts to the queue, in EMPTY rows.

  A prompt needs a group of G rows that are all EMPTY: never used, or harvested.
  Prompts are placed in order; those that find no rows are refused, and can be
  submitted again after a harvest.

  Args:
    state: the rollout.
    prompts: int32[R, L], padded at the end; L < W.
    lengths: int32[R], 1 .. L.
    ids: int32[R], the id of each prompt's first sample; its G - 1 successors
      are the ids of the other samples. The id seeds a sample's random draws.
      None for the next ids.
    num_samples: int32[R], 1 .. G samples of each prompt; None for G.
    priority: int32[R * G]; None for 0.
    sampling: settings of the R * G sequences, only of fields that `init` has
      set; a field that is None has no effect on them.
    salts: uint32[R * G, 4], required if and only if `init` had salts.
    user: a pytree of arrays [R * G, ...], as in `init`.
    mask: bool[R], the prompts to process; None for all.

  Returns:
    The rollout, and per prompt OK, SKIPPED, QUEUE_FULL, BAD_SEQUENCE (an id is
    negative or in use) or BAD_LENGTH (`lengths`, `num_samples` or `max_tokens`
    is out of range, or a sequence could exceed W tokens).

  Raises:
    TypeError: an argument has the wrong dtype.
    ValueError: an argument has the wrong shape, or sets a field that `init` has
      not set.
  """
  config = state.config
  prompts, lengths = queue.as_prompts(prompts, lengths, config)
  rows, columns = prompts.shape
  total, width = rows * config.num_samples, state.sequences.tokens.shape[1]
  if columns >= width:
    raise ValueError(
      f"`prompts` must have fewer than {width} columns, got {columns}; raise "
      "RolloutConfig.max_length."
    )
  if ids is not None:
    ids = as_counts("ids", ids, rows)
  if num_samples is not None:
    num_samples = as_counts("num_samples", num_samples, rows)
  return _submit(
    state,
    jnp.asarray(prompts),
    jnp.asarray(lengths),
    ids,
    num_samples,
    _priority(state, priority, total),
    _sampling(state, sampling, total),
    _salts(state, salts, total),
    _user(state, user, total),
    as_mask(mask, rows),
  )


def _priority(state: RolloutState, priority: Any, total: int) -> Array | None:
  if state.sequences.priority is None:
    if priority is None:
      return None
    raise ValueError(
      "`priority` must be None, because `init` had none; give it one."
    )
  if priority is None:
    return jnp.zeros((total,), jnp.int32)
  priority = as_int32("priority", priority)
  check_shape("priority", priority, (total,), ", one for each sequence")
  return jnp.asarray(priority)


def _sampling(
  state: RolloutState, sampling: Sampling | None, total: int
) -> Sampling:
  new = with_stop_strings(as_sampling(sampling, total), total)
  if state.sampling.stop_strings is not None and new.stop_strings is None:
    raise ValueError(
      "`sampling.stop_strings` must be given, because `init` had some; select "
      "those of the new sequences with StopStrings.select."
    )
  return new


def _salts(state: RolloutState, salts: Any, total: int) -> Array | None:
  if (salts is None) != (state.salts is None):
    raise ValueError(
      "`salts` must be given if and only if `init` had salts, got "
      f"{'none' if salts is None else 'some'}."
    )
  if salts is None:
    return None
  salts = as_key("salts", salts)
  wanted = (total, hashing.KEY_WORDS)
  check_shape("salts", salts, wanted, ", one for each sequence")
  return jnp.asarray(salts)


def _user(state: RolloutState, user: Any, total: int) -> Any:
  user = as_user(user, total)
  have, given = (
    jax.tree.map(lambda leaf: (leaf.shape[1:], leaf.dtype), tree)
    for tree in (state.user, user)
  )
  if have != given:
    raise ValueError(
      "`user` must have the tree, shapes and dtypes of that of `init`, with a "
      f"row for each new sequence, got {given}, not {have}; give such a tree."
    )
  return user


@jax.jit
def _submit(
  state: RolloutState,
  prompts: Array,
  lengths: Array,
  ids: Array | None,
  num_samples: Array | None,
  priority: Array | None,
  sampling: Sampling,
  salts: Array | None,
  user: Any,
  mask: Array,
) -> tuple[RolloutState, Submitted]:
  config, width = state.config, state.sequences.tokens.shape[1]
  arguments = prompts, lengths, ids, num_samples, priority, sampling, salts
  state, arguments, user, mask = sharding.match_varying_axes(
    (state, arguments, user, mask)
  )
  prompts, lengths, ids, num_samples, priority, sampling, salts = arguments
  samples, rows = config.num_samples, prompts.shape[0]
  numbers = state.next_id + jnp.arange(rows, dtype=jnp.int32) * samples
  new = queue.samples_of(
    prompts,
    lengths,
    numbers,
    state.key,
    width,
    config,
    num_samples=num_samples,
    priority=priority,
    max_tokens=sampling.max_tokens,
  )
  failed = (new.status == queue.SequenceStatus.FAILED).reshape(rows, samples)
  bad = jnp.any(failed, axis=1)
  if num_samples is not None:
    bad |= (num_samples < 1) | (num_samples > samples)
  taken = jnp.zeros_like(bad)
  if ids is not None:
    taken = _taken(state, ids, mask & ~bad)
  code = first_code(
    (~mask, Status.SKIPPED),
    (bad, Status.BAD_LENGTH),
    (taken, Status.BAD_SEQUENCE),
  )
  wanting = code == Status.OK
  rank = jnp.cumsum(wanting, dtype=jnp.int32) - 1
  empty = (state.sequences.status == queue.SequenceStatus.EMPTY).reshape(
    -1, samples
  )
  groups = queue.first_of(jnp.all(empty, axis=1), rows)
  group = indexing.take(groups, rank, fill=empty.shape[0])
  served = wanting & (group < empty.shape[0])
  code = jnp.where(wanting & ~served, jnp.int32(Status.QUEUE_FULL), code)
  first = state.next_id + rank * samples if ids is None else ids
  sample = jnp.arange(samples, dtype=jnp.int32)
  numbers = (first[:, None] + sample[None]).reshape(-1)
  new = dataclasses.replace(
    new,
    ids=numbers,
    keys=queue.keys_of(state.key, numbers, sampling.seed),
    experts=unknown_experts(state.kv, new.tokens, config),
  )
  place = indexing.where_valid(served, group * samples)[:, None] + sample[None]
  state = _put(state, place.reshape(-1), new, sampling, salts, user)
  last = jnp.max(jnp.where(served, first + samples, 0), initial=0)
  state = dataclasses.replace(state, next_id=jnp.maximum(state.next_id, last))
  return state, Submitted(code=code, ids=jnp.where(served, first, -1))


def _taken(state: RolloutState, ids: Array, mask: Array) -> Array:
  """Returns bool[R], prompts with ids out of range or already in use."""
  samples = state.config.num_samples
  there = state.sequences.status != queue.SequenceStatus.EMPTY
  apart = state.sequences.ids[None] - ids[:, None]
  taken = jnp.any((apart >= 0) & (apart < samples) & there[None], axis=1)
  taken |= (ids < 0) | (ids > 2**31 - 1 - samples)
  near = jnp.abs(ids[:, None] - ids[None]) < samples
  earlier = jnp.tril(jnp.ones(near.shape, bool), k=-1)
  return taken | jnp.any(near & earlier & mask[None], axis=1)


def _put(
  state: RolloutState,
  place: Array,
  new: Sequences,
  sampling: Sampling,
  salts: Array | None,
  user: Any,
) -> RolloutState:
  """Writes new sequences into rows, int32[R * G]."""

  def put(old: Any, values: Any) -> Any:
    return jax.tree.map(
      lambda one, other: indexing.put(one, place, values=other), old, values
    )

  strings = state.sampling.stop_strings
  if strings is not None:
    start = indexing.put(
      strings.start, place, values=sampling.stop_strings.start
    )
    strings = dataclasses.replace(strings, start=start)
    new = dataclasses.replace(new, stop_states=sampling.stop_strings.start)
  sequences = put(state.sequences, new)
  order, ranks = queue.order_of(sequences)
  state = dataclasses.replace(
    state,
    sequences=sequences,
    sampling=dataclasses.replace(
      settings.put(state.sampling, place, sampling), stop_strings=strings
    ),
    user=put(state.user, user),
    computed=indexing.put(state.computed, place, values=0),
    overtaken=indexing.put(state.overtaken, place, values=0),
    order=order,
    place=ranks,
    salts=put(state.salts, salts),
  )
  known = state.drafts
  if known is not None:
    known = drafts.with_prompts(known, sequences, place, state.config)
  return rehashed(dataclasses.replace(state, drafts=known), place)
