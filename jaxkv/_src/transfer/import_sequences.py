"""import_sequences: adds the sequences that another rollout exported."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.indexing import SlotRows
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Outcome
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import empty as empty_cache
from jaxkv._src.cache.state import first_code
from jaxkv._src.cache.state import without_moves
from jaxkv._src.cache.steps.longest_hit import find_prefix
from jaxkv._src.cache.steps.publish import publish
from jaxkv._src.cache.steps.reserve import reservation
from jaxkv._src.cache.steps.reserve import reserve
from jaxkv._src.cache.steps.reserve import sum_by_pool
from jaxkv._src.cache.verbs.free import free
from jaxkv._src.engine.admission.admit import empty_slots
from jaxkv._src.engine.memory import move_pages
from jaxkv._src.engine.pages.grow import groups_by_pool
from jaxkv._src.engine.pages.grow import needed_pages
from jaxkv._src.engine.pages.grow import pages_at_once
from jaxkv._src.engine.pages.grow import promised_pages
from jaxkv._src.engine.queue.find_sequences import as_mask
from jaxkv._src.engine.queue.page_keys import page_keys
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.queue import first_of
from jaxkv._src.engine.queue.queue import set_status
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import check_single
from jaxkv._src.engine.verbs.submit import put_rows
from jaxkv._src.engine.verbs.submit import with_ids_used
from jaxkv._src.kv.page_contents import write_pages
from jaxkv._src.transfer.exported import Exported
from jaxkv._src.transfer.import_rules import check_exported
from jaxkv._src.transfer.import_rules import fingerprint_of
from jaxkv._src.transfer.import_rules import has_usable_pages


def import_sequences(
  state: RolloutState, exported: Exported, *, mask: Array | None = None
) -> tuple[RolloutState, Outcome]:
  """Adds sequences that another rollout exported.

  Sequences keep their ids, keys and settings, so they sample the same tokens as
  in the other rollout. Both rollouts must have the same model, `process` and
  stop strings.

  A sequence that was running enters a slot with its pages, if a slot is empty
  and enough pages are free to admit it. If only the pages are missing, it waits
  without pages. Other sequences wait, or stay ended, and their full pages
  become cached. Pages already cached here are shared.

  | sequence                             | tokens that are computed again      |
  |--------------------------------------|-------------------------------------|
  | enters a slot with its pages         | none                                |
  | waits, with cached pages             | those after its last full page; in  |
  |                                      | models with windows or states, also |
  |                                      | earlier tokens, possibly all        |
  | has no pages, or its pages have      | all but the prefix that is cached   |
  | another secret, version or page size | here                                |

  After an import, `submit` without `ids` uses ids above the imported ones. The
  other rollout may use the same ids for other prompts. So if sequences move
  between rollouts, pass `ids` to every `submit`.

  Args:
    state: the rollout. The options that decide what is sampled and recorded,
      and `max_length`, must equal those of the other rollout. Each field of
      `Sampling` that the other rollout has, except `max_tokens` and `seed`, is
      required here too, with lists that are at least as long. The numbers of
      slots, of pages and of rows of the queue may differ.
    exported: from `export`, by a trusted source, because later prompts can hit
      its pages; see SECURITY.md.
    mask: bool[R], the sequences of `exported` to add; None for all.

  Returns:
    The rollout, and per sequence OK, SKIPPED (also if `export` did not remove
    it), STALE (the weights here are of an earlier version, see
    `update_weights`), BAD_SEQUENCE (the id is in use) or QUEUE_FULL (the
    queue has neither a prompt whose G rows are all EMPTY, nor another sample of
    the same prompt).

  Raises:
    ValueError: the other rollout had other settings, or its memory has another
      layout; or `state` or `exported` is a stack.
  """
  check_single(state)
  check_exported(exported, state)
  if exported.code.shape[0] == 0:
    return state, Outcome(code=exported.code)
  return _import(state, exported, as_mask(mask, exported.code.shape[0]))


@jax.jit
def _import(
  state: RolloutState, exported: Exported, mask: Array
) -> tuple[RolloutState, Outcome]:
  state, exported, mask = sharding.match_varying_axes((state, exported, mask))
  queue, cache = state.queue, state.memory.cache
  samples = state.config.num_samples
  rows, code = _rows_of(state, exported, mask)
  is_ok = code == Status.OK
  # Rows of refused sequences are out of range, so nothing is written for them.
  target_rows = indexing.where_valid(is_ok, rows)
  sequences = exported.queue
  new = dataclasses.replace(
    sequences,
    epochs=jnp.full_like(sequences.epochs, cache.epoch),
    overtaken=jnp.zeros_like(sequences.overtaken),
    page_keys=page_keys(cache, sequences.tokens, sequences.salts),
  )
  try:
    queue = put_rows(queue, target_rows, new)
  except ValueError as error:
    raise ValueError(
      "`exported` must come from a rollout whose settings this one has too: "
      f"{error}"
    ) from error
  first_ids = sequences.ids - exported.sample
  queue = with_ids_used(queue, first_ids, is_ok, samples)
  state = dataclasses.replace(state, queue=queue)
  if has_usable_pages(exported, state):
    state = _with_pages(state, exported, target_rows)
  return state, Outcome(code=code)


def _rows_of(
  state: RolloutState, exported: Exported, mask: Array
) -> tuple[Array, Array]:
  """Finds a row for each sequence.

  Returns:
    The rows, int32[R]; and the codes, int32[R].
  """
  queue, samples = state.queue, state.config.num_samples
  ids, sample = exported.queue.ids, exported.sample
  exists = queue.status != SequenceStatus.EMPTY
  is_used = jnp.any((ids[:, None] == queue.ids[None]) & exists[None], axis=1)
  asked = mask & (exported.code == Status.OK)
  code = first_code(
    (~asked, Status.SKIPPED),
    (exported.version > state.memory.cache.epoch, Status.STALE),
    (is_used | indexing.any_earlier(ids, asked), Status.BAD_SEQUENCE),
  )
  # The id of a prompt's first sample identifies its group.
  first_ids = ids - sample
  sample_of_row = jnp.arange(queue.size, dtype=jnp.int32) % samples
  firsts = jnp.where(exists, queue.ids - sample_of_row, -1)
  firsts = jnp.max(firsts.reshape(-1, samples), axis=1)
  num_groups, is_ok = firsts.shape[0], code == Status.OK
  # The index of the prompt's group, or of its first sequence after all groups.
  first_ids = indexing.where_valid(is_ok, first_ids)
  all_first_ids = jnp.concatenate([firsts, first_ids])
  leader = indexing.first_equal(all_first_ids)[num_groups:]
  # Other prompts get EMPTY groups, in order.
  row = jnp.arange(ids.shape[0], dtype=jnp.int32)
  opens_group = is_ok & (leader == num_groups + row)
  rank = jnp.cumsum(opens_group, dtype=jnp.int32) - 1
  rank = indexing.take(rank, leader - num_groups)
  empty_groups = first_of(firsts < 0, ids.shape[0])
  group = indexing.take(empty_groups, rank, fill=num_groups)
  group = jnp.where(leader < num_groups, leader, group)
  has_no_group = is_ok & (group >= num_groups)
  code = jnp.where(has_no_group, jnp.int32(Status.QUEUE_FULL), code)
  return group * samples + sample, code


def _with_pages(
  state: RolloutState, exported: Exported, target_rows: Array
) -> RolloutState:
  """Imports pages of rows int32[R]; seats those that were running."""
  assert exported.contents is not None
  cache = without_moves(state.memory.cache)
  memory = dataclasses.replace(state.memory, cache=cache)
  state = dataclasses.replace(state, memory=memory)
  queue, slots = state.queue, state.slots
  is_wanted = (target_rows < queue.no_row) & (exported.num_computed > 0)
  # Pages have the same keys in caches of the same version and secret.
  is_wanted &= cache.epoch == exported.version
  is_wanted &= jnp.all(fingerprint_of(cache) == exported.fingerprint)
  # Sequences get the empty slots in the order of `exported`.
  runs = is_wanted & exported.runs
  rank = jnp.cumsum(runs, dtype=jnp.int32) - 1
  empty = first_of(empty_slots(queue, slots, cache), target_rows.shape[0])
  slot = jnp.where(runs, empty[rank], slots.no_slot)
  spare_cache, pages = _in_spare_slots(
    state, exported, is_wanted, slot < slots.no_slot
  )
  # Evicted pages move to offload memory before they are overwritten.
  memory = move_pages(dataclasses.replace(memory, cache=spare_cache))
  sources, pages = exported.page.reshape(-1), pages.reshape(-1)
  kv = write_pages(memory.kv, exported.contents, sources, pages)
  is_held = memory.cache.length > 0
  slot = jnp.where(is_held, slot, slots.no_slot)
  runs = slot < slots.no_slot
  # Pages of sequences that enter no slot stay cached until they are evicted.
  spare_cache, _ = free(memory.cache, mask=is_held & ~runs)
  memory = dataclasses.replace(
    memory, cache=_take_slots(cache, spare_cache, slot), kv=kv
  )
  # All others that have not ended are WAITING, as `export` left them.
  queue = set_status(queue, target_rows, runs, SequenceStatus.RUNNING)
  row = indexing.put(slots.row, slot, values=target_rows)
  slots = dataclasses.replace(slots, row=row)
  # After `update_weights("keep")`, pages can have keys of an older epoch.
  epochs = exported.queue.epochs
  is_old = runs & (epochs != exported.version)
  old_rows = indexing.where_valid(is_old, target_rows)
  keys = queue.page_keys
  if keys is not None:
    keys = indexing.put(keys, old_rows, values=jnp.uint32(0))
  epochs = indexing.put(queue.epochs, old_rows, values=epochs)
  queue = dataclasses.replace(queue, epochs=epochs, page_keys=keys)
  return dataclasses.replace(state, queue=queue, slots=slots, memory=memory)


def _in_spare_slots(
  state: RolloutState, exported: Exported, is_wanted: Array, enters: Array
) -> tuple[CacheState, Array]:
  """Reserves and publishes the pages of sequences, without their contents.

  The pages of sequences in `is_wanted`, bool[R], are imported. Sequences in
  `enters`, bool[R], will enter a slot.

  Returns:
    The cache with R spare slots, which hold the sequences whose pages fit;
    int32[R, G, A], the pages that need contents, 0 for other columns.
  """
  queue, slots, cache = state.queue, state.slots, state.memory.cache
  group_sizes, num_tokens = cache.config.sizes, exported.num_computed
  # As in admission, pages stay free for the tokens of each sequence that are
  # not computed yet, and one page in each group for each running sequence.
  num_held = group_sizes.columns_for(num_tokens)
  num_held -= group_sizes.skipped_pages(num_tokens)
  later = pages_at_once(cache.config, exported.queue.length, state.config)
  later = jnp.maximum(jnp.where(enters[:, None], later - num_held, 0), 0)
  running = jnp.sum(slots.row < queue.no_row) + jnp.sum(enters)
  later = sum_by_pool(cache.config, later)
  needed = needed_pages(queue, slots, cache, state.config)
  keep_free = promised_pages(queue, slots, cache, needed, state.config)
  keep_free += jnp.sum(later, axis=0, dtype=jnp.int32)
  keep_free += running.astype(jnp.int32) * groups_by_pool(cache.config)[0]
  keep_free = jnp.where(enters[:, None], keep_free[None], 0)
  # Sequences that enter a slot come first, because they keep their pages.
  order = jnp.lexsort((~enters, ~is_wanted)).astype(jnp.int32)
  # In `shard_map`, the result of the sort varies over no mesh axis.
  order, is_wanted = sharding.match_varying_axes((order, is_wanted))

  # One sequence after another, so that samples of a prompt share its pages.
  def enter(
    index: Array, loop: tuple[CacheState, Array]
  ) -> tuple[CacheState, Array]:
    spare_cache, pages = loop
    row = order[index][None]
    spare_cache, new_pages = _enter(
      spare_cache, exported, row, indexing.take(keep_free, row)
    )
    return spare_cache, indexing.put(pages, row, values=new_pages)

  spare_cache = _with_spare_slots(cache, enters.shape[0])
  count = jnp.sum(is_wanted, dtype=jnp.int32)
  loop = spare_cache, jnp.zeros_like(exported.page)
  count, loop = sharding.match_varying_axes((count, loop))
  return lax.fori_loop(0, count, enter, loop)


def _enter(
  cache: CacheState, exported: Exported, row: Array, keep_free: Array
) -> tuple[CacheState, Array]:
  """Puts sequence `row`, int32[1], into its spare slot if its pages fit.

  Returns:
    The cache; and int32[1, G, A], the pages that need contents.
  """
  queue = exported.queue
  tokens, length, epoch, salts = jax.tree.map(
    lambda array: indexing.take(array, row),
    (queue.tokens, queue.length, queue.epochs, queue.salts),
  )
  num_tokens = indexing.take(exported.num_computed, row)
  group_sizes, columns = cache.config.sizes, exported.page.shape[-1]
  is_current = epoch == cache.epoch
  prefix = find_prefix(cache, tokens, num_tokens + 1, is_current, salts)
  root = prefix.root
  if cache.secret is not None:
    root = hashing.root_key(cache.secret, epoch[0], salts)
  # Columns behind a window get no page. A recurrent state is in the column of
  # the last token.
  first_pages = group_sizes.skipped_pages(num_tokens)
  plan = reservation(
    cache,
    first=first_pages,
    hit=jnp.maximum(prefix.stop, first_pages),
    stop=group_sizes.columns_for(num_tokens),
    begins=row >= 0,
  )
  no_row = row < 0
  rows = SlotRows(row, False, no_row, no_row)
  cache, code = reserve(
    cache,
    rows,
    plan,
    sharding.zeros_like(row),
    # `reserve` marks skipped columns only if `hits` has at least one column.
    hits=jnp.pad(prefix.pages, ((0, 0), (0, 0), (0, 1))),
    keep_free=keep_free,
  )
  is_served = code == Status.OK
  hashes = hashing.start_slots(
    cache.hashes, rows, is_served, root, prompt_length=length
  )
  cache = dataclasses.replace(cache, hashes=hashes)
  reserved = indexing.take(cache.page_table, row)[..., :columns]
  num_tokens = jnp.where(is_served, num_tokens, 0)
  # Hits are published already.
  cache, _ = publish(cache, rows, tokens, num_tokens, first=plan.hit)
  final = indexing.take(cache.page_table, row)[..., :columns]
  # If `publish` used a cached page instead, this sequence writes no contents.
  is_new = indexing.between(plan.hit, plan.stop, columns) & (final == reserved)
  return cache, jnp.where(is_new & is_served[:, None, None], final, 0)


def _with_spare_slots(state: CacheState, num_slots: int) -> CacheState:
  """Returns a cache of the same pages with `num_slots` other slots, all empty.

  Its reference counts include the slots of both caches. So do not call verbs on
  `state` before `_take_slots` moves the sequences there.
  """
  config = dataclasses.replace(state.config, num_slots=num_slots)
  spare_cache = empty_cache(config, state.epoch, state.secret, state.root)
  return dataclasses.replace(
    spare_cache, pool=state.pool, counts=state.counts, error=state.error
  )


def _take_slots(
  state: CacheState, spare_cache: CacheState, slots: Array
) -> CacheState:
  """Moves the sequence of each spare slot r into slot `slots[r]`, int32[R].

  The slots are distinct and empty, and out of range for an empty spare slot.
  Also takes over the pool and the counters of `spare_cache`.
  """

  def put(array: Array, values: Array) -> Array:
    return indexing.put(array, slots, values=values)

  names = ("page_table", "num_pages", "num_skipped_pages", "length", "hashes")
  fields = {
    name: jax.tree.map(put, getattr(state, name), getattr(spare_cache, name))
    for name in names
  }
  return dataclasses.replace(
    state, pool=spare_cache.pool, counts=spare_cache.counts, **fields
  )
