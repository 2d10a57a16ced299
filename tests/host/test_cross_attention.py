"""Managers of encoder-decoders: an encoder's pages are taken once."""

import pytest

import jaxkv
from jaxkv.host import CacheManager
from jaxkv.host import CrossAttention
from jaxkv.host import Request
from tests.host.scheduling import admit
from tests.host.scheduling import decode

CROSS = CrossAttention(page_size=4)
FULL = jaxkv.FullAttention(page_size=4)


def manager(**options):
  options = {"enable_caching": False, "max_encoder_tokens": 30, **options}
  return CacheManager(16, [FULL, CROSS], 24, **options)


class TestManager:
  def test_a_transcription(self):
    """Two recordings are transcribed, one after the other ends."""
    cache = manager()
    req_a = Request("one", [1, 2, 3])
    req_b = Request("two", [4] * 5)
    assert admit(cache, req_a, num_encoder_tokens=30)[1] == [
      [1],
      [2, 3, 4, 5, 6, 7, 8, 9],
    ]
    # Later calls name no encoder tokens, and add no such page.
    assert decode(cache, req_a, [5, 6]) == [[10], []]
    assert admit(cache, req_b, num_encoder_tokens=30)[1] is None
    assert admit(cache, req_b, num_encoder_tokens=9)[1] == [
      [11, 12],
      [13, 14, 15],
    ]
    assert cache.step([req_a, req_b], 1)[1].get_page_ids() == ([], [])
    assert cache.get_num_common_prefix_pages("one") == [0, 0]
    cache.free(req_b)
    cache.free(req_a)
    # Without keys all go to the front, group by group, the last page first.
    assert cache.free_queue()[:10] == [9, 8, 7, 6, 5, 4, 3, 2, 10, 1]
    assert cache.num_free_pages == 15

  def test_the_whole_sequence_counts_the_encoder(self):
    cache = manager()
    long = Request("long", [1] * 20)
    options = {"full_sequence_must_fit": True, "num_encoder_tokens": 30}
    assert admit(cache, long, 15, **options)[1] is not None
    assert admit(manager(), Request("x", [1] * 24), 1, **options)[1] is not None
    tight = CacheManager(
      14, [FULL, CROSS], 24, enable_caching=False, max_encoder_tokens=30
    )
    assert admit(tight, Request("x", [1] * 24), 1, **options)[1] is None

  @pytest.mark.parametrize(
    ("options", "text"),
    [
      ({"enable_caching": True}, "enable_caching` must be False"),
      ({"max_encoder_tokens": 0}, "max_encoder_tokens` must be at least 1"),
    ],
  )
  def test_bad_options(self, options, text):
    with pytest.raises(ValueError, match=text):
      manager(**options)

  def test_bad_counts_of_encoder_tokens(self):
    cache = manager()
    for count, text in ((31, "at most 30"), (-1, "num_encoder_tokens.* -1")):
      with pytest.raises(ValueError, match=text):
        cache.allocate_slots(Request("x", [1]), 1, num_encoder_tokens=count)
    assert cache.num_free_pages == 15

  def test_other_managers_refuse_encoder_tokens(self):
    with pytest.raises(ValueError, match="max_encoder_tokens` must be None"):
      CacheManager(16, [FULL], 24, max_encoder_tokens=5)
    cache = CacheManager(16, [FULL], 24)
    with pytest.raises(ValueError, match="tokens` must be at most 0"):
      cache.allocate_slots(Request("x", [1]), 1, num_encoder_tokens=1)
