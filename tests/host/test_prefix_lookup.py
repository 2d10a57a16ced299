"""The lookup's short way to the length of a hit, beside the general rule."""

import random

import numpy as np
import pytest

from jaxkv import ChunkedLocal
from jaxkv import FullAttention
from jaxkv import Recurrent
from jaxkv import SlidingWindow
from jaxkv._src.cache.steps import longest_hit
from jaxkv._src.host import prefix_lookup
from jaxkv.host import CacheManager

FULL = FullAttention(page_size=4)
WINDOW = SlidingWindow(9, page_size=4)


class EvenPages(SlidingWindow):
  """A user's kind: its hits have an even number of pages."""

  def longest_hit(self, hits, limit, drop, page_size, align):
    return super().longest_hit(hits, limit, drop, page_size, 2 * align)


@pytest.mark.parametrize("policy", ["current", "classic"])
@pytest.mark.parametrize("use_eagle", [False, True])
@pytest.mark.parametrize(
  "groups",
  [
    [FULL],
    [FULL, WINDOW, WINDOW],
    [WINDOW, FullAttention(page_size=8)],
    [FULL, FullAttention(page_size=8)],
    [FULL, ChunkedLocal(8, page_size=4)],
    [FULL, Recurrent(page_size=4)],
    [FULL, EvenPages(9, page_size=4)],
  ],
)
def test_hits_are_those_of_the_general_rule(groups, use_eagle, policy):
  manager = CacheManager(9, groups, 64, True, use_eagle, policy=policy)
  state = manager._state
  config = manager.config
  draws = random.Random(0)
  num_digests = 10
  num_hits = 0
  for _ in range(100):
    limit = draws.randrange(41)
    cached = np.zeros((1, len(groups), num_digests), bool)
    pages = []
    for row, group in zip(cached[0], state.groups, strict=True):
      column = [int(draws.random() < 0.8) for _ in range(10 // group.step)]
      row[: len(column)] = column
      pages.append(column)
    counts = np.array([[limit], [num_digests * config.page_size]], np.int32)
    tokens, longest = (
      int(n[0]) for n in longest_hit.agree(config, cached, *counts)
    )
    answer = prefix_lookup._agree(state, pages, limit, num_digests)
    # A longest hit that is no longer than the prefix is not reported.
    assert (answer[0], max(answer)) == (tokens, max(longest, tokens))
    num_hits += tokens > 0
  assert num_hits > 10
