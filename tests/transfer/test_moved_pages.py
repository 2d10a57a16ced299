"""Pages that move with their sequences, in rollouts made by hand."""

import dataclasses

import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import rollout
from jaxkv._src.transfer.import_rules import fingerprint_of
from tests.engine import by_hand

_CONFIG = rollout.RolloutConfig(
  max_new_tokens=4, max_length=14, prefill_chunk=3
)


def _running(cache_config, prompts, lengths) -> rollout.RolloutState:
  """Returns a rollout in which the first sequences have computed tokens.

  Sequence i is in slot i. The contents of a page are its number.
  """
  config = _CONFIG
  state = by_hand.begun(cache_config, config, prompts)
  counts = np.zeros(cache_config.num_slots, np.int32)
  counts[: len(lengths)] = lengths
  rows = np.zeros((cache_config.num_slots, max(lengths)), np.int32)
  for slot, length in enumerate(lengths):
    rows[slot, :length] = prompts[slot][:length]
  cache, out = jaxkv.allocate(state.memory.cache, counts)
  assert out.ok.all()
  cache, _ = jaxkv.commit(cache, rows, counts)
  cache, _ = jaxkv.recycle(cache)
  status = state.queue.status.at[: len(lengths)].set(by_hand.RUNS)
  slots = dataclasses.replace(
    state.slots, row=state.slots.row.at[: len(lengths)].set(range(len(lengths)))
  )
  numbers = jnp.arange(cache_config.num_pages, dtype=jnp.float32)
  kv = state.memory.kv
  k = jnp.broadcast_to(numbers.reshape(-1, 1, 1, 1), kv.k.shape)
  kv = dataclasses.replace(kv, k=k, v=-k)
  memory = dataclasses.replace(state.memory, cache=cache, kv=kv)
  state = dataclasses.replace(state, slots=slots, memory=memory)
  return by_hand.with_queue(state, status=status)


def test_pages_of_running_sequences_move():
  """More than a loop's 16 pages; those behind a window do not move.

  Pages of other weights, or of another secret, are not used.
  """
  cache_config = jaxkv.CacheConfig(
    num_pages=70,
    page_size=2,
    num_slots=4,
    pages_per_slot=8,
    groups=(jaxkv.FullAttention(), jaxkv.SlidingWindow(3)),
  )
  prompts = [[(7 * row + i) % 11 for i in range(10)] for row in range(4)]
  lengths = [9, 8, 5, 7]
  source = _running(cache_config, prompts, lengths)
  rollout.check(source)
  table = np.asarray(source.memory.cache.page_table)
  # The last two tokens are visible to the next one.
  columns = [
    [range(-(-length // 2)), range((length - 2) // 2, -(-length // 2))]
    for length in lengths
  ]
  _, exported = rollout.export(source, [0, 1, 2, 3])
  assert exported.runs.all() and exported.num_computed.tolist() == lengths
  num_pages = sum(len(group) for row in columns for group in row)
  is_page = np.asarray(exported.page) >= 0
  assert num_pages > 16 and int(is_page.sum()) == num_pages
  for row, groups in enumerate(columns):
    for group, held in enumerate(groups):
      assert np.flatnonzero(is_page[row, group]).tolist() == [*held]
  other_secret = by_hand.begun(
    cache_config, source.config, prompts, num_samples=[0] * 4
  )
  empty = by_hand.with_cache(
    other_secret,
    dataclasses.replace(
      other_secret.memory.cache,
      secret=jnp.copy(source.memory.cache.secret),
      root=jnp.copy(source.memory.cache.root),
    ),
  )
  target, out = rollout.import_sequences(empty, exported)
  assert out.ok.all()
  rollout.check(target)
  assert target.queue.status.tolist() == [by_hand.RUNS] * 4
  cache, k = target.memory.cache, np.asarray(target.memory.kv.k)
  for row in range(4):
    (slot,) = np.flatnonzero(np.asarray(target.slots.row) == row)
    assert int(cache.length[slot]) == lengths[row]
    for group, held in enumerate(columns[row]):
      for column in held:
        page = int(cache.page_table[slot, group, column])
        assert (k[page] == table[row, group, column]).all()
  newer = by_hand.with_cache(empty, jaxkv.new_epoch(empty.memory.cache)[0])
  # Without prefix caching, fingerprints do not tell weights apart.
  fingerprint = fingerprint_of(newer.memory.cache)
  other_weights = dataclasses.replace(exported, fingerprint=fingerprint)
  for state, pages in ((newer, other_weights), (other_secret, exported)):
    state, out = rollout.import_sequences(state, pages)
    assert out.ok.all()
    assert state.queue.status.tolist() == [by_hand.WAITS] * 4
    assert not state.memory.cache.length.any()
    assert int(state.memory.cache.pool.queue.num_free[0]) == 69


def test_export_ends_before_an_offloaded_page():
  """Of three cached pages, the last two are in offload memory."""
  cache_config = jaxkv.CacheConfig(
    num_pages=7, page_size=2, num_slots=2, pages_per_slot=8, offload_pages=4
  )
  prompts = [[1, 2, 3, 4, 5, 6, 7], [8] * 8]
  state = _running(cache_config, prompts[:1] * 2, [6])
  cache, _ = jaxkv.free(state.memory.cache, slots=[0])
  cache, _ = jaxkv.allocate(cache, [0, 10])
  waits = state.queue.status * 0
  slots = dataclasses.replace(
    state.slots, row=jnp.full_like(state.slots.row, 2)
  )
  state = dataclasses.replace(by_hand.with_cache(state, cache), slots=slots)
  state = by_hand.with_queue(state, status=waits)
  match = jaxkv.match(cache, prompts[:1], [7])
  assert match.num_cached_tokens.tolist() == [6]
  _, exported = rollout.export(state, [0])
  assert exported.num_computed.tolist() == [2]
  is_page = np.asarray(exported.page) >= 0
  assert is_page[0, 0].tolist() == [True] + [False] * 6
