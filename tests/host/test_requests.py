"""Requests as others make them: what counts as a token, a count, a status."""

import enum
import types

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.host import CacheManager
from jaxkv.host import CachePages
from jaxkv.host import Request
from tests.host.scheduling import WINDOW
from tests.host.scheduling import admit
from tests.host.scheduling import request
from tests.host.scheduling import running
from tests.host.scheduling import single
from tests.host.scheduling import unchanged


@pytest.fixture
def cache():
  """Request a runs, 7 of 10 pages are free."""
  cache = single(CacheManager)
  admit(cache, request("a", range(9)))
  return cache


@pytest.mark.parametrize(
  "tokens",
  [
    [2**40],
    ["x"],
    [None],
    "0123",
    [0, 1, 2.0, 3],
    [[0], [1]],
    np.arange(4.0),
    np.asarray([0, 1, 2, 2**31], np.uint32),
  ],
)
def test_tokens_are_numbers(cache, tokens):
  """Cast, several of these would be the tokens that request a began with."""
  req = Request("new", tokens)
  with unchanged(cache):
    with pytest.raises(ValueError, match="of 'new' must be 32-bit integers"):
      cache.get_computed_pages(req)
    with pytest.raises(ValueError, match="of 'new' must be 32-bit integers"):
      cache.allocate_slots(req, len(tokens))


@pytest.mark.parametrize(
  "tokens",
  [
    tuple(range(9)),
    bytes(range(9)),
    np.arange(9, dtype=np.uint8),
    [*np.arange(9)],
  ],
)
def test_integers_of_any_type_are_tokens(cache, tokens):
  assert cache.get_computed_pages(Request("new", tokens))[1] == 8


@pytest.mark.parametrize("token", [9.0, "9", None, 2**31])
def test_decoded_tokens_are_numbers(cache, token):
  """Tokens are read when their page is full."""
  req = running(num_computed_tokens=11)
  req.token_ids += [9, 9, token]
  with (
    unchanged(cache),
    pytest.raises(ValueError, match=r"of 'a' must be .* from 8 to 11"),
  ):
    cache.step([req])
  req.token_ids[11] = 9
  assert cache.step([req]) == [CachePages(([],))]


@pytest.mark.parametrize(
  "fields", [{"num_computed_tokens": 9.0}, {"num_in_flight_tokens": 0.5}]
)
def test_counts_of_a_request_are_ints(fields):
  cache = CacheManager(11, [WINDOW], 64)
  req = request("a", range(9))
  admit(cache, req)
  with unchanged(cache):
    wrong = running(**fields)
    text = f"{next(iter(fields))}` must be an int"
    with pytest.raises(TypeError, match=text):
      cache.step([wrong])
    with pytest.raises(TypeError, match=text):
      cache.allocate_slots(wrong, 1)


@pytest.mark.parametrize(
  ("fields", "step", "message"),
  [
    ({"num_computed_tokens": -3}, (1,), "computed_tokens` must be at least"),
    ({"num_computed_tokens": 2**40}, (1,), "got 1099511627777"),
    ({}, (2**63 - 1,), "got 9223372036854775807"),
    ({}, ([2**63 - 1],), "got 9223372036854775807"),
    ({}, ([2**40],), "got 1099511627776"),
  ],
)
def test_counts_of_a_step_fit(cache, fields, step, message):
  with unchanged(cache), pytest.raises(ValueError, match=message):
    cache.step([running(**fields)], *step)


def test_tokens_in_an_array_of_jax(cache):
  req = running("other", num_computed_tokens=0)
  req.token_ids = jnp.asarray([*range(8), 100], jnp.int32)
  assert cache.get_computed_pages(req)[1] == 8


def _calls_with_pages(cache):
  pages = cache.pages
  readers = (pages.ref_counts, pages.keys, cache.evict_pages)
  return *readers, pages.hold, pages.release


@pytest.mark.parametrize("pages", [[1.9], ["1"], "12", [None], [True]])
def test_page_ids_are_ints(cache, pages):
  for call in _calls_with_pages(cache):
    with unchanged(cache), pytest.raises(TypeError, match="page_ids` must be"):
      call(pages)


@pytest.mark.parametrize("page", [-1, 11, 2**40])
def test_page_ids_exist(cache, page):
  for call in _calls_with_pages(cache):
    with unchanged(cache), pytest.raises(ValueError, match=rf"\[{page}\]"):
      call([1, page])


def test_page_ids_of_numpy_become_ints(cache):
  pages = np.array([5, 6], np.uint8)
  cache.pages.hold(iter(pages))
  assert cache.pages.ref_counts(pages) == [1, 1]
  cache.pages.release(iter(pages))
  req = request("numpy", range(70, 79))
  admit(cache, req)
  cache.free(req)
  hit, num_tokens = cache.get_computed_pages(req)
  hit = CachePages(([*np.array(hit.pages[0])],))
  cache.allocate_slots(request("numpy", range(70, 79)), 1, num_tokens, hit)
  ids = [*cache.get_page_ids("numpy")[0], *cache.free_queue()]
  assert {type(page) for page in ids} == {int}


@pytest.mark.parametrize("count", [99.5, "3", True])
def test_the_limit_of_a_hit_is_an_int(cache, count):
  with pytest.raises(TypeError, match="`max_hit_tokens` must be an int"):
    cache.get_computed_pages(request("new", range(9)), count)


def request_without_status():
  return types.SimpleNamespace(
    request_id="new", token_ids=[*range(36)], num_computed_tokens=0
  )


def test_newcomers_without_a_status_leave_pages_free():
  """As those that wait, until they have computed tokens."""
  cache = single(CacheManager, watermark=0.2)
  req = request_without_status()
  with unchanged(cache):
    assert cache.allocate_slots(req, 36) is None
  req.status = "running"
  assert cache.allocate_slots(req, 36) is not None


def test_running_requests_without_a_status_take_all_pages():
  cache = single(CacheManager, watermark=0.2)
  req = request_without_status()
  assert cache.allocate_slots(req, 4) is not None
  req.num_computed_tokens = 4
  assert cache.allocate_slots(req, 32) is not None


def test_null_pages_are_not_new():
  groups = [jaxkv.Recurrent(page_size=4), jaxkv.FullAttention(page_size=4)]
  cache = CacheManager(20, groups, 32)
  new = cache.allocate_slots(request("0", range(14)), 14)
  assert new.get_page_ids()[0] == [0, 0, 0, 1]
  assert new.get_unhashed_page_ids() == [1]


@pytest.mark.parametrize("field", ["token_ids", "all_token_ids"])
def test_objects_of_any_class_are_requests(field):
  cache = single(CacheManager)

  def make(name, tokens):
    return types.SimpleNamespace(
      request_id=name, num_computed_tokens=0, **{field: list(tokens)}
    )

  req_a = make("0", range(10))
  req_b = make("1", range(14))
  assert cache.get_computed_pages(req_a)[1] == 0
  assert cache.allocate_slots(req_a, 10).get_page_ids() == ([1, 2, 3],)
  hit_pages, tokens = cache.get_computed_pages(req_b)
  assert (hit_pages.get_page_ids(), tokens) == (([1, 2],), 8)
  new = cache.allocate_slots(req_b, 6, tokens, hit_pages)
  assert new.get_page_ids() == ([4, 5],)
  req_b.num_computed_tokens = 14
  getattr(req_b, field).extend([14, 15, 16])
  assert cache.step([req_b], 3) == [CachePages(([6],))]
  assert cache.cached_page_ids() == {1, 2, 4, 5}
  cache.free(req_a)
  cache.free(req_b)
  assert cache.num_free_pages == 10


def test_status_may_be_an_enum():
  status = enum.Enum("Status", ["WAITING", "RUNNING", "PREEMPTED"])
  cache = single(CacheManager, watermark=0.2)
  req = request("0", range(36))
  for waiting in (status.WAITING, status.PREEMPTED):
    req.status = waiting
    assert cache.allocate_slots(req, 36) is None
  req.status = status.RUNNING
  assert cache.allocate_slots(req, 36) is not None


@pytest.mark.parametrize(
  ("value", "error"),
  [
    (-7, ValueError),
    (2**31, ValueError),
    ([], TypeError),
    (3 + 1j, TypeError),
    (3.0, TypeError),
    (True, TypeError),
    ("3", TypeError),
  ],
)
@pytest.mark.parametrize(
  "name", ["num_prompt_tokens", "shared_prefix_boundary"]
)
class TestCounts:
  def test_a_request_refuses_other_values(self, name, value, error):
    with pytest.raises(error, match=f"`{name}` must be .*, got"):
      Request("new", [1, 2, 3], **{name: value})

  def test_a_manager_refuses_other_values(self, cache, name, value, error):
    req = types.SimpleNamespace(
      request_id="new",
      token_ids=[1, 2, 3],
      num_computed_tokens=0,
      **{name: value},
    )
    with unchanged(cache):
      with pytest.raises(error, match=f"`{name}` must be .*, got"):
        cache.get_computed_pages(req)
      with pytest.raises(error, match=f"`{name}` must be .*, got"):
        cache.allocate_slots(req, 3)
