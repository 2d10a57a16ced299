"""The reference model's kinds of groups: windows, chunks, states, retention."""

import pytest

from jaxkv import ChunkedLocal
from jaxkv import FullAttention
from jaxkv import Recurrent
from jaxkv import SlidingWindow
from jaxkv.host import SpeculativeRecurrent
from tests import fuzz
from tests.host.fuzz_setups import SETUPS
from tests.host.scheduling import admit
from tests.host.scheduling import decode
from tests.host.scheduling import hit_of
from tests.host.scheduling import reference as manager
from tests.host.scheduling import request
from tests.model_of_the_cache.lookup import Search
from tests.model_of_the_cache.manager import Demand
from tests.model_of_the_cache.manager import ReferenceManager
from tests.model_of_the_cache.manager import Request

WINDOW = SlidingWindow(window=4, page_size=2)
CHUNK = ChunkedLocal(chunk=4, page_size=2)


def _found(group_kind, cached, tail=0):
  """Counts the pages of the longest hit; each letter T is a cached page."""
  group = manager(2, (group_kind,)).groups[0]
  limit = len(cached) * group.size + tail
  search = Search([group], lambda _, column: cached[column] == "T", limit + 1)
  return search.longest(group, limit, drop=False) // group.size


class TestLookup:
  @pytest.mark.parametrize(
    ("cached", "pages"),
    [
      ("TTF", 2),
      ("TTT", 3),
      ("TTFT", 2),
      ("TTFTFFTTFTTT", 12),
      ("TTFTFFTTFFF", 8),
      ("TFF", 1),
      ("FFT", 0),
    ],
  )
  def test_hits_of_windows(self, cached, pages):
    assert _found(WINDOW, cached) == pages

  @pytest.mark.parametrize(
    ("cached", "tail", "pages"),
    [
      ("TF", 0, 2),
      ("TF", 1, 2),
      ("TTT", 0, 3),
      ("FFT", 0, 3),
      ("FFF", 0, 2),
      ("FFFFFFFFTF", 1, 10),
      ("FFFFFFFFTFT", 1, 11),
    ],
  )
  def test_hits_of_chunks(self, cached, tail, pages):
    assert _found(CHUNK, cached, tail) == pages

  def test_chunks_alone_have_no_hit_in_an_empty_cache(self):
    cache = manager(40, (ChunkedLocal(chunk=48, page_size=16),))
    seq = request("0", range(100))
    assert hit_of(cache, seq) == ([[]], 0)
    admit(cache, seq)
    # Tokens 96 to 99 are in a page that is not full, so nothing is found.
    assert hit_of(cache, request("1", range(100))) == ([[]], 0)
    hit, tokens = hit_of(cache, request("1", range(90)))
    assert (hit, tokens) == ([[0, 0, 0, 4, 5]], 80)

  def test_hits_of_chunks_and_full_attention(self):
    groups = (FullAttention(page_size=16), ChunkedLocal(chunk=48, page_size=16))
    cache = manager(40, groups)
    admit(cache, request("0", range(100)))
    hit, tokens = hit_of(cache, request("1", range(100)))
    assert tokens == 96
    assert hit == [[1, 2, 3, 4, 5, 6], [0] * 6]

  def test_hits_of_states(self):
    state = Recurrent(page_size=2)
    assert _found(state, "TFTFF") == 3
    assert _found(state, "FF") == 0

  def test_boundary_page_of_a_window_with_eagle(self):
    """Page 3 ends the segment, page 4 is looked at and dropped."""
    groups = (FullAttention(page_size=32), SlidingWindow(window=8, page_size=8))
    cache = manager(30, groups, use_eagle=True)
    admit(cache, request("0", range(72)))
    windows = cache.get_page_ids("0")[1]
    assert windows == [*range(4, 13)]
    columns = [
      column for column, page in enumerate(windows) if page in cache.pool.keys
    ]
    assert columns == [3, 4, 7, 8]
    assert hit_of(cache, request("1", range(72)))[1] == 32


class TestRecycling:
  @pytest.mark.parametrize(
    ("group", "tokens", "nulls"),
    [
      *(
        (WINDOW, n, k)
        for n, k in ((0, 0), (4, 0), (5, 1), (6, 1), (7, 2), (11, 4))
      ),
      *((CHUNK, n, k) for n, k in ((0, 0), (4, 2), (6, 2), (12, 6))),
    ],
  )
  def test_skipped_pages_become_null_pages(self, group, tokens, nulls):
    cache = manager(20, (group,))
    admit(cache, request("0", range(20)))
    cache.remove_skipped_pages("0", tokens)
    assert cache.get_page_ids("0") == ([0] * nulls + [*range(nulls + 1, 11)],)
    # The last of them is the first to be used again.
    assert cache.free_queue() == [*range(11, 20), *range(nulls, 0, -1)]

  def test_refused_requests_still_free_skipped_pages(self):
    cache = manager(5, (WINDOW,))
    seq = request("0", range(8))
    admit(cache, seq)
    assert decode(cache, seq, range(20)) is None
    assert cache.get_page_ids("0") == ([0, 0, 3, 4],)
    assert cache.free_queue() == [2, 1]

  def test_admission_cap(self):
    cache = manager(10, (WINDOW,), max_in_flight=6, max_model_len=100)
    window, chunk = manager(10, (WINDOW, CHUNK), enable_caching=False).groups
    assert window.most_pages(longest=100, in_flight=6) == 6  # ceil(9 / 2) + 1
    assert chunk.most_pages(longest=100, in_flight=6) == 5
    seq = request("0", range(60))
    assert admit(cache, seq, 6, full_sequence_must_fit=True)[1] == [[1, 2, 3]]
    tight = manager(6, (WINDOW,), max_in_flight=6, max_model_len=100)
    seq = request("0", range(60))
    assert admit(tight, seq, 6, full_sequence_must_fit=True)[1] is None

  @pytest.mark.parametrize("group", [WINDOW, CHUNK])
  @pytest.mark.parametrize(("nulls", "need"), [(0, 20), (5, 15)])
  def test_number_of_needed_pages(self, group, nulls, need):
    cache = manager(40, (group,))
    hit = [0] * nulls + [*range(1, 11 - nulls)]
    counts = {"behind": 0, "external": 0, "encoder": 0, "tokens": 40}
    demand = Demand(hits=[hit], slots=40, **counts)
    assert cache.need("0", demand) == need

  def test_uncached_pages_of_a_window_are_used_first(self):
    cache = manager(20, (WINDOW,), prefix_retention_interval=0)
    seq = request("0", range(12), num_prompt_tokens=7)
    admit(cache, seq)
    # Only the window before token 6 is kept: places 1 and 2.
    assert cache.cached_page_ids() == {2, 3}
    cache.free(seq)
    assert cache.free_queue()[:4] == [6, 5, 4, 1]
    assert cache.free_queue()[-2:] == [3, 2]


class TestRetention:
  def test_retained_pages_of_windows(self):
    window = SlidingWindow(window=3, page_size=2)
    for retention, columns in ((None, [*range(10)]), (0, [9]), (8, [3, 7, 9])):
      cache = manager(30, (window,), prefix_retention_interval=retention)
      admit(cache, request("0", [*range(21)]))
      assert cache.cached_page_ids() == {column + 1 for column in columns}

  def test_retained_states(self):
    for retention, columns in ((None, [0, 1, 2, 3]), (0, [3]), (8, [1, 3])):
      cache = manager(
        30, (Recurrent(page_size=4),), prefix_retention_interval=retention
      )
      seq = request("0", range(18))
      pages = []
      for new in (4, 4, 4, 4, 2):
        cache.new_step_starts()
        pages += cache.allocate_slots(seq, new).get_page_ids()[0]
        seq.num_computed_tokens += new
      assert cache.cached_page_ids() == {pages[column] for column in columns}

  def test_junction_is_kept(self):
    window = SlidingWindow(window=3, page_size=2)
    groups = (FullAttention(page_size=2), window)
    cache = manager(60, groups, prefix_retention_interval=0)
    admit(cache, request("0", [*range(8), *range(100, 112)]))
    second = request("1", [*range(8), *range(200, 212)])
    assert hit_of(cache, second)[1] == 0
    assert second.shared_prefix_boundary == 8
    admit(cache, second)
    third = request("2", [*range(8), *range(300, 312)])
    assert hit_of(cache, third)[1] == 8

  def test_junction_of_states_is_kept(self):
    groups = (FullAttention(page_size=4), Recurrent(page_size=4))
    cache = manager(60, groups, prefix_retention_interval=0)
    hits = []
    for name in range(3):
      seq = request(str(name), [*range(8), *range(100 * name, 100 * name + 9)])
      hits.append(hit_of(cache, seq)[1])
      # As schedulers do: a chunk ends where a state is to be kept.
      for num_computed in (8, 16, 17):
        cache.new_step_starts()
        pages, hit = cache.get_computed_pages(seq)
        num_held = seq.num_computed_tokens
        pages, hit = (None, 0) if num_held else (pages, hit)
        num_new = num_computed - num_held - hit
        assert cache.allocate_slots(seq, num_new, hit, pages)
        seq.num_computed_tokens = num_computed
    assert hits == [0, 0, 8]


class TestState:
  def test_tables_of_states(self):
    cache = manager(12, (Recurrent(page_size=4),))
    seq = request("0", range(30))
    tables = []
    for new in (4, 4, 12, 2):
      cache.new_step_starts()
      assert cache.allocate_slots(seq, new)
      seq.num_computed_tokens += new
      tables.append(cache.get_page_ids("0")[0])
    assert tables == [
      [1],
      [1, 2],
      [0, 2, 0, 0, 3],
      # The chunk passed 8 tokens, so nothing is found at 12 or 16.
      [0, 0, 0, 0, 3, 4],
    ]
    assert cache.cached_page_ids() == {1, 2, 3}
    second = request("1", range(30))
    assert hit_of(cache, second) == ([[0, 0, 0, 0, 3]], 20)

  def test_scratch_pages_move(self):
    cache = manager(12, (SpeculativeRecurrent(2, page_size=4),))
    seq = request("0", range(30))
    assert admit(cache, seq, 4)[1] == [[1, 2, 3]]
    assert cache.allocate_slots(seq, 12).get_page_ids() == ([2, 3, 4],)
    assert cache.get_page_ids("0") == ([1, 0, 0, 2, 3, 4],)

  def test_same_step_hit_waits(self):
    cache = manager(12, (Recurrent(page_size=4),))
    admit(cache, request("0", range(8)))
    second = request("1", range(10))
    assert admit(cache, second) == ([[0, 1]], None)
    cache.new_step_starts()
    assert admit(cache, second) == ([[0, 1]], [[2]])
    # What an earlier step computed serves any number in one step.
    third = request("2", [*range(8), 30])
    assert admit(cache, third) == ([[0, 1]], [[3]])


class Forgetful(ReferenceManager):
  """Frees the first page last."""

  def free(self, request):
    for pages in self.entries[request.request_id].sequence.pages:
      pages.reverse()
    super().free(request)


class TestFuzz:
  def test_fuzz_finds_a_difference(self):
    broken = fuzz.Factory(Forgetful, Request)
    with pytest.raises(fuzz.Mismatch, match="free_queue"):
      fuzz.run(SETUPS["full_window"], "current", 1, 300, broken)

  def test_fuzz_command(self, capsys):
    arguments = ["--operations", "50", "--config", "everything"]
    assert fuzz.main(arguments) == 0
    assert capsys.readouterr().out.startswith("everything: operations 50")
