"""A rollout as a value: the cache, its memory, and the sequences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import check_single
from jaxkv._src.cache.state import roots
from jaxkv._src.kv.check import check
from jaxkv._src.rollout import admission
from jaxkv._src.rollout import packing
from jaxkv._src.rollout import sequences as queue
from jaxkv._src.rollout.config import RolloutConfig
from jaxkv._src.rollout.sequences import Sequences
from jaxkv.kv import KVPages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
  """Counts of what a rollout has done so far, each an int32[] but `calls`.

  Attributes:
    steps: trips of the loop.
    calls: steps in which the model was called with B columns and as many more
      as each width has: 0, a quarter of `prefill_chunk` if that is at least
      64, and `prefill_chunk`.  # int32[2] or int32[3]
    rows: tokens that the model was called with, padding included.
    generated: tokens drawn. Each costs the row of the token before it.
    prefilled: tokens of prompts computed, without their last ones.
    recomputed: tokens computed again after a preemption.
    forked: samples that shared another sample's prefill.
    preempted: times a sequence gave its pages back so that others could go on.
      Not counted: samples of its prompt that waited for it, and samples that
      found no page to fork. They only wait again.
    peak_pages: most pages in use at once.
    peak_shared: most page-table entries at once, minus the pages in use.
  """

  steps: Array
  calls: Array
  rows: Array
  generated: Array
  prefilled: Array
  recomputed: Array
  forked: Array
  preempted: Array
  peak_pages: Array
  peak_shared: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutState:
  """A rollout in progress: a value that can be kept and resumed.

  Attributes:
    cache: who owns which pages.
    kv: their contents.
    sequences: the queue and the results.
    config: the options.
    running: the sequence in each slot, Q for none.  # int32[B]
    leader: the slot whose prompt this one waits for, to fork from it; B for
      none.  # int32[B]
    computed: the most tokens of each sequence that were ever computed.
      # int32[Q]
    overtaken: later sequences that entered before each one.  # int32[Q]
    order: the sequences by priority, then by number; None without priorities.
      # int32[Q]
    page_keys: the key after each page that a prompt or computed tokens fill,
      of the latter where all groups end a page; None without prefix caching.
      # uint32[Q, W // S, 4]
    root: the key before the first page of all of them. With a cache of another
      one, as after `new_epoch`, nothing is looked up.  # uint32[4]
    counters: what has been done.
    log: the sequence in each slot, what it did and how many tokens, in the last
      X steps, see `timeline`; None without.  # int32[X, 3, B]
  """

  config: RolloutConfig = dataclasses.field(metadata={"static": True})
  cache: CacheState
  kv: KVPages
  sequences: Sequences
  running: Array
  leader: Array
  computed: Array
  overtaken: Array
  order: Array | None
  page_keys: Array | None
  root: Array
  counters: Counters
  log: Array | None = None


def init(
  cache: CacheState,
  kv: KVPages,
  prompts: Array,
  lengths: Array,
  key: Array,
  config: RolloutConfig,
  *,
  num_samples: Array | None = None,
  priority: Array | None = None,
) -> RolloutState:
  """A rollout that has not begun.

  Args:
    cache: an empty cache, or one that still holds prefixes of earlier
      rollouts, after `new_epoch` if the weights are new; no slot in use.
    kv: the K/V memory of its pages.
    prompts: int32[P, L], padded at the end.
    lengths: int32[P], 1 .. L.
    key: key[]; equal keys give equal samples.
    config: the options.
    num_samples: int32[P], 0 .. G samples of each prompt; the sequences of the
      others are DONE from the start. None for G, `config.num_samples`.
    priority: int32[Q], of all G samples of all prompts: those with lower
      numbers enter first and are preempted last. None if all are equal. With
      the expected length, negated, the longest begin first, and slots stay
      busy to the end.

  Returns:
    The state, for `generate`.

  Raises:
    TypeError: `prompts`, `lengths`, `num_samples` or `priority` does not hold
      integers.
    ValueError: an argument has the wrong shape, the cache has a recurrent group
      or one of an encoder, or a slot in use, the memory has other pages than
      the cache, L + max_new_tokens tokens do not fit into a slot, a prompt is
      empty or longer than L, a number of samples is out of range, or the
      longest sequence does not fit into the pool. Traced lengths and slots are
      not checked; such sequences fail one by one, see `Sequences.code`.
  """
  prompts, lengths = queue.as_prompts(prompts, lengths, config)
  _check_memory(cache, kv)
  _check_fits(cache.config, prompts, lengths, config)
  sizes = cache.config
  sequences = queue.from_prompts(
    prompts,
    lengths,
    key,
    config,
    num_samples=num_samples,
    priority=priority,
  )
  none = sequences.length.shape[0]
  return RolloutState(
    config=config,
    cache=cache,
    kv=kv,
    sequences=sequences,
    running=jnp.full((sizes.num_slots,), none, jnp.int32),
    leader=jnp.full((sizes.num_slots,), sizes.num_slots, jnp.int32),
    computed=jnp.zeros((none,), jnp.int32),
    overtaken=jnp.zeros((none,), jnp.int32),
    order=queue.order_of(sequences),
    page_keys=_page_keys(cache, prompts, sequences),
    # A copy, because a state is donated whole.
    root=jnp.copy(roots(cache, None)),
    counters=_no_counts(config),
    log=jnp.zeros((config.timeline, 3, sizes.num_slots), jnp.int32)
    if config.timeline
    else None,
  )


@jax.jit
def _page_keys(
  cache: CacheState, prompts: Array, sequences: Sequences
) -> Array | None:
  """See `RolloutState.page_keys`; a prompt is hashed once for all samples."""
  keys = admission.page_keys(cache, prompts)
  if keys is None:
    return None
  total, width = sequences.tokens.shape
  columns = width // cache.config.page_size - keys.shape[1]
  keys = jnp.repeat(keys, total // prompts.shape[0], axis=0)
  return jnp.pad(keys, ((0, 0), (0, columns), (0, 0)))


def _no_counts(config: RolloutConfig) -> Counters:
  zeros = {
    field.name: jnp.zeros((), jnp.int32)
    for field in dataclasses.fields(Counters)
  }
  calls = jnp.zeros((len(packing.widths(config)),), jnp.int32)
  return Counters(**(zeros | {"calls": calls}))


def is_done(state: RolloutState) -> Array:
  """bool[]: whether every sequence is DONE or FAILED."""
  return jnp.all(state.sequences.status >= queue.DONE)


def _check_memory(cache: CacheState, kv: KVPages) -> None:
  check_single(cache)
  sizes = cache.config
  for kind in sizes.groups:
    if kind.holds_states or kind.holds_encoder:
      raise ValueError(
        "`cache` must have groups of attention over the sequences' own tokens, "
        f"got {kind}: a rollout has no memory for it yet."
      )
  if len(set(sizes.page_sizes)) > 1:
    raise ValueError(
      "`cache` must have one page size for all groups, got "
      f"{sizes.page_sizes}: a rollout has one K/V memory."
    )
  check(kv, sizes)
  if isinstance(cache.num_pages, Tracer):
    return
  if np.any(np.asarray(cache.num_pages)):
    raise ValueError(
      "`cache` must have no slot in use, got some; free them before a rollout."
    )


def _check_fits(
  sizes: CacheConfig, prompts: Array, lengths: Array, config: RolloutConfig
) -> None:
  width = prompts.shape[1]
  if width + config.max_new_tokens > sizes.slot_tokens:
    raise ValueError(
      f"`prompts` and `max_new_tokens` must fit a slot of {sizes.slot_tokens} "
      f"tokens, got {width} columns and {config.max_new_tokens}; raise "
      "CacheConfig.pages_per_slot."
    )
  if isinstance(lengths, Tracer):
    return
  # NumPy, because in a trace jax would trace even concrete arrays.
  known = np.asarray(lengths)
  for row, length in enumerate(known.tolist()):
    if not 1 <= length <= width:
      raise ValueError(
        f"`lengths[{row}]` must be 1 .. {width}, the tokens of a prompt, got "
        f"{length}."
      )
  longest = int(known.max()) + config.max_new_tokens
  needed = sum(
    kind.most_pages(size, config.prefill_chunk, longest)
    for kind, size in zip(sizes.groups, sizes.page_sizes, strict=True)
  )
  if needed > sizes.num_pages - 1:
    raise ValueError(
      f"`CacheConfig.num_pages` must be at least {needed + 1} for the longest "
      f"sequence of {longest} tokens, got {sizes.num_pages}."
    )
