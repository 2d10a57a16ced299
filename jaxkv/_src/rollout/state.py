"""A rollout as a value: the cache, its memory, and the sequences."""

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
  """Counts of what a rollout has done so far.

  They have 64 bits: `int(counters.steps)`, or `numpy.asarray` for `calls` and
  for the counters of several rollouts.

  Attributes:
    steps: trips of the loop.
    calls: steps in which the model was called with B columns and as many more
      as each width has. Without drafts there are two or three widths: 0, a
      quarter of `prefill_chunk` if that is at least 64, and `prefill_chunk`.
      With drafts each of these has 0, a quarter of `draft_columns` if that is
      at least 2, and `draft_columns` beside it, and those with fewer drafts
      come first.  # [X]
    rows: tokens that the model was called with, padding included.
    generated: tokens drawn. Each costs the row of the token before it.
    prefilled: tokens of prompts, and of what others said, that were computed
      for the first time, without the last ones before a draw.
    recomputed: tokens computed again: after a preemption, in a later turn, or
      with new weights.
    drafted: guessed tokens that were computed.
    accepted: those that were drawn.
    forked: samples that shared another sample's prefill.
    preempted: times a sequence gave its pages back so that others could go on.
      Not counted: samples of its prompt that waited for it, and samples that
      found no page to fork. They only wait again.
    peak_pages: most pages in use at once.  # int32[]
    peak_shared: most page-table entries at once, minus the pages in use.
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
  """A rollout in progress: a value that can be kept and resumed.

  Attributes:
    cache: who owns which pages. Its `epoch` is the version of the weights.
    kv: their contents, in one pool or in a tuple of pools.
    sequences: the queue and the results.
    sampling: how each sequence draws; what is None is not compiled.
    user: what `process` and the model know of each sequence, a pytree of
      arrays [Q, ...]; None for nothing.
    config: the options.
    key: from which the keys of sequences are derived.  # key[]
    next_id: the number of the next sequence that `submit` takes.  # int32[]
    running: the row of the sequence in each slot, Q for none.  # int32[B]
    leader: the slot whose prompt this one waits for, to fork from it; B for
      none.  # int32[B]
    computed: the most tokens of each sequence that were ever computed.
      # int32[Q]
    overtaken: later sequences that entered before each one.  # int32[Q]
    order: the rows by priority, then by number.  # int32[Q]
    place: where each row stands in that order.  # int32[Q]
    page_keys: the key after each page that a prompt or computed tokens fill,
      of the latter where all groups end a page; None without prefix caching.
      # uint32[Q, W // S, 4]
    epochs: the cache's epoch for which the keys of a row hold. In another one
      it looks nothing up.  # uint32[Q]
    salts: see `jaxkv.salt`; sequences of different salts share no page. None
      for no salt.  # uint32[Q, 4]
    drafts: what later tokens are guessed from; None without drafts.
    counters: what has been done.
    log: the sequence in each slot, what it did and how many tokens, in the last
      X steps, see `timeline`; None without.  # int32[X, 3, B]
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
  """A rollout that has not begun.

  Args:
    cache: an empty cache, or one that still holds prefixes of earlier
      rollouts; no slot in use.
    kv: the K/V memory of its pages; or a tuple of pools, see `jaxkv.kv`, which
      the model gets as it is. Recurrent groups need a `StatePages` among them.
      With such a group a step computes no more tokens of a sequence than up to
      the end of a page, and each sequence has tokens in one part of a
      `PackedView` only. With `RolloutConfig.experts` the last one is a
      `ExpertIdPages`.
    prompts: int32[P, L], padded at the end.
    lengths: int32[P], 1 .. L.
    key: key[]; equal keys give equal samples.
    config: the options.
    sampling: how each of the Q = P * G sequences draws, and when it ends. What
      `submit` may set later must be set here, for it is compiled or not.
    num_samples: int32[P], 0 .. G samples of each prompt; the rows of the others
      are EMPTY. None for G, `config.num_samples`.
    priority: int32[Q]: those with lower numbers enter first and are preempted
      last. None if all are equal. Where pages are scarce, a later sequence that
      needs fewer of them may still enter before one that finds no room, up to
      `RolloutConfig.max_overtaken` times. With the expected length, negated,
      the longest begin first, and slots stay busy to the end.
    salts: uint32[Q, 4], see `jaxkv.salt`; sequences of different salts share
      nothing, such as those of different adapters. None for no salt.
    user: what `process` and the model are to know of each sequence, a pytree of
      arrays [Q, ...].
    first_sequence: int32[], the number of the first sequence among those of all
      shards of a job, see `devices`. A sequence's draws depend on `key` and its
      number alone, so they do not depend on how the job is split.
    version: int32[], the version of the weights: the number of updates since
      the cache was made, see `update_weights` and `jaxkv.new_epoch`. Needed
      where the cache holds pages, which other weights would hit.

  Returns:
    The state, for `generate`, on the devices of the memory. A program to which
    it is donated takes the cache and the memory away, but nothing else that was
    given here.

  Raises:
    TypeError: an argument holds something else than integers, or `key` is no
      `jax.random.key`.
    ValueError: an argument has the wrong shape, the cache has a slot in use, a
      group of CrossAttention, or pages of another version, the memory has other
      pages than the cache, or none for a group, or lacks experts, a recurrent
      group has drafts or scratch pages, W tokens do not fit into a slot, a
      prompt is empty or longer than L, a number of samples or `first_sequence`
      is out of range, or the longest sequence does not fit into the pool.
      Traced lengths, slots and versions are not checked; such sequences fail
      one by one, see `Sequences.code`.
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
  """int32[]: the number behind the last group that has a sequence."""
  there = (sequences.status != queue.SequenceStatus.EMPTY).reshape(
    -1, config.num_samples
  )
  last = sequences.ids.reshape(there.shape)[:, -1] + 1
  used = jnp.where(jnp.any(there, axis=1), last, jnp.int32(0))
  first = jnp.asarray(as_int32("first_sequence", first))
  return jnp.maximum(jnp.max(used, initial=0), first)


def with_stop_strings(sampling: Sampling, total: int) -> Sampling:
  """Settings whose stop strings have an entry for each of Q sequences."""
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
  """See `RolloutState.page_keys`; a prompt is hashed once for all samples."""
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
  """Hashes all tokens of some rows, int32[R], for the cache's epoch."""
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
  """A pytree whose arrays have a row for each of Q sequences, or of others.

  Raises:
    ValueError: an array has another number of rows.
  """

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
  """bool[]: whether no sequence waits or runs."""
  return jnp.all(state.sequences.status >= queue.SequenceStatus.DONE)


def _refused(sequences: Sequences, refused: Array) -> Sequences:
  """All sequences that wait fail, as pages of other weights would be hit."""
  rows = jnp.arange(sequences.status.shape[0], dtype=jnp.int32)
  refused = refused & (sequences.status == queue.SequenceStatus.WAITING)
  code = jnp.full_like(rows, Status.STALE)
  return queue.fail(sequences, rows, refused, code)
