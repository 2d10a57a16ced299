"""export: removes sequences from a rollout, for another one to continue."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.arrays.arguments import refuse
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.steps.longest_hit import find_prefix
from jaxkv._src.engine.queue.find_sequences import as_ids
from jaxkv._src.engine.queue.find_sequences import as_mask
from jaxkv._src.engine.queue.find_sequences import find
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.queue import set_status
from jaxkv._src.engine.slots import are_computing
from jaxkv._src.engine.slots import slots_of
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import check_single
from jaxkv._src.engine.verbs.leave_slots import leave_slots
from jaxkv._src.engine.verbs.submit import take_rows
from jaxkv._src.kv.page_contents import read_pages
from jaxkv._src.transfer.exported import Exported
from jaxkv._src.transfer.import_rules import fingerprint_of
from jaxkv._src.transfer.import_rules import layout_of


def export(
  state: RolloutState,
  ids: Array,
  *,
  mask: Array | None = None,
  max_pages: int | tuple[int, ...] | None = None,
) -> tuple[RolloutState, Exported]:
  """Removes sequences from a rollout, so that another one can continue them.

  `import_sequences` adds them to another rollout, where they sample the same
  tokens. Sequences of any status can move. The `state` that was passed still
  contains them, but only one rollout may continue a sequence.

  For a running sequence, all pages that it needs to continue are exported,
  including a partial last page and recurrent states. For a waiting or ended
  sequence, the pages of its cached prefix are exported, up to the first page in
  offload memory. Full pages stay cached here until they are evicted.

  Args:
    state: the rollout.
    ids: int32[R], ids of sequences.
    mask: bool[R], the rows to process; None for all.
    max_pages: static; X, the maximum number of exported pages of each pool, or
      a tuple with a number for each pool. A page that sequences share counts
      once. A sequence whose pages do not all fit is exported without pages.
      None for no limit.

  Returns:
    The rollout, and the sequences, with the code OK, SKIPPED or BAD_SEQUENCE
    for each row.

  Examples:
    >>> import jaxkv
    >>> from jaxkv import rollout
    >>> sizes = jaxkv.CacheConfig(
    ...   num_pages=9, page_size=4, num_slots=2, pages_per_slot=4
    ... )
    >>> kv = jaxkv.kv.init(sizes, num_layers=1, num_kv_heads=2, head_dim=8)
    >>> requests = rollout.Requests([[5, 7], [9, 3]], [2, 2])
    >>> state = rollout.init(
    ...   jaxkv.init(sizes), kv, requests, jax.random.key(0),
    ...   rollout.RolloutConfig(max_new_tokens=4),
    ... )
    >>> state, exported = rollout.export(state, [1], max_pages=0)
    >>> exported.queue.tokens.tolist(), exported.ok.tolist()
    ([[9, 3, 0, 0, 0, 0]], [True])
    >>> state, out = rollout.import_sequences(state, exported)
    >>> out.ok.tolist()
    [True]
  """
  check_single(state)
  ids = as_ids(ids)
  limits = _limits(state.memory.cache.config, max_pages)
  return _export(state, ids, as_mask(mask, ids.shape[0]), limits)


def _limits(
  config: CacheConfig, max_pages: int | tuple[int, ...] | None
) -> tuple[int, ...]:
  """Returns the maximum number of exported pages of each pool."""
  usable_pages = tuple(size - 1 for size in config.numbers.sizes)
  if max_pages is None:
    return usable_pages
  is_tuple = isinstance(max_pages, tuple)
  counts = max_pages if is_tuple else (max_pages,) * config.num_pools
  if len(counts) != config.num_pools:
    expected = f"a number, or one for each of {config.num_pools} pools"
    refuse(ValueError, "max_pages", expected, max_pages)
  counts = [as_count("max_pages", count, 0) for count in counts]
  return tuple(map(min, counts, usable_pages))


@jax.jit(static_argnums=3)
def _export(
  state: RolloutState, ids: Array, mask: Array, limits: tuple[int, ...]
) -> tuple[RolloutState, Exported]:
  state, ids, mask = sharding.match_varying_axes((state, ids, mask))
  queue, cache = state.queue, state.memory.cache
  cache_config = cache.config
  rows, _, code = find(queue, ids, mask)
  columns = -(-queue.width // cache_config.page_sizes[0])
  shape = rows.shape[0], cache_config.num_groups, columns
  runs, num_tokens = rows < 0, sharding.zeros_like(rows)
  pages = jnp.zeros(shape, jnp.int32)
  page = pages - 1
  contents = None
  # A sequence without the pages of one pool cannot continue.
  if shape[0] and all(limits):
    runs, num_tokens, pages = _computed(state, rows, columns)
    sources = []
    for groups, limit in zip(cache_config.groups_of_pools, limits, strict=True):
      index = jnp.asarray(groups)
      num_listed = min(limit, shape[0] * len(groups) * columns)
      listed, page_index = _numbered(pages[:, index], num_listed)
      sources.append(listed)
      page = page.at[:, index].set(page_index)
    contents = read_pages(state.memory.kv, sources)
  is_carried = jnp.all((pages == 0) | (page >= 0), axis=(1, 2))
  # Only after the pages were read, because `leave_slots` frees them.
  state = leave_slots(state, slots_of(queue, state.slots, rows))
  exported = Exported(
    code=code,
    queue=take_rows(state.queue, rows),
    sample=rows % state.config.num_samples,
    runs=runs,
    num_computed=jnp.where(is_carried, num_tokens, 0),
    # A copy, so that donating it does not delete the state's array.
    version=cache.epoch + jnp.uint32(0),
    fingerprint=fingerprint_of(cache),
    page=jnp.where(is_carried[:, None, None], page, -1),
    contents=contents,
    page_size=cache_config.page_sizes[0],
    layout=layout_of(state),
  )
  is_removed = code == Status.OK
  queue = set_status(state.queue, rows, is_removed, SequenceStatus.EMPTY)
  return dataclasses.replace(state, queue=queue), exported


def _computed(
  state: RolloutState, rows: Array, columns: int
) -> tuple[Array, Array, Array]:
  """Finds the computed tokens of rows int32[R], and their pages.

  Returns:
    bool[R], True for sequences that compute in a slot; int32[R], the number of
    computed tokens; int32[R, G, A], the pages in each of the G groups of the
    cache, 0 for columns not needed to continue. A is `columns`.
  """
  queue, slots, cache = state.queue, state.slots, state.memory.cache
  config, group_sizes = cache.config, cache.config.sizes
  in_slot = (slots.row[None] == rows[:, None]) & (rows < queue.no_row)[:, None]
  in_slot &= are_computing(queue, slots)[None]
  runs = jnp.any(in_slot, axis=1)
  slot = jnp.argmax(in_slot, axis=1).astype(jnp.int32)
  slot = jnp.where(runs, slot, slots.no_slot)
  # Without hits in offload memory, whose pages `read_pages` cannot read.
  on_device = dataclasses.replace(config, offload_policy="never")
  salts = queue.salts
  prefix = find_prefix(
    dataclasses.replace(cache, config=on_device),
    indexing.take(queue.tokens, rows),
    indexing.take(queue.length, rows),
    ~runs & (rows < queue.no_row),
    None if salts is None else indexing.take(salts, rows),
  )
  cached = prefix.attached_pages(config, columns)
  table = indexing.take(cache.page_table, slot)[..., :columns]
  in_table = indexing.take(cache.length, slot)
  num_tokens = jnp.where(runs, in_table, prefix.num_cached_tokens)
  pages = jnp.where(runs[:, None, None], table, cached)
  # Pages reserved for later tokens, or behind a window, are not exported.
  first_page = group_sizes.skipped_pages(num_tokens)
  stop_page = group_sizes.columns_for(num_tokens)
  is_needed = indexing.between(first_page, stop_page, columns)
  pages = jnp.where(is_needed & (pages < config.no_page), pages, 0)
  return runs, num_tokens, pages


def _numbered(pages: Array, num_listed: int) -> tuple[Array, Array]:
  """Lists the distinct pages in int32[R, G, A], where 0 means none.

  Returns:
    int32[X], a list of X = `num_listed` pages, then 0; int32[R, G, A], the
    index of each page in the list, -1 for no page, or for one that does not
    fit.
  """
  flat = pages.reshape(-1)
  is_page = flat > 0
  first_index = indexing.first_equal(indexing.where_valid(is_page, flat))
  lanes = jnp.arange(flat.shape[0], dtype=jnp.int32)
  is_first = is_page & (first_index == lanes)
  rank = jnp.cumsum(is_first, dtype=jnp.int32) - 1
  listed = indexing.put(
    jnp.zeros((num_listed,), jnp.int32),
    indexing.where_valid(is_first, rank),
    values=flat,
  )
  page_index = rank[first_index]
  is_listed = is_page & (page_index < num_listed)
  return listed, jnp.where(is_listed, page_index, -1).reshape(pages.shape)
