"""Makes a queue of new sequences."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.expert_records import unknown_experts
from jaxkv._src.engine.queue.page_keys import page_keys
from jaxkv._src.engine.queue.queue import FIRST_DRAFT_RATE
from jaxkv._src.engine.queue.queue import NOT_SAMPLED
from jaxkv._src.engine.queue.queue import Finish
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.queue import order_of
from jaxkv._src.engine.queue.requests import Requests
from jaxkv._src.kv.pools import Pools
from jaxkv._src.sampling.statistics import Records


def new_queue(
  requests: Requests,
  ids: Array,
  key: Array,
  width: int,
  cache: CacheState,
  kv: Pools,
  config: RolloutConfig,
) -> Queue:
  """Returns a queue with all samples of requests as waiting sequences.

  A sequence is FAILED if its prompt length or budget is out of range, or if
  their sum exceeds W, the `width`. Rows of samples beyond
  `Requests.num_samples` are EMPTY. `ids`, int32[P], are those of each prompt's
  first sample. The keys of sequences are derived from `key`. `kv` gives the
  shape of `Queue.experts`.
  """
  sampling = requests.sampling
  samples = config.num_samples
  assert sampling is not None  # `as_requests` sets it.
  columns = requests.tokens.shape[1]
  num_sequences = requests.tokens.shape[0] * samples
  sample = jnp.arange(num_sequences, dtype=jnp.int32) % samples
  lengths = jnp.repeat(jnp.asarray(requests.lengths), samples)
  ids = jnp.repeat(ids, samples) + sample
  column = jnp.arange(columns, dtype=jnp.int32)[None]
  tokens = jnp.repeat(jnp.asarray(requests.tokens), samples, axis=0)
  # Page keys are computed from all columns, and must not depend on the padding
  # that a caller chose.
  tokens = jnp.where(column < lengths[:, None], tokens, 0)
  tokens = jnp.pad(tokens, ((0, 0), (0, width - columns)))
  budget = jnp.full((num_sequences,), config.max_new_tokens, jnp.int32)
  if sampling.max_tokens is not None:
    budget = jnp.minimum(budget, sampling.max_tokens)
  # `init` raises for concrete values that are out of range. Traced values, and
  # all values from `submit`, are checked only here.
  # `Sampling.max_tokens` is at least 1, so a budget is 0 only by `config`.
  least_tokens = 1 if requests.log_probs_from is None else 0
  is_bad = (lengths < 1) | (lengths > columns) | (budget < least_tokens)
  # The sum of length and budget can overflow, so this subtracts instead.
  is_bad |= lengths > width - budget
  status = jnp.where(
    is_bad, jnp.int32(SequenceStatus.FAILED), jnp.int32(SequenceStatus.WAITING)
  )
  # The last token of a sequence is never computed, so one token alone is none.
  is_void = (status == SequenceStatus.WAITING) & (lengths + budget == 1)
  status = jnp.where(is_void, jnp.int32(SequenceStatus.DONE), status)
  if requests.num_samples is not None:
    num_samples = jnp.repeat(jnp.asarray(requests.num_samples), samples)
    empty = jnp.int32(SequenceStatus.EMPTY)
    status = jnp.where(sample < num_samples, status, empty)
  failed = status == SequenceStatus.FAILED
  finish = jnp.where(is_void, jnp.int32(Finish.LENGTH), jnp.int32(0))
  log_probs_from = requests.log_probs_from
  if log_probs_from is not None:
    log_probs_from = jnp.repeat(jnp.asarray(log_probs_from), samples)
  order, position = order_of(ids, requests.priority)
  strings = sampling.stop_strings
  rates = jnp.full((num_sequences,), FIRST_DRAFT_RATE, jnp.float32)
  return Queue(
    tokens=tokens,
    ids=ids,
    prompt_length=lengths,
    # `+ 0` makes a new buffer, because one buffer cannot be donated twice.
    length=lengths + 0,
    start=lengths + 0,
    limit=lengths + budget,
    budget=budget,
    log_probs=jnp.zeros((num_sequences, width), jnp.float32),
    versions=jnp.full((num_sequences, width), NOT_SAMPLED, jnp.int32),
    records=_empty_records(num_sequences, width, config),
    status=status,
    code=jnp.where(failed, jnp.int32(Status.BAD_LENGTH), jnp.int32(Status.OK)),
    finish=jnp.where(failed, jnp.int32(Finish.FAILED), finish),
    stop=jnp.full((num_sequences,), -1, jnp.int32),
    is_new=jnp.zeros((num_sequences,), bool),
    keys=sequence_keys(key, ids, sampling.seed),
    sampling=sampling,
    extra=requests.extra,
    computed=jnp.zeros((num_sequences,), jnp.int32),
    overtaken=jnp.zeros((num_sequences,), jnp.int32),
    order=order,
    place=position,
    epochs=jnp.full((num_sequences,), cache.epoch),
    page_keys=_prompt_keys(cache, requests, tokens, config),
    next_id=jnp.zeros((), jnp.int32),
    priority=requests.priority,
    log_probs_from=log_probs_from,
    salts=requests.salts,
    stop_states=None if strings is None else jnp.copy(strings.start),
    experts=unknown_experts(kv, tokens, config),
    draft_rates=rates if config.draft_tokens else None,
  )


def sequence_keys(key: Array, ids: Array, seed: Array | None) -> Array:
  """Returns key[Q], from `seed` where `seed >= 0`, else from `key` and id."""
  keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, ids)
  if seed is None:
    return keys
  impl = jax.random.key_impl(key)
  seeded = jax.vmap(lambda value: jax.random.key(value, impl=impl))(seed)
  return jnp.where(seed >= 0, seeded, keys)


def _empty_records(
  num_sequences: int, width: int, config: RolloutConfig
) -> Records:
  def zeros(is_kept: bool, *sizes: int, dtype: Any = jnp.float32) -> Any:
    return jnp.zeros((num_sequences, width, *sizes), dtype) if is_kept else None

  num_top = config.top_log_probs
  return Records(
    raw_log_probs=zeros(config.raw_log_probs),
    unfiltered_log_probs=zeros(config.unfiltered_log_probs),
    entropy=zeros(config.entropy),
    top_tokens=zeros(num_top > 0, num_top, dtype=jnp.int32),
    top_log_probs=zeros(num_top > 0, num_top),
  )


def _prompt_keys(
  cache: CacheState, requests: Requests, tokens: Array, config: RolloutConfig
) -> Array | None:
  """Returns `Queue.page_keys` of new sequences."""
  width = tokens.shape[1]
  columns = requests.tokens.shape[1]
  samples = config.num_samples
  # Without salts, the samples of a prompt have equal keys, computed once.
  repeats = samples if requests.salts is None else 1
  keys = page_keys(cache, tokens[::repeats, :columns], requests.salts)
  if keys is None:
    return None
  missing = width // cache.config.page_size - keys.shape[1]
  keys = jnp.repeat(keys, repeats, axis=0)
  return jnp.pad(keys, ((0, 0), (0, missing), (0, 0)))
