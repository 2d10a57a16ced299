"""State of a rollout: the cache, its K/V memory, and the sequences."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.arrays.arguments import as_key
from jaxkv._src.arrays.arguments import check_shape
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.kv.pools import Pools
from jaxkv._src.rollout import drafts
from jaxkv._src.rollout import packing
from jaxkv._src.rollout import placement
from jaxkv._src.rollout import sequences as queue
from jaxkv._src.rollout.checks import as_version
from jaxkv._src.rollout.checks import check_fits
from jaxkv._src.rollout.checks import check_memory
from jaxkv._src.rollout.checks import check_random_key
from jaxkv._src.rollout.config import RolloutConfig
from jaxkv._src.rollout.counts import Count
from jaxkv._src.rollout.drafts import Drafts
from jaxkv._src.rollout.page_keys import page_keys
from jaxkv._src.rollout.routing import unknown_experts
from jaxkv._src.rollout.sequences import Sequences
from jaxkv._src.sampling.settings import Sampling
from jaxkv._src.sampling.settings import as_sampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
  """Totals since the start of a rollout.

  Most are 64-bit `Count`s: read them with `int(counters.steps)`, or with
  `numpy.asarray` for `calls` and for the counters of several rollouts.

  Attributes:
    steps: steps of the loop.
    calls: calls of the model by width, which is the number of columns beyond B.
      Prompts have the widths 0, a quarter of `prefill_chunk` if that is at
      least 64, and `prefill_chunk`. With speculation, these repeat for each
      number of draft columns: 0, a quarter of `draft_columns` if that is at
      least 2, and `draft_columns`.  # [X]
    rows: columns of all calls, including padding.
    generated: sampled tokens. Each counts the row of the token before it.
    prefilled: tokens of prompts and `extend` computed for the first time,
      except the last token before a sample.
    recomputed: tokens computed again: after preemption, in a later turn, or
      with new weights.
    drafted: guessed tokens that were computed.
    accepted: guessed tokens that were accepted.
    forked: samples that shared another sample's prefill.
    preempted: preemptions of running sequences. Samples that wait for a
      victim's prompt, or that find no page to fork, return to the queue and do
      not count.
    peak_pages: maximum number of pages in use.  # int32[]
    peak_shared: maximum number of page-table entries minus pages in use.
      # int32[]
  """

  steps: Count
  calls: Count
  rows: Count
  generated: Count
  prefilled: Count
  recomputed: Count
  drafted: Count
  accepted: Count
  forked: Count
  preempted: Count
  peak_pages: Array
  peak_shared: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutState:
  """State of a rollout, which can be saved and resumed.

  Attributes:
    config: static options.
    cache: the cache; `cache.epoch` is the version of the weights.
    kv: the K/V memory: a pool or a tuple of pools.
    sequences: the queue and the results.
    sampling: settings of each sequence; fields that are None are not compiled.
    user: the values for `process` and the model, a pytree of arrays [Q, ...];
      None for no values.
    key: the key from which the sequences' keys are derived.  # key[]
    next_id: the id of the next sequence that `submit` adds.  # int32[]
    running: the row of the sequence in each slot, Q for none.  # int32[B]
    leader: the slot that computes this slot's prompt, which then forks from it;
      B for none.  # int32[B]
    computed: the maximum number of tokens of each sequence that was ever
      computed.  # int32[Q]
    overtaken: how many later sequences entered before each one.  # int32[Q]
    order: the rows, sorted by priority, then by id.  # int32[Q]
    place: the position of each row in `order`.  # int32[Q]
    page_keys: the chain key after each page of a prompt, and after each run of
      computed pages at which all groups end a page; None without prefix
      caching.  # uint32[Q, W // S, 4]
    epochs: the epoch for which a row's keys are valid. In other epochs the
      sequence does not look up pages.  # uint32[Q]
    salts: see `jaxkv.salt`: sequences with different salts share no page. None
      for no salts.  # uint32[Q, 4]
    drafts: tables of n-grams for speculation; None without it.
    counters: totals.
    log: the sequence, the kind of work and the number of tokens of each slot in
      the last X steps, see `timeline`; None without.  # int32[X, 3, B]
  """

  config: RolloutConfig = dataclasses.field(metadata={"static": True})
  cache: CacheState
  kv: Pools
  sequences: Sequences
  sampling: Sampling
  user: Any
  key: Array
  next_id: Array
  running: Array
  leader: Array
  computed: Array
  overtaken: Array
  order: Array
  place: Array
  page_keys: Array | None
  epochs: Array
  salts: Array | None
  drafts: Drafts | None
  counters: Counters
  log: Array | None = None


def init(
  cache: CacheState,
  kv: Pools,
  prompts: Array,
  lengths: Array,
  key: Array,
  config: RolloutConfig,
  *,
  sampling: Sampling | None = None,
  num_samples: Array | None = None,
  priority: Array | None = None,
  salts: Array | None = None,
  user: Any = None,
  first_sequence: Array | int = 0,
  version: Array | int | None = None,
) -> RolloutState:
  """Returns the initial state of a rollout.

  Args:
    cache: a cache without slots in use. It may hold prefixes of earlier
      rollouts.
    kv: the K/V memory of its pages: a pool, or a tuple of pools (see
      `jaxkv.kv`), which the model receives unchanged. Recurrent groups need
      `StatePages`. They stop each chunk of a sequence at the end of a page, and
      place it in one part of a `PackedView`. `RolloutConfig.record_experts`
      needs `ExpertIdPages` last.
    prompts: int32[P, L], padded at the end.
    lengths: int32[P], 1 .. L.
    key: key[]; equal keys give equal samples.
    config: static options.
    sampling: settings of each of the Q = P * G sequences. A field that `submit`
      sets later must be set here too, so that it is compiled.
    num_samples: int32[P], 0 .. G samples of each prompt; the other rows are
      EMPTY. None for G.
    priority: int32[Q]: lower numbers are admitted first and preempted last.
      None for equal priorities. If pages are scarce, later sequences that need
      fewer may still enter first, up to `RolloutConfig.max_overtaken` times.
      The negated expected length starts the longest sequences first, which
      keeps slots busy to the end.
    salts: uint32[Q, 4], see `jaxkv.salt`. Sequences with different salts, such
      as those of different adapters, share no pages. None for no salts.
    user: values of each sequence for `process` and the model, a pytree of
      arrays [Q, ...].
    first_sequence: int32[], the id of the first sequence among all shards of a
      job, see `devices`. Samples depend on `key` and the id alone, not on how
      the job is split.
    version: int32[], the version of the weights: the number of updates since
      the cache was made, see `update_weights` and `jaxkv.new_epoch`. Required
      if the cache holds pages, which may be of other weights.

  Returns:
    The state for `generate`, on the devices of the memory. Donating it deletes
    `cache` and `kv`, but no other argument.

  Raises:
    TypeError: an argument does not hold integers, or `key` is not a
      `jax.random.key`.
    ValueError: an argument has the wrong shape or is out of range; the cache
      has slots in use, a CrossAttention group or pages of another version; `kv`
      does not fit the cache, or lacks a pool; a recurrent group has drafts or
      scratch pages; W exceeds a slot; or the longest sequence exceeds the pool.
      Traced lengths, slots and versions are not checked; their sequences fail
      individually, see `Sequences.code`.
  """
  check_random_key(key)
  given = (key, sampling, priority, salts, user, prompts, lengths)
  given += (num_samples, version)
  prompts, lengths = queue.as_prompts(prompts, lengths, config)
  check_memory(cache, kv, config)
  total = prompts.shape[0] * config.num_samples
  sampling = with_stop_strings(as_sampling(sampling, total), total)
  sequences = queue.from_prompts(
    prompts,
    lengths,
    key,
    config,
    num_samples=num_samples,
    priority=priority,
    first_sequence=first_sequence,
    max_tokens=sampling.max_tokens,
    seed=sampling.seed,
  )
  check_fits(
    cache.config,
    prompts,
    lengths,
    num_samples,
    sampling.max_tokens,
    config,
  )
  same = as_version(cache, version)
  sequences = _refused(sequences, ~same)
  if sampling.stop_strings is not None:
    states = jnp.copy(sampling.stop_strings.start)
    sequences = dataclasses.replace(sequences, stop_states=states)
  experts = unknown_experts(kv, sequences.tokens, config)
  sequences = dataclasses.replace(sequences, experts=experts)
  if salts is not None:
    salts = jnp.asarray(as_key("salts", salts))
    wanted = (total, hashing.KEY_WORDS)
    check_shape("salts", salts, wanted, ", one for each sequence")
  order, place = queue.order_of(sequences)
  sizes = cache.config
  state = RolloutState(
    config=config,
    cache=cache,
    kv=kv,
    sequences=sequences,
    sampling=sampling,
    user=as_user(user, total),
    key=key,
    next_id=_next_id(sequences, first_sequence, config),
    running=jnp.full((sizes.num_slots,), total, jnp.int32),
    leader=jnp.full((sizes.num_slots,), sizes.num_slots, jnp.int32),
    computed=jnp.zeros((total,), jnp.int32),
    overtaken=jnp.zeros((total,), jnp.int32),
    order=order,
    place=place,
    page_keys=_page_keys(cache, prompts, sequences, salts),
    epochs=jnp.full((total,), cache.epoch),
    salts=salts,
    drafts=drafts.init(sequences, config),
    counters=_no_counts(config),
    log=jnp.zeros((config.timeline, 3, sizes.num_slots), jnp.int32)
    if config.timeline
    else None,
  )
  state = placement.own(state, given)
  return placement.beside(state, jax.tree.leaves(kv)[0])


def _next_id(
  sequences: Sequences, first: Array | int, config: RolloutConfig
) -> Array:
  """Returns the id after the last group that has a sequence, int32[]."""
  there = (sequences.status != queue.SequenceStatus.EMPTY).reshape(
    -1, config.num_samples
  )
  last = sequences.ids.reshape(there.shape)[:, -1] + 1
  used = jnp.where(jnp.any(there, axis=1), last, jnp.int32(0))
  first = jnp.asarray(as_int32("first_sequence", first))
  return jnp.maximum(jnp.max(used, initial=0), first)


def with_stop_strings(sampling: Sampling, total: int) -> Sampling:
  """Returns settings whose stop strings have an entry for each sequence."""
  strings = sampling.stop_strings
  if strings is None:
    return sampling
  strings = dataclasses.replace(strings, start=strings.init(total))
  return dataclasses.replace(sampling, stop_strings=strings)


@jax.jit
def _page_keys(
  cache: CacheState,
  prompts: Array,
  sequences: Sequences,
  salts: Array | None,
) -> Array | None:
  """Returns `RolloutState.page_keys`; hashes a prompt once for all samples."""
  total, width = sequences.tokens.shape
  samples = total // max(prompts.shape[0], 1)
  if salts is not None:
    prompts, samples = sequences.tokens[:, : prompts.shape[1]], 1
  keys = page_keys(cache, prompts, salts)
  if keys is None:
    return None
  columns = width // cache.config.page_size - keys.shape[1]
  keys = jnp.repeat(keys, samples, axis=0)
  return jnp.pad(keys, ((0, 0), (0, columns), (0, 0)))


def rehashed(state: RolloutState, rows: Array) -> RolloutState:
  """Hashes all tokens of the rows int32[R] for the current epoch."""
  salts = state.salts
  keys = page_keys(
    state.cache,
    indexing.take(state.sequences.tokens, rows),
    None if salts is None else indexing.take(salts, rows),
  )
  if keys is not None and state.page_keys is not None:
    keys = indexing.put(state.page_keys, rows, values=keys)
  epochs = indexing.put(state.epochs, rows, values=state.cache.epoch)
  return dataclasses.replace(state, page_keys=keys, epochs=epochs)


def as_user(user: Any, total: int, *, each: str = "sequence") -> Any:
  """Returns `user` as arrays with `total` rows each, or raises ValueError."""

  def checked(path: Any, leaf: Any) -> Array:
    array = jnp.asarray(leaf)
    if array.shape[:1] != (total,):
      raise ValueError(
        f"`user{jax.tree_util.keystr(path)}` must have the shape [{total}, "
        f"...], a row for each {each}, got {list(array.shape)}."
      )
    return array

  return jax.tree_util.tree_map_with_path(checked, user)


def _no_counts(config: RolloutConfig) -> Counters:
  names = [field.name for field in dataclasses.fields(Counters)]
  counts: dict[str, Any] = {name: Count.zeros() for name in names}
  counts["calls"] = Count.zeros((len(packing.widths(config)),))
  for name in ("peak_pages", "peak_shared"):
    counts[name] = jnp.zeros((), jnp.int32)
  return Counters(**counts)


def is_done(state: RolloutState) -> Array:
  """Returns bool[], True if no sequence waits or runs."""
  return jnp.all(state.sequences.status >= queue.SequenceStatus.DONE)


def _refused(sequences: Sequences, refused: Array) -> Sequences:
  """Fails waiting sequences as STALE: they would hit pages of other weights."""
  rows = jnp.arange(sequences.status.shape[0], dtype=jnp.int32)
  refused = refused & (sequences.status == queue.SequenceStatus.WAITING)
  code = jnp.full_like(rows, Status.STALE)
  return queue.fail(sequences, rows, refused, code)
