"""Two memories equal one pool, and every move matters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.cache.shadow_memory import FalseContent
from tests.cache.shadow_memory import ShadowMemory


def _conversations():
  """Prompts that grow and return in random order, and their lengths.

  No prompt ends with a full page, which would be cached twice. Of two equal
  pages a lookup prefers the one on the device, and one pool the older one.
  """
  rng = np.random.default_rng(0)
  texts = rng.integers(1, 100, (14, 16))
  turns = [(rng.integers(14), 1 + 2 * rng.integers(1, 8)) for _ in range(150)]
  prompts = np.asarray([texts[text] for text, _ in turns], np.int32)
  return prompts, np.asarray([length for _, length in turns], np.int32)


def _sizes(num_pages, offload_pages=0):
  return jaxkv.CacheConfig(
    num_pages=num_pages,
    page_size=2,
    num_slots=1,
    pages_per_slot=8,
    offload_pages=offload_pages,
  )


def _serve(config, change=lambda moves: moves):
  """Serves conversations, and checks the contents of all hits.

  `change` changes the moves that verbs return. Returns the hits of each prompt,
  and the counters.
  """
  state = jaxkv.init(config, jnp.zeros(4, jnp.uint32))
  hits = []
  memory = ShadowMemory(config)
  slot = jnp.zeros((1,), jnp.int32)
  page_size = config.page_size
  for tokens, length in zip(*_conversations(), strict=True):
    state, out = jaxkv.admit(state, slot, tokens[None], length[None])
    assert out.ok.all()
    if out.moves is not None:
      memory.move(change(jax.device_get(out.moves)))
    cached = int(out.num_cached_tokens[0])
    hits.append(cached)
    pages = np.asarray(state.page_table[0, 0])[: -(-length // page_size)]
    contents = np.resize(tokens, (len(pages), page_size))
    actual = memory.content[pages[: cached // page_size]]
    if not np.array_equal(actual, contents[: cached // page_size]):
      raise FalseContent(f"hits hold {actual}")
    memory.content[pages] = contents
    suffix = jnp.roll(tokens, -cached)[None]
    state, _ = jaxkv.commit(state, suffix, length[None] - cached)
    state, _ = jaxkv.free(state, slots=slot)
  jaxkv.check(state)
  return hits, jaxkv.stats(state)


@pytest.mark.slow
@pytest.mark.parametrize("split", [(12, 40), (26, 26), (44, 8)])
def test_hits_equal_those_of_one_pool(split):
  """Integer for integer, with conversations that grow and return."""
  num_pages, offload_pages = split
  expected, _ = _serve(_sizes(1 + num_pages + offload_pages))
  hits, stats = _serve(_sizes(1 + num_pages, offload_pages))
  assert hits == expected
  assert int(stats.restored_pages) > 20
  assert int(stats.forgotten_pages) > 20


def test_a_stale_page_is_not_saved():
  config = jaxkv.CacheConfig(
    num_pages=4, page_size=2, num_slots=1, pages_per_slot=4, offload_pages=4
  )
  state = jaxkv.init(config)
  state, _ = jaxkv.allocate(state, [6])
  state, _ = jaxkv.commit(state, [[1, 2, 3, 4, 5, 6]], [6])
  state, _ = jaxkv.free(state, slots=[0])
  for start_state, num_saved in ((state, 3), (jaxkv.new_epoch(state)[0], 0)):
    new_state, out = jaxkv.allocate(start_state, [6])
    assert int(out.moves.count) == num_saved
    assert int(jaxkv.stats(new_state).saved_pages) == num_saved
    assert len(jaxkv.cached_pages(new_state)) == num_saved


@pytest.mark.slow
def test_stale_entries_longer_than_a_window():
  """A hit leaves 300 of them in the offload queue, and one call reads 128."""
  length = 300
  config = jaxkv.CacheConfig(
    num_pages=1 + length,
    page_size=1,
    num_slots=1,
    pages_per_slot=length,
    offload_pages=length + 100,
  )
  state = jaxkv.init(config)
  hits = []
  prompts = np.arange(3 * length).reshape(3, 1, length)
  for tokens in prompts[[0, 1, 0, 2]]:
    state, out = jaxkv.admit(state, [0], tokens, [length])
    hits.append(int(out.num_cached_tokens[0]))
    suffix = np.roll(tokens, -hits[-1])
    state, _ = jaxkv.commit(state, suffix, length - out.num_cached_tokens)
    state, _ = jaxkv.free(state, slots=[0])
  assert hits == [0, 0, length - 1, 0]
  stats = jaxkv.stats(state)
  assert int(stats.saved_pages) == 3 * length
  # Of these pages, one prompt returned, and as many are left as fit.
  num_left = hits[2] + config.offload_pages
  assert int(stats.forgotten_pages) == 3 * length - num_left
  jaxkv.check(state)


def _left_out(moves):
  return dataclasses.replace(moves, count=np.maximum(moves.count - 1, 0))


def _doubled(moves):
  count = int(moves.count)
  if count == 0:
    return moves
  order = [0, *range(count)]
  return _reordered(moves, order)


def _reversed(moves):
  return _reordered(moves, range(int(moves.count))[::-1])


def _reordered(moves, order):
  order = list(order)
  return dataclasses.replace(
    moves,
    page=moves.page[order],
    saved_to=moves.saved_to[order],
    restored_from=moves.restored_from[order],
    count=np.int32(len(order)),
  )


@pytest.mark.slow
@pytest.mark.parametrize("change", [_left_out, _doubled, _reversed])
def test_every_move_matters(change):
  with pytest.raises(FalseContent):
    _serve(_sizes(13, 40), change)


def test_a_page_is_restored_once_for_all_slots():
  config = dataclasses.replace(_sizes(6, 8), num_slots=2)
  state = jaxkv.init(config)
  prompt = jnp.arange(10, 15, dtype=jnp.int32)
  for tokens in (prompt, jnp.arange(20, 30, dtype=jnp.int32)):
    count = jnp.asarray([tokens.size])
    state, out = jaxkv.admit(state, jnp.asarray([0]), tokens[None], count)
    assert out.ok.all()
    state, _ = jaxkv.commit(state, tokens[None], count, slots=jnp.asarray([0]))
    state, _ = jaxkv.free(state, slots=jnp.asarray([0]))
  state, out = jaxkv.admit(
    state,
    jnp.asarray([0, 1]),
    jnp.stack([prompt, prompt]),
    jnp.asarray([5, 5]),
  )
  assert out.num_cached_tokens.tolist() == [4, 4]
  pages = state.page_table[:, 0, :2]
  assert (pages[0] == pages[1]).all() and int(
    jaxkv.stats(state).restored_pages
  ) == 2
  assert state.pool.ref_count[pages[0]].tolist() == [2, 2]
  jaxkv.check(state)
  state, _ = jaxkv.free(state)
  assert jaxkv.usage(state) == 0


def test_pin_of_less_than_a_page():
  state = jaxkv.init(_sizes(9, 4))
  state, out = jaxkv.pin(state, [[1]], [1])
  assert jaxkv.Status(int(out.code[0])) == jaxkv.Status.NOT_CACHED
