"""recycle: what windows and chunks left behind is given back."""

import dataclasses
from typing import ClassVar

import pytest

import jaxkv
from jaxkv import ChunkedLocal
from jaxkv import FullAttention
from jaxkv import SlidingWindow
from jaxkv import Status
from tests.cache.by_hand import ints
from tests.cache.by_hand import pages
from tests.cache.by_hand import rows
from tests.cache.by_hand import tiny
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


@pytest.mark.deep
def test_a_kind_may_keep_the_last_full_page():
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
