"""recycle: what windows and chunks left behind is given back."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv import ChunkedLocal
from jaxkv import FullAttention
from jaxkv import SlidingWindow
from jaxkv import Status
from tests.cache.by_hand import PAGES
from tests.cache.by_hand import ints
from tests.cache.by_hand import pages
from tests.cache.by_hand import rows
from tests.cache.by_hand import table
from tests.cache.by_hand import tiny
from tests.cache.by_hand import with_text
from tests.cache.by_hand import write


def test_a_page_behind_the_window_becomes_the_null_page():
  """A window of 3 tokens: the next query, token 5, looks at tokens 3 and 4.

  Slot 0 holds 0 1 | 2 3 | 4 in pages 1, 2, 3: page 1 is not needed any more.
  Its column stays, so that token 3 is still in column 3 // 2.
  """
  state = write(tiny(SlidingWindow(3)), 0, 0, 1, 2, 3, 4)
  state, out = jaxkv.recycle(state)
  assert out.num_recycled_pages.tolist() == [1, 0, 0]
  assert pages(state, 0) == [0, 2, 3]
  # It is still cached, so it goes to the back.
  assert jaxkv.free_pages(state) == [4, 5, 6, 7, 1]


@pytest.mark.slow
def test_only_final_tokens_are_left_behind():
  """A window of 3 in the second group: 4 tokens have room, 3 are final.

  A fork is owed a copy of the page that token 3 will be written to. If pages
  were given back beyond token 3, it would be a copy of the null page, and a
  page without the K/V of token 3 would be found under its key.
  """
  state = tiny(FullAttention(), SlidingWindow(3), num_pages=12)
  state, _ = jaxkv.allocate(state, ints(4, 0, 0))
  prompt = rows({0: (1, 2, 3)})
  state, _ = jaxkv.commit(state, prompt, ints(3, 0, 0))
  old_table = state.page_table
  state, out = jaxkv.recycle(state, lengths=ints(12, 0, 0))
  assert out.code.tolist() == [Status.BAD_LENGTH, Status.OK, Status.OK]
  assert (state.page_table == old_table).all()
  state, forked = jaxkv.fork(state, ints(0), ints(1))
  assert (forked.copies.src > 0).all()


class TestRecycle:
  @pytest.mark.slow
  @pytest.mark.parametrize(
    ("tokens", "count"),
    # A window of 4 looks back at 3 tokens; two tokens make a page.
    [(0, 0), (3, 0), (4, 0), (5, 1), (6, 1), (7, 2), (11, 4), (12, 4)],
  )
  def test_a_window_moves_on(self, tokens, count):
    state = with_text(12, SlidingWindow(4))
    state, out = jaxkv.recycle(state, lengths=ints(tokens))
    assert out.num_recycled_pages.tolist() == [count]
    assert table(state) == [[0] * count + list(range(count + 1, 7))]
    # The last one left behind is used first.
    back = list(range(7, PAGES)) + list(range(count, 0, -1))
    assert jaxkv.free_pages(state) == back

  @pytest.mark.slow
  @pytest.mark.parametrize(
    ("tokens", "count"), [(5, 0), (6, 3), (11, 3), (12, 6)]
  )
  def test_a_chunk_ends(self, tokens, count):
    state = with_text(12, ChunkedLocal(6))
    state, _ = jaxkv.recycle(state, lengths=ints(tokens))
    assert table(state) == [[0] * count + list(range(count + 1, 7))]

  @pytest.mark.slow
  def test_recycling_continues_where_it_ended(self):
    state = with_text(12, SlidingWindow(4))
    state, _ = jaxkv.recycle(state, lengths=ints(7))
    state, out = jaxkv.recycle(state, lengths=ints(5))
    assert out.num_recycled_pages.tolist() == [0]
    state, out = jaxkv.recycle(state)
    assert out.num_recycled_pages.tolist() == [2]
    assert table(state) == [[0, 0, 0, 0, 5, 6]]
    assert jaxkv.free_pages(state)[-4:] == [2, 1, 4, 3]

  @pytest.mark.slow
  def test_full_attention_keeps_everything(self):
    state = with_text(12, FullAttention(), SlidingWindow(4))
    state, out = jaxkv.recycle(state)
    assert out.num_recycled_pages.tolist() == [4]
    assert table(state) == [[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 11, 12]]

  @pytest.mark.deep
  def test_a_kind_may_keep_the_last_full_page(self):
    """It goes back when the next one is full."""

    @dataclasses.dataclass(frozen=True)
    class Keeping(ChunkedLocal):
      keeps_last_page: ClassVar[bool] = True

    config = jaxkv.CacheConfig(
      num_pages=8,
      page_size=2,
      num_slots=1,
      pages_per_slot=6,
      groups=(Keeping(4), ChunkedLocal(4)),
    )
    state = jaxkv.init(config, jaxkv.salt("kept"))
    rows = []
    for tokens in (4, 1, 1, 1):
      state, _ = jaxkv.allocate(state, [tokens])
      state, _ = jaxkv.commit(state, [[7] * tokens], [tokens])
      state, _ = jaxkv.recycle(state)
      jaxkv.check(state)
      rows.append(state.num_skipped_pages[0].tolist())
    assert rows == [[1, 2], [1, 2], [2, 2], [2, 2]]

  @pytest.mark.deep
  def test_a_long_sequence_in_few_pages(self):
    """100,000 tokens, a prompt in chunks and the rest one by one."""
    window = 1024
    page_size = 16
    tokens = 100_000
    max_pages = -(-(window - 1) // page_size) + 2
    config = jaxkv.CacheConfig(
      num_pages=max_pages + 1,
      page_size=page_size,
      num_slots=1,
      pages_per_slot=tokens // page_size,
      groups=(SlidingWindow(window),),
    )

    def step(carry, new):
      state, most_held = carry
      state, _ = jaxkv.recycle(state)
      state, room = jaxkv.allocate(state, jnp.full((1,), new.size, jnp.int32))
      state, done = jaxkv.commit(state, new[None], ints(new.size))
      num_held_pages = state.num_pages[0, 0] - state.num_skipped_pages[0, 0]
      most_held = jnp.maximum(most_held, num_held_pages)
      return (state, most_held), room.ok[0] & done.ok[0]

    @jax.jit
    def run(stream):
      carry = (jaxkv.init(config, jaxkv.salt("")), 0)
      prompt = stream[:2000].reshape(-1, page_size)
      carry, prompt_ok = jax.lax.scan(step, carry, prompt)
      carry, ok = jax.lax.scan(step, carry, stream[2000:, None])
      return carry, jnp.all(prompt_ok) & jnp.all(ok)

    stream = jnp.arange(tokens, dtype=jnp.int32) % 97
    (state, most_held), ok = run(stream)
    assert bool(ok)
    assert int(most_held) <= max_pages
    assert state.length.tolist() == [tokens]
    jaxkv.check(state)
