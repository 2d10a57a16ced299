"""Kinds of groups: what a window, a chunk or somebody's own kind keeps."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv import ChunkedLocal
from jaxkv import FullAttention
from jaxkv import SlidingWindow
from tests.cache.by_hand import config
from tests.cache.by_hand import ints


@pytest.mark.parametrize(
  ("group", "skipped"),
  # Tokens behind 0, 1, 2 ... 8 tokens that the next one does not look at.
  [
    (FullAttention(), [0, 0, 0, 0, 0, 0, 0, 0, 0]),
    # A window of 4: the next token and three before it.
    (SlidingWindow(4), [0, 0, 0, 0, 1, 2, 3, 4, 5]),
    # Chunks of 4: a chunk that is over is looked at by nobody.
    (ChunkedLocal(4), [0, 0, 0, 0, 4, 4, 4, 4, 8]),
    # Only the state of the last token is needed.
    (jaxkv.Recurrent(), [0, 0, 1, 2, 3, 4, 5, 6, 7]),
  ],
)
def test_skipped_tokens_by_length(group, skipped):
  assert group.num_skipped_tokens(ints(*range(9))).tolist() == skipped


@dataclasses.dataclass(frozen=True)
class LastPages(jaxkv.GroupKind):
  """Somebody's own kind: the page of four tokens at hand, and some before.

  Attributes:
    keep: pages before it that are kept.
  """

  keep: int

  def num_skipped_tokens(self, num_tokens: jax.Array) -> jax.Array:
    """Whole pages of four tokens."""
    return jnp.maximum(num_tokens // 4 - self.keep, 0) * 4


def _filled(*groups, **changes):
  """A cache with 14 tokens in slot 0, and the tokens."""
  state = jaxkv.init(config(groups=groups, **changes))
  tokens = jnp.arange(16, dtype=jnp.int32)[None]
  state, _ = jaxkv.allocate(state, ints(14, 0))
  state, _ = jaxkv.commit(state, jnp.tile(tokens, (2, 1)), ints(14, 0))
  return state, tokens


def _table(state, group=0):
  return state.page_table[0, group].tolist()


class TestKinds:
  @pytest.mark.slow
  def test_a_window_of_one_token(self):
    """It looks at nothing that was: every full page is left behind."""
    state, tokens = _filled(SlidingWindow(1))
    state, out = jaxkv.recycle(state)
    assert out.num_recycled_pages.tolist() == [3, 0]
    assert _table(state) == [0, 0, 0, 4]
    # A hit on nothing is none.
    hit = jaxkv.match(state, tokens, ints(14))
    assert hit.num_cached_tokens.tolist() == [0]
    state, room = jaxkv.allocate(state, ints(2, 0))
    state, done = jaxkv.commit(state, tokens[:, 14:].repeat(2, 0), ints(2, 0))
    assert room.ok.all() and done.ok.all()
    state, out = jaxkv.recycle(state)
    assert _table(state) == [0, 0, 0, 0]
    # No page is left, but the slot is not empty: it can be freed, once.
    assert state.num_pages.tolist() == [[4], [0]]
    state, out = jaxkv.free(state, slots=ints(0, 0))
    assert out.code.tolist() == [jaxkv.Status.OK, jaxkv.Status.SLOT_EMPTY]
    assert int(state.pool.queue.num_free[0]) == 15
    jaxkv.check(jaxkv.clear_error(state)[0])

  @pytest.mark.slow
  @pytest.mark.parametrize("kind", [SlidingWindow, ChunkedLocal])
  def test_a_kind_larger_than_the_slot(self, kind):
    state, tokens = _filled(kind(2**31 - 1))
    state, out = jaxkv.recycle(state)
    assert out.num_recycled_pages.tolist() == [0, 0]
    hit = jaxkv.match(state, tokens, ints(14))
    assert hit.pages.tolist() == [[[1, 2, 3, 16]]]

  @pytest.mark.slow
  def test_subclasses_are_group_kinds(self):
    state, tokens = _filled(LastPages(2), FullAttention(page_size=8))
    state, out = jaxkv.recycle(state)
    assert out.num_recycled_pages.tolist() == [1, 0]
    assert _table(state) == [0, 2, 3, 4]
    # Four tokens wait for the page of eight; page 3 has no key yet.
    assert jaxkv.cached_pages(state) == [1, 2, 5]
    hit = jaxkv.match(state, tokens, ints(14))
    assert hit.num_cached_tokens.tolist() == [8]
    assert hit.pages.tolist() == [[[1, 2, 16, 16], [5, 16, 16, 16]]]
    state, out = jaxkv.truncate(state, [7, 0], mask=[True, False])
    assert out.code.tolist() == [jaxkv.Status.RECYCLED, jaxkv.Status.SKIPPED]
    jaxkv.check(jaxkv.clear_error(state)[0])


def test_group_kinds_check_their_sizes():
  with pytest.raises(ValueError, match=r"SlidingWindow.window` must be at le"):
    SlidingWindow(0)
  with pytest.raises(ValueError, match=r"ChunkedLocal.chunk` must be at least"):
    ChunkedLocal(-1)
  with pytest.raises(ValueError, match=r"FullAttention.page_size` must be at"):
    FullAttention(page_size=0)
  with pytest.raises(TypeError, match=r"window` must be an int, got True of"):
    SlidingWindow(True)
  with pytest.raises(TypeError, match=r"chunk` must be an int, got None of"):
    ChunkedLocal(None)
  with pytest.raises(TypeError, match=r"page_size` must be an int, got 2.0"):
    SlidingWindow(4, page_size=2.0)
  with pytest.raises(ValueError, match=r"LastPages.keep` must be at least 1"):
    LastPages(0)
