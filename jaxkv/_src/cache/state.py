"""The state of a cache: one immutable pytree of fixed-shape arrays.

Letters: G groups, B slots, R rows of one call, M pages a slot, N pages in the
pool, S tokens a page, T tokens, P full pages.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache import masked
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.pool.page_pool import PagePool
from jaxkv._src.cache.prefix import hashing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotHashes:
  """What is needed to go on hashing each slot's tokens.

  Attributes:
    root: the key before the slot's first page.  # uint32[B, 4]
    chain: the key at the last place where all groups end a page, `root`
      before there is one. A is `CacheConfig.alignment`.  # uint32[B, 4]
    tail: the tokens after it; of row b, `length[b] % A` count.
      # int32[B, A]
    prompt: tokens of the prompt that a slot was admitted with; None unless
      `CacheConfig.retention` is set.  # int32[B]
    junction: tokens that some groups had cached of it when not all had; None
      likewise.  # int32[B]
  """

  root: Array
  chain: Array
  tail: Array
  prompt: Array | None = None
  junction: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
  """What happened since `init`; every counter is a uint32[] and wraps around.

  The difference of two readings, `later - earlier`, is right across a wrap.

  Attributes:
    queries: tokens of admitted sequences, looked up in the index.
    hits: those of them whose K/V was there.
    popped: pages taken from the free queue.
    evicted: those of them that were cached until then.
    published: pages hashed and cached.
    merged: pages replaced by an equal one.
    failed: rows that asked for something and did not get it.
  """

  queries: Array
  hits: Array
  popped: Array
  evicted: Array
  published: Array
  merged: Array
  failed: Array

  def __sub__(self, earlier: "Stats") -> "Stats":
    """What happened between two readings."""
    return jax.tree.map(lambda late, early: late - early, self, earlier)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheState:
  """A cache. Every verb takes one and returns another; none is changed.

  Invariants, each tested by `check_invariants`:
    tables: row (g, b) holds `first_page[g, b]` null pages, then pages up to
      `num_pages[g, b]`, then NO_PAGE.
    lengths: the pages of a slot have room for its tokens.
    refs: `ref_count` is the number of entries that name a page plus its pins.
    free: a page is live in the queue exactly once iff nothing references it.
    index: a page is found under its key iff it is cached.
    keys: a slot's pages carry the chained keys of the tokens they hold.

  Attributes:
    config: the static sizes and options.
    page_table: page numbers; 0 is the null page, NO_PAGE = N where no page
      was ever attached.  # int32[G, B, M]
    num_pages: columns in use of each row; a slot without any is empty.
      # int32[G, B]
    first_page: columns that a window or a chunk has left behind.  # int32[G, B]
    length: tokens whose K/V is final.  # int32[B]
    hashes: None without prefix caching.
    pool: the pages.
    stats: what happened.
    epoch: the version of the weights that pages are valid for.  # uint32[]
    error: the first failure's Code; see `codes.sticky`.  # int32[]
  """

  config: CacheConfig = dataclasses.field(metadata={"static": True})
  page_table: Array
  num_pages: Array
  first_page: Array
  length: Array
  hashes: SlotHashes | None
  pool: PagePool
  stats: Stats
  epoch: Array
  error: Array


def init(config: CacheConfig) -> CacheState:
  """An empty cache.

  Args:
    config: the sizes.

  Returns:
    A state whose every array is a buffer of its own, so that it can be donated.

  Raises:
    TypeError: the config is no CacheConfig.

  Examples:
    >>> import jaxkv
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=8, page_size=4, num_slots=2, pages_per_slot=4
    ... )
    >>> state = jaxkv.init(config)
    >>> state.page_table.shape
    (1, 2, 4)
  """
  if not isinstance(config, CacheConfig):
    raise TypeError(
      f"config must be a CacheConfig, got {type(config).__name__}; make one "
      "with jaxkv.CacheConfig(...)."
    )
  groups, slots = config.num_groups, config.num_slots
  hashes = None
  if config.prefix_caching:
    hashes = SlotHashes(
      root=jnp.zeros((slots, hashing.KEY_WORDS), jnp.uint32),
      chain=jnp.zeros((slots, hashing.KEY_WORDS), jnp.uint32),
      tail=jnp.zeros((slots, config.alignment), jnp.int32),
    )
    if config.retention is not None:
      hashes = dataclasses.replace(
        hashes,
        prompt=jnp.zeros((slots,), jnp.int32),
        junction=jnp.zeros((slots,), jnp.int32),
      )
  counters = {
    field.name: jnp.zeros((), jnp.uint32) for field in dataclasses.fields(Stats)
  }
  return CacheState(
    config=config,
    page_table=jnp.full(
      (groups, slots, config.pages_per_slot), config.no_page, jnp.int32
    ),
    num_pages=jnp.zeros((groups, slots), jnp.int32),
    first_page=jnp.zeros((groups, slots), jnp.int32),
    length=jnp.zeros((slots,), jnp.int32),
    hashes=hashes,
    pool=page_pool.init(config),
    stats=Stats(**counters),
    epoch=jnp.zeros((), jnp.uint32),
    error=jnp.zeros((), jnp.int32),
  )


def check_single(state: Any) -> None:
  """Raises unless it is one cache.

  Raises:
    TypeError: it is none, such as all that a verb returned.
    ValueError: it is a stack of caches, as `vmap` makes them.
  """
  if not isinstance(state, CacheState):
    hint = "make one with jaxkv.init."
    if isinstance(state, tuple):
      hint = "did you mean `state, out = ...` where a verb returned it?"
    raise TypeError(
      f"state must be a CacheState, got {type(state).__name__}; {hint}"
    )
  if state.length.ndim != 1:
    raise ValueError(
      f"state is a stack of caches of shape {state.length.shape[:-1]}; call "
      "under jax.vmap, or on the host take one out of it with "
      "jax.tree.map(lambda leaf: leaf[0], state)."
    )


def is_empty(state: CacheState, slots: Array) -> Array:
  """bool[R]: whether slots hold no page (True for slots out of range)."""
  lead = state.config.lead_group
  return masked.take(state.num_pages[lead], slots) == 0


def in_range(state: CacheState, slots: Array) -> Array:
  """bool[R]: whether slot numbers name a slot."""
  return (slots >= 0) & (slots < state.config.num_slots)


def with_sequences(
  hashes: SlotHashes,
  slots: Array,
  *,
  root: Array,
  chain: Array,
  prompt: Array,
  junction: Array,
) -> SlotHashes:
  """The hashes with sequences begun in slots int32[R].

  `tail` is left: they begin where all groups end a page.
  """
  hashes = dataclasses.replace(
    hashes,
    root=masked.put(hashes.root, slots, values=root),
    chain=masked.put(hashes.chain, slots, values=chain),
  )
  if hashes.prompt is None or hashes.junction is None:
    return hashes
  return dataclasses.replace(
    hashes,
    prompt=masked.put(hashes.prompt, slots, values=prompt),
    junction=masked.put(hashes.junction, slots, values=junction),
  )


def counted(stats: Stats, **amounts: Array) -> Stats:
  """The counters with int32[] amounts added to those named."""
  return dataclasses.replace(
    stats,
    **{
      name: getattr(stats, name) + jnp.sum(amount, dtype=jnp.uint32)
      for name, amount in amounts.items()
    },
  )
