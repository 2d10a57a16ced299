"""Groups that leave pages behind: page ids worked out by hand.

Pages are handed out in the order 1, 2, 3 ..., a sequence's first group first.
"""

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv import ChunkedLocal
from jaxkv import FullAttention
from jaxkv import SlidingWindow

PAGES = 32
NONE = PAGES
"""NO_PAGE."""


def ints(*values) -> jax.Array:
  return jnp.asarray(values, jnp.int32)


def text(start: int = 0) -> jax.Array:
  """int32[1, 16]: the same tokens each time, from one of them on."""
  return jnp.arange(100 + start, 116 + start, dtype=jnp.int32)[None]


def empty(*groups, **options) -> jaxkv.CacheState:
  """One slot of eight pages of two tokens."""
  sizes = {"num_pages": PAGES, "page_size": 2, "num_slots": 1}
  sizes |= {"pages_per_slot": 8, "groups": groups}
  return jaxkv.init(jaxkv.CacheConfig(**(sizes | options)))


def held(length: int, *groups, **options) -> jaxkv.CacheState:
  """A cache that holds a text."""
  state, slot = empty(*groups, **options), ints(0)
  state, room = jaxkv.allocate(state, ints(length), slot)
  state, done = jaxkv.commit(state, text(), ints(length), slot)
  assert bool(room.ok[0] & done.ok[0])
  return state


def freed(length: int, *groups, **options) -> jaxkv.CacheState:
  """A cache that held a text."""
  return jaxkv.free(held(length, *groups, **options), ints(0))[0]


def without(state: jaxkv.CacheState, *pages) -> jaxkv.CacheState:
  """The cache with some pages out of the index."""
  padding = [NONE] * (8 - len(pages))
  state, out = jaxkv.evict(state, ints(*pages, *padding))
  assert int(jnp.sum(out.ok)) == len(pages)
  return state


def match(state: jaxkv.CacheState, length: int) -> tuple[int, list]:
  """Tokens found of a text, and for each group the pages up to there."""
  found = jaxkv.match(state, text(), ints(length))
  tokens, pages = int(found.num_cached[0]), found.pages[:, 0].tolist()
  return tokens, [
    row[: tokens // size]
    for row, size in zip(pages, state.config.page_sizes, strict=True)
  ]


def table(state: jaxkv.CacheState, slot: int = 0) -> list[list[int]]:
  """A slot's page table, without what was never attached."""
  rows = state.page_table[:, slot].tolist()
  return [[page for page in row if page != NONE] for row in rows]


class TestRecycle:
  @pytest.mark.parametrize(
    ("tokens", "behind"),
    # A window of 4 looks back at 3 tokens; two tokens make a page.
    [(0, 0), (3, 0), (4, 0), (5, 1), (6, 1), (7, 2), (11, 4), (12, 4)],
  )
  def test_a_window_moves_on(self, tokens, behind):
    state = held(12, SlidingWindow(4))
    state, out = jaxkv.recycle(state, ints(tokens))
    assert out.num_pages.tolist() == [behind]
    assert table(state) == [[0] * behind + list(range(behind + 1, 7))]
    # The last one left behind is used first.
    back = list(range(7, PAGES)) + list(range(behind, 0, -1))
    assert jaxkv.free_pages(state) == back

  @pytest.mark.parametrize(
    ("tokens", "behind"), [(5, 0), (6, 3), (11, 3), (12, 6)]
  )
  def test_a_chunk_ends(self, tokens, behind):
    state = held(12, ChunkedLocal(6))
    state, _ = jaxkv.recycle(state, ints(tokens))
    assert table(state) == [[0] * behind + list(range(behind + 1, 7))]

  def test_it_goes_on_where_it_was(self):
    state = held(12, SlidingWindow(4))
    state, _ = jaxkv.recycle(state, ints(7))
    state, out = jaxkv.recycle(state, ints(5))
    assert out.num_pages.tolist() == [0]
    state, out = jaxkv.recycle(state)
    assert out.num_pages.tolist() == [2]
    assert table(state) == [[0, 0, 0, 0, 5, 6]]
    assert jaxkv.free_pages(state)[-4:] == [2, 1, 4, 3]

  def test_full_attention_keeps_everything(self):
    state = held(12, FullAttention(), SlidingWindow(4))
    state, out = jaxkv.recycle(state)
    assert out.num_pages.tolist() == [4]
    assert table(state) == [[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 11, 12]]

  def test_a_long_sequence_in_few_pages(self):
    """100,000 tokens, a prompt in chunks and the rest one by one."""
    window, size, tokens = 1024, 16, 100_000
    most = -(-(window - 1) // size) + 2
    config = jaxkv.CacheConfig(
      num_pages=most + 1,
      page_size=size,
      num_slots=1,
      pages_per_slot=tokens // size,
      groups=(SlidingWindow(window),),
    )

    def step(carry, new):
      state, most_held = carry
      state, _ = jaxkv.recycle(state)
      state, room = jaxkv.allocate(state, jnp.full((1,), new.size, jnp.int32))
      state, done = jaxkv.commit(state, new[None], ints(new.size))
      held = state.num_pages[0, 0] - state.first_page[0, 0]
      most_held = jnp.maximum(most_held, held)
      return (state, most_held), room.ok[0] & done.ok[0]

    @jax.jit
    def run(stream):
      prompt, rest = stream[:2000].reshape(-1, size), stream[2000:]
      carry, fine = jax.lax.scan(step, (jaxkv.init(config), 0), prompt)
      carry, ok = jax.lax.scan(step, carry, rest[:, None])
      return carry, jnp.all(fine) & jnp.all(ok)

    stream = jnp.arange(tokens, dtype=jnp.int32) % 97
    (state, most_held), ok = run(stream)
    assert bool(ok)
    assert int(most_held) <= most
    assert state.length.tolist() == [tokens]
    jaxkv.check(state)


class TestWindowHits:
  def test_after_the_window_moved_on(self):
    state, _ = jaxkv.recycle(held(10, SlidingWindow(4)))
    assert table(state) == [[0, 0, 0, 4, 5]]
    assert match(state, 11) == (10, [[NONE, NONE, NONE, 4, 5]])
    # Pages left behind are cached until they are taken.
    assert match(state, 7) == (6, [[NONE, 2, 3]])

  def test_a_hit_has_null_pages(self):
    state = freed(10, SlidingWindow(4))
    state, out = jaxkv.admit(state, ints(0), text(), ints(11))
    assert out.num_cached.tolist() == [10]
    # Pages 1 to 3 stay in the queue; the first one in it is taken.
    assert table(state) == [[0, 0, 0, 4, 5, 6]]
    assert jaxkv.free_pages(state) == [*range(7, PAGES), 3, 2, 1]

  @pytest.mark.parametrize(
    ("gone", "tokens"),
    [
      # A window of 4 needs two pages, fewer only at the start.
      ((), 10),
      ((1, 2, 3), 10),
      ((5,), 8),
      ((4,), 6),
      ((3, 5), 4),
      ((2, 4), 2),
      ((2, 3, 5), 2),
      ((1, 3, 5), 0),
      ((1, 2, 4), 0),
    ],
  )
  def test_two_pages_in_a_row(self, gone, tokens):
    state = without(freed(10, SlidingWindow(4)), *gone)
    assert match(state, 11)[0] == tokens

  def test_an_evicted_part_is_filled_again(self):
    """Two tokens of the text are computed twice; the middle comes back."""
    state = without(freed(10, SlidingWindow(4)), 2)
    state, out = jaxkv.admit(state, ints(0), text(), ints(7))
    assert out.num_cached.tolist() == [2]
    assert table(state) == [[1, 6, 7, 8]]
    state, done = jaxkv.commit(state, text(2), ints(5))
    assert done.num_published.tolist() == [2]
    # The older of two equal pages is the hit.
    assert match(state, 7) == (6, [[NONE, 6, 3]])
    assert match(state, 11) == (10, [[NONE, NONE, NONE, 4, 5]])

  def test_rolled_back_to_where_pages_are_gone(self):
    state, _ = jaxkv.recycle(held(10, SlidingWindow(4)))
    refused, out = jaxkv.truncate(state, ints(7))
    assert out.code.tolist() == [jaxkv.Code.RECYCLED]
    assert table(refused) == [[0, 0, 0, 4, 5]]
    state, out = jaxkv.truncate(state, ints(9))
    assert out.code.tolist() == [jaxkv.Code.OK]
    assert table(state) == [[0, 0, 0, 4, 5]]
    assert jaxkv.cached_pages(state) == [1, 2, 3, 4]


class TestHybrid:
  @pytest.mark.parametrize(
    ("gone", "tokens", "pages"),
    # Eight tokens: full attention has pages 1 to 4, the windows of 4 tokens
    # have 5 to 8 and 9 to 12.
    [
      ((), 8, [[1, 2, 3, 4], [NONE, NONE, 7, 8], [NONE, NONE, 11, 12]]),
      # What no window looks at is not missed.
      (
        (5, 6, 9, 10),
        8,
        [[1, 2, 3, 4], [NONE, NONE, 7, 8], [NONE, NONE, 11, 12]],
      ),
      ((1,), 0, [[], [], []]),
      ((4, 8, 12), 6, [[1, 2, 3], [NONE, 6, 7], [NONE, 10, 11]]),
      ((4,), 6, [[1, 2, 3], [NONE, 6, 7], [NONE, 10, 11]]),
      ((8,), 6, [[1, 2, 3], [NONE, 6, 7], [NONE, 10, 11]]),
      ((7,), 4, [[1, 2], [5, 6], [9, 10]]),
      # Each group alone would have six tokens, or four.
      ((8, 11), 4, [[1, 2], [5, 6], [9, 10]]),
      ((7, 9), 0, [[], [], []]),
      ((7, 10), 2, [[1], [5], [9]]),
    ],
  )
  def test_all_groups_must_go_on(self, gone, tokens, pages):
    kinds = (FullAttention(), SlidingWindow(4), SlidingWindow(4))
    state = without(freed(8, *kinds), *gone)
    assert match(state, 9) == (tokens, pages)

  def test_unhashed_pages_are_used_first(self):
    """The example of SEMANTICS 4.7."""
    state = freed(13, FullAttention(), SlidingWindow(20))
    wanted = [14, 7, *range(15, PAGES), 6, 5, 4, 3, 2, 1, 13, 12, 11, 10, 9, 8]
    assert jaxkv.free_pages(state) == wanted

  def test_hits_end_where_all_groups_end_a_page(self):
    """Pages of 4 and of 2 tokens, ten tokens: pages 1-3 and 4-8."""
    state = held(10, FullAttention(page_size=4), SlidingWindow(3))
    # Before the last token of four the window needs one page.
    assert jaxkv.cached_pages(state) == [1, 2, 5, 7]
    assert match(state, 10) == (8, [[1, 2], [NONE, NONE, NONE, 7]])
    assert match(state, 8) == (4, [[1], [NONE, 5]])
    assert match(state, 4) == (0, [[], []])
    state, _ = jaxkv.free(state, ints(0))
    wanted = [8, 6, 4, 3, *range(9, PAGES), 2, 1, 7, 5]
    assert jaxkv.free_pages(state) == wanted

  def test_what_waits_is_published_by_the_next_commit(self):
    """Of six tokens the last two fill a page, but not one of each group."""
    kinds = (FullAttention(page_size=4), FullAttention())
    state = held(6, *kinds)
    assert table(state) == [[1, 2], [3, 4, 5]]
    assert jaxkv.cached_pages(state) == [1, 3, 4]
    state, _ = jaxkv.allocate(state, ints(2))
    state, done = jaxkv.commit(state, text(6), ints(2))
    assert table(state) == [[1, 2], [3, 4, 5, 6]]
    assert done.num_published.tolist() == [3]

  def test_forks_that_share_a_page_without_a_key(self):
    kinds = (FullAttention(), FullAttention(page_size=4))
    state = held(3, *kinds, num_slots=2)
    assert jaxkv.cached_pages(state) == []
    state, _ = jaxkv.fork(state, ints(0), ints(1))
    assert table(state, 1) == [[1, 4], [5]]
    state, _ = jaxkv.allocate(state, ints(1, 1))
    state, done = jaxkv.commit(state, ints([7], [8]), ints(1, 1))
    # Page 1 is published once, by the first.
    assert done.num_published.tolist() == [3, 2]
    assert jaxkv.cached_pages(state) == [1, 2, 3, 4, 5]
    jaxkv.check(state)


class TestChunks:
  @pytest.mark.parametrize(
    ("gone", "tokens", "pages"),
    # Ten tokens: full attention has pages 1 to 5, chunks of 4 have 6 to 10.
    [
      ((), 10, [NONE, NONE, NONE, NONE, 10]),
      # At eight tokens a chunk has just ended: no page is needed.
      ((10,), 8, [NONE] * 4),
      ((6, 7, 8, 9, 10), 8, [NONE] * 4),
      ((5, 6, 7, 9), 8, [NONE] * 4),
      ((4, 8), 4, [NONE] * 2),
      ((4, 9), 6, [NONE, NONE, 8]),
    ],
  )
  def test_earlier_chunks_are_not_missed(self, gone, tokens, pages):
    state = without(freed(10, FullAttention(), ChunkedLocal(4)), *gone)
    found, (full, chunk) = match(state, 11)
    assert (found, chunk) == (tokens, pages)
    assert full == list(range(1, tokens // 2 + 1))

  def test_a_hit_without_pages_of_one_group(self):
    state = without(freed(10, FullAttention(), ChunkedLocal(4)), 10)
    state, out = jaxkv.admit(state, ints(0), text(), ints(11))
    assert out.num_cached.tolist() == [8]
    # Page 10 has no key any more, but stays where it is in the queue.
    assert table(state) == [[1, 2, 3, 4, 11, 12], [0, 0, 0, 0, 13, 14]]
    jaxkv.check(state)

  def test_a_hit_on_nothing_is_none(self):
    state = freed(10, ChunkedLocal(4))
    assert match(state, 9) == (0, [[]])
    assert match(state, 11) == (10, [[NONE] * 4 + [5]])


class TestDraftModel:
  def test_the_last_page_is_computed_again(self):
    state = freed(8, FullAttention(), draft_model=True)
    assert match(state, 9) == (6, [[1, 2, 3]])
    assert match(state, 8) == (4, [[1, 2]])
    assert match(state, 3) == (0, [[]])

  def test_a_window_needs_the_page_behind(self):
    state = freed(8, SlidingWindow(4), draft_model=True)
    assert match(state, 9) == (6, [[NONE, 2, 3]])
    assert match(without(state, 4), 9) == (4, [[1, 2]])
    assert match(without(state, 1), 9) == (6, [[NONE, 2, 3]])

  def test_the_page_behind_is_published(self):
    """Pages of 2 tokens beside one of 8: 1-2 and 3-7 for ten tokens."""
    kinds = (FullAttention(page_size=8), SlidingWindow(2))
    state = held(10, *kinds, draft_model=True)
    assert table(state) == [[1, 2], [3, 4, 5, 6, 7]]
    # Of the window the last page before eight tokens and the one behind.
    assert jaxkv.cached_pages(state) == [1, 6, 7]

  def test_one_page_for_all_groups_together(self):
    """A page is left out once, not once by each kind."""
    kinds = (FullAttention(), SlidingWindow(4), SlidingWindow(6))
    state = freed(12, *kinds, draft_model=True)
    tokens, pages = match(state, 13)
    assert tokens == 10
    assert pages[0] == [1, 2, 3, 4, 5]
    assert pages[1] == [NONE, NONE, NONE, 10, 11]
    assert pages[2] == [NONE, NONE, 15, 16, 17]
