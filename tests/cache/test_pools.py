"""Hits, moves and refusals that depend on pages of several pools.

K/V pages have the numbers 1 to 16, states the numbers 18 to 23.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv

_CONFIG = jaxkv.CacheConfig(
  num_pages=(17, 7),
  page_size=2,
  num_slots=6,
  pages_per_slot=8,
  groups=(jaxkv.FullAttention(), jaxkv.Recurrent(pool=1)),
  offload_pages=(16, 6),
  prefix_retention_interval=jaxkv.StateRetention(4),
)
_TEXT = np.arange(100, 116, dtype=np.int32)


def _fill(state, *counts: int, first_token: int = 0):
  """Computes a text in slot 0, so many tokens at a time, and frees the slot."""
  tokens = _TEXT + first_token
  for count in counts:
    state, _ = jaxkv.recycle(state)
    state, room = jaxkv.allocate(state, [count, *[0] * 5])
    assert bool(room.ok[0])
    state, _ = jaxkv.commit(state, tokens[None], [count], slots=[0])
    tokens = np.roll(tokens, -count)
  state, _ = jaxkv.free(state, slots=[0])
  jaxkv.check(state)
  return state


def _cached():
  """Caches K/V of eight tokens in pages 1 to 4, states after 4 and 8 tokens.

  The states are pages 18 and 19.
  """
  state = _fill(jaxkv.init(_CONFIG, jaxkv.salt("pools")), 4, 4, 1)
  assert jaxkv.cached_pages(state) == [1, 2, 3, 4, 18, 19]
  return state


def _match(state, length: int = 9) -> tuple[int, list[int]]:
  """Returns the hit tokens of the text, and the pages of the hit."""
  hit = jaxkv.match(state, _TEXT[None], [length])
  pages = np.asarray(hit.pages[0])
  return int(hit.num_cached_tokens[0]), pages[pages != _CONFIG.no_page].tolist()


def _admit(state, length: int = 9):
  """Admits the text in slot 1."""
  return jaxkv.admit(state, [1], _TEXT[None], [length])


def _moves(out) -> list[tuple[int, int, int]]:
  """Returns the moves as page, offload page saved to and restored from."""
  count = int(out.moves.count)
  columns = out.moves.page, out.moves.saved_to, out.moves.restored_from
  return [*zip(*(column[:count].tolist() for column in columns), strict=True)]


class TestHits:
  @pytest.mark.parametrize(
    ("evicted", "expected"),
    [
      ([], (8, [1, 2, 3, 4, 19])),
      # The state after eight tokens, or the last two tokens of K/V.
      ([19], (4, [1, 2, 18])),
      ([4], (4, [1, 2, 18])),
      # No other state is as deep as the third page of K/V.
      ([19, 4], (4, [1, 2, 18])),
      ([18, 4], (0, [])),
      ([18, 19], (0, [])),
      ([1], (0, [])),
    ],
  )
  def test_hit_is_the_shallowest_of_all_pools(self, evicted, expected):
    padding = [_CONFIG.no_page] * (2 - len(evicted))
    state, _ = jaxkv.evict(_cached(), jnp.asarray([*evicted, *padding]))
    assert _match(state) == expected

  def test_tokens_without_a_state_are_counted(self):
    """Of eight tokens with K/V, four have a state, or none."""
    for evicted, cached in (([19, 24], 4), ([18, 19], 0)):
      state, _ = jaxkv.evict(_cached(), evicted)
      before = jaxkv.stats(state)
      state, out = _admit(state)
      assert out.num_cached_tokens.tolist() == [cached]
      counts = jaxkv.stats(state) - before
      assert int(counts.hit_tokens) == cached
      assert int(counts.unusable_tokens) == 8 - cached

  def test_states_inside_a_page_and_skipped_ends_are_not_cached(self):
    """Nine tokens at once: only K/V pages are cached and saved.

    The state after nine tokens is inside a page, and no step wrote those after
    two, four, six and eight.
    """
    state = _fill(jaxkv.init(_CONFIG), 9)
    assert jaxkv.cached_pages(state) == [1, 2, 3, 4]
    assert _match(state) == (0, [])
    state, out = jaxkv.allocate(state, [16, 16, 0, 0, 0, 0])
    assert sorted(page for page, *_ in _moves(out)) == [1, 2, 3, 4]


def _without_kv(state):
  """Moves all cached K/V to offload memory, and no state."""
  state, out = jaxkv.allocate(state, [16, 16, 0, 0, 0, 0])
  return jaxkv.free(state, slots=[0, 1])[0], _moves(out)


def _without_states(state):
  """Moves all cached states to offload memory, and no K/V."""
  state, out = jaxkv.allocate(state, [1] * 6)
  return jaxkv.free(state, slots=list(range(6)))[0], _moves(out)


class TestRestore:
  def test_kv_returns_beside_a_state_on_the_device(self):
    state, saved = _without_kv(_cached())
    assert sorted(page for page, *_ in saved) == [1, 2, 3, 4]
    state, out = _admit(state)
    assert out.num_cached_tokens.tolist() == [8]
    table = state.page_table[1].tolist()
    assert table[1][:4] == [0, 0, 0, 19]
    saved_to = {page: offloaded for page, offloaded, _ in saved}
    restored = {page: source for page, _, source in _moves(out) if source >= 0}
    assert [restored[page] for page in table[0][:4]] == [
      saved_to[page] for page in (1, 2, 3, 4)
    ]
    jaxkv.check(state)

  def test_state_returns_beside_kv_on_the_device(self):
    state, saved = _without_states(_cached())
    assert sorted(page for page, *_ in saved) == [18, 19]
    state, out = _admit(state)
    assert out.num_cached_tokens.tolist() == [8]
    table = state.page_table[1].tolist()
    assert table[0][:4] == [1, 2, 3, 4]
    saved_to = {page: offloaded for page, offloaded, _ in saved}
    restored = [(page, source) for page, _, source in _moves(out)]
    assert restored == [(table[1][3], saved_to[19])]
    jaxkv.check(state)

  def test_kv_without_a_state_stays_in_offload_memory(self):
    state, _ = jaxkv.evict(_cached(), [18, 19])
    state, _ = _without_kv(state)
    assert len(jaxkv.cached_pages(state)) == 4
    state, out = _admit(state)
    assert out.ok.all() and out.num_cached_tokens.tolist() == [0]
    assert _moves(out) == []
    assert int(jaxkv.stats(state).restored_pages) == 0
    jaxkv.check(state)
