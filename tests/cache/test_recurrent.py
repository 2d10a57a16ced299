"""Groups that hold states: where the snapshots stand."""

import jax.numpy as jnp
import pytest

import jaxkv

ALONE = jaxkv.CacheConfig(
  num_pages=20,
  page_size=2,
  num_slots=2,
  pages_per_slot=8,
  groups=(jaxkv.Recurrent(),),
)
NO_PAGE = ALONE.no_page


def ints(*values):
  return jnp.asarray(values, jnp.int32)


def grow(state, count, first_token=0):
  """Slot 0 recycles, then allocates and commits `count` tokens."""
  state, _ = jaxkv.recycle(state)
  state, out = jaxkv.allocate(state, ints(count, 0))
  assert out.ok.all()
  tokens = jnp.arange(first_token, first_token + count, dtype=jnp.int32)
  state, out = jaxkv.commit(state, tokens[None], ints(count), slots=ints(0))
  assert out.ok.all()
  jaxkv.check(state)
  return state


def columns(state, slot=0):
  """Pages of a slot, without what is behind them."""
  row = state.page_table[slot, 0].tolist()
  return row[: int(state.num_pages[slot, 0])]


class TestColumns:
  def test_only_the_running_state_has_a_page(self):
    state = grow(jaxkv.init(ALONE), 5)
    # Tokens 0-4 end in column 2.
    assert columns(state) == [0, 0, 1]
    assert state.pool.queue.num_free[0] == 18
    # Two pages more: the state of column 2 was recycled.
    state = grow(state, 4, 5)
    assert columns(state) == [0, 0, 1, 0, 2]


class TestHits:
  def test_hits_end_at_a_cached_state(self):
    state = grow(grow(jaxkv.init(ALONE), 4), 4, 4)
    pages = columns(state)
    assert pages[1] > 0 and pages[3] > 0
    tokens = jnp.arange(9, dtype=jnp.int32)[None]
    hit = jaxkv.match(state, tokens, ints(9))
    assert hit.num_cached_tokens.tolist() == [8]
    # Only the state where the prefix ends is needed.
    assert hit.pages[0, 0].tolist() == [NO_PAGE] * 3 + [pages[3]]
    hit = jaxkv.match(state, tokens, ints(8))
    assert hit.num_cached_tokens.tolist() == [4]


class TestFork:
  def test_a_state_inside_a_page_is_copied(self):
    state, out = jaxkv.fork(grow(jaxkv.init(ALONE), 5), ints(0), ints(1))
    assert columns(state) == [0, 0, 1]
    assert columns(state, 1) == [0, 0, 2]
    assert (out.copies.src.tolist(), out.copies.dst.tolist()) == ([1], [2])
    jaxkv.check(state)

  def test_a_state_at_the_end_of_a_page_is_shared(self):
    state, out = jaxkv.fork(grow(jaxkv.init(ALONE), 6), ints(0), ints(1))
    assert columns(state, 1) == [0, 0, 1]
    assert out.copies.src.tolist() == [NO_PAGE]
    assert int(state.pool.ref_count[1]) == 2

  def test_pages_ahead_are_not_shared(self):
    state, _ = jaxkv.allocate(grow(jaxkv.init(ALONE), 5), ints(4, 0))
    assert columns(state) == [0, 0, 1, 0, 2]
    state, _ = jaxkv.fork(state, ints(0), ints(1))
    assert columns(state, 1) == [0, 0, 3]

  def test_forks_without_a_state_are_refused(self):
    """Room for five tokens has one page, where the fifth ends."""
    state, _ = jaxkv.allocate(jaxkv.init(ALONE), ints(5, 0))
    token = jnp.zeros((1, 1), jnp.int32)
    state, _ = jaxkv.commit(state, token, ints(1), slots=ints(0))
    new_state, out = jaxkv.fork(state, ints(0), ints(1))
    assert out.code.tolist() == [jaxkv.Status.RECYCLED]
    assert columns(new_state, 1) == []


class TestTruncate:
  def cut(self, state, length):
    state, out = jaxkv.truncate(state, [length, 0], mask=[True, False])
    assert all(jaxkv.check_invariants(state).values())
    return state, jaxkv.Status(int(out.code[0]))

  def two_states(self):
    """States after 4 and after 8 tokens, nothing recycled."""
    state, _ = jaxkv.allocate(grow(jaxkv.init(ALONE), 4), ints(4, 0))
    tokens = jnp.arange(4, 8, dtype=jnp.int32)[None]
    state, _ = jaxkv.commit(state, tokens, ints(4), slots=ints(0))
    assert columns(state) == [0, 1, 0, 2]
    return state

  @pytest.mark.slow
  def test_truncated_to_a_kept_state(self):
    state, code = self.cut(self.two_states(), 4)
    assert (code, columns(state)) == (jaxkv.Status.OK, [0, 1])
    # And on again, with the same keys.
    state = grow(state, 4, 4)
    tokens = jnp.arange(9, dtype=jnp.int32)[None]
    assert jaxkv.match(state, tokens, ints(9)).num_cached_tokens.tolist() == [8]

  @pytest.mark.parametrize("length", [1, 2, 3, 5, 6, 7])
  def test_lengths_without_a_state_are_refused(self, length):
    old_state = self.two_states()
    state, code = self.cut(old_state, length)
    assert code == jaxkv.Status.RECYCLED
    assert columns(state) == columns(old_state)

  def test_pages_ahead_are_given_back(self):
    state, _ = jaxkv.allocate(grow(jaxkv.init(ALONE), 5), ints(4, 0))
    state, code = self.cut(state, 5)
    assert (code, columns(state)) == (jaxkv.Status.OK, [0, 0, 1])
