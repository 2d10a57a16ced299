"""Tests of the reference manager alone, without the library's manager.

Traces that compare both are in `tests.host.test_manager_traces`.
"""

import pytest

from jaxkv import FullAttention
from jaxkv import SlidingWindow
from tests.host.scheduling import FULL
from tests.host.scheduling import HYBRID
from tests.host.scheduling import PAGE
from tests.host.scheduling import WINDOW
from tests.host.scheduling import admit
from tests.host.scheduling import fill_pages
from tests.host.scheduling import hit_of
from tests.host.scheduling import reference as manager
from tests.host.scheduling import request


class TestHybrid:
  def _filled(self, **options):
    cache = manager(21, HYBRID, **options)
    return cache, fill_pages(cache)

  @pytest.mark.parametrize(
    ("evicted", "pages"),
    [([], 2), ([5], 0), ([7], 1), ([3], 1), ([4, 8, 12], 2), ([1], 0)],
  )
  def test_hits_with_a_draft_model(self, evicted, pages):
    cache, second = self._filled(use_eagle=True)
    cache.evict_pages(evicted)
    assert hit_of(cache, second)[1] == pages * PAGE

  def test_eagle_resend_of_an_aligned_prompt(self):
    for policy, tokens in (("current", 12), ("classic", 8)):
      cache = manager(21, (FULL, FULL), use_eagle=True, policy=policy)
      admit(cache, request("0", range(16)))
      assert hit_of(cache, request("1", range(16)))[1] == tokens

  def test_hits_of_three_kinds_with_a_draft_model(self):
    """Classic drops a page in every round until nothing is left."""
    groups = (FULL, WINDOW, SlidingWindow(window=12, page_size=PAGE))
    for policy, tokens in (("current", 12), ("classic", 0)):
      cache = manager(31, groups, use_eagle=True, policy=policy)
      admit(cache, request("0", range(18)))
      assert hit_of(cache, request("1", range(18)))[1] == tokens

  def test_shorter_candidate_is_verified_again(self):
    """Worked by hand: 18, 12, 8 and 2 tokens are tried."""
    windows = [SlidingWindow(window=window, page_size=2) for window in (3, 5)]
    cache = manager(40, (FullAttention(page_size=2), *windows), use_eagle=True)
    sequence = request("0", range(21))
    admit(cache, sequence)
    _, first_window, second_window = cache.get_page_ids("0")
    cache.evict_pages([first_window[column] for column in (2, 4, 5, 6, 7)])
    cache.evict_pages([second_window[column] for column in (7, 8, 9)])
    assert hit_of(cache, request("1", range(21)))[1] == 2

  def test_classic_has_no_junction(self):
    cache, second = self._filled(policy="classic")
    cache.evict_pages([7])
    hit_of(cache, second)
    assert second.shared_prefix_boundary == 0

  def test_hits_of_two_page_sizes(self):
    small = SlidingWindow(window=8, page_size=4)
    cache = manager(21, (FullAttention(page_size=8), small))
    sequence = request("0", range(27))
    assert admit(cache, sequence)[1] == [[1, 2, 3, 4], [*range(5, 12)]]
    # Only whole multiples of 8 tokens; the prompt's end is left alone.
    assert cache.cached_page_ids() == {1, 2, 3, 5, 6, 7, 8, 9, 10}
    repeated = request("1", range(27))
    assert hit_of(cache, repeated) == ([[1, 2, 3], [0, 0, 0, 0, 9, 10]], 24)
    cache.evict_pages([10])
    assert hit_of(cache, repeated) == ([[1, 2], [0, 0, 7, 8]], 16)

  @pytest.mark.parametrize("policy", ["current", "classic"])
  def test_hits_of_all_groups_are_held_before_any_page_is_taken(self, policy):
    """Classic took page 3 for the first group and gave it to the second too."""
    cache = manager(13, (FULL, FULL), policy=policy)
    for name, tokens in (("0", range(8)), ("1", range(500, 516))):
      filler = request(name, tokens)
      admit(cache, filler)
      cache.free(filler)
    assert cache.free_queue()[:4] == [2, 1, 4, 3]
    cache.evict_pages([2, 4])
    external = {"num_external_computed_tokens": 12}
    hit, new = admit(cache, request("2", range(20)), 1, **external)
    assert hit == [[1], [3]]
    assert new == [[12], [11]]
    assert cache.get_page_ids("2") == ([1, 2, 4, 8, 12], [3, 7, 6, 5, 11])
