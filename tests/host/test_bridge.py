"""The manager's state as a value: handed to device verbs, and taken back."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import FullAttention
from jaxkv import SlidingWindow
from jaxkv.host import CacheManager
from jaxkv.host import CrossAttention
from jaxkv.host import MultimodalItem
from jaxkv.host import SpeculativeRecurrent
from tests.host.bridge_walk import Walk
from tests.host.bridge_walk import differences
from tests.host.fuzz_setups import SETUPS
from tests.host.scheduling import admit
from tests.host.scheduling import decode
from tests.host.scheduling import hit_of
from tests.host.scheduling import request
from tests.host.scheduling import single
from tests.tools.tiers import slow_except

KEY = np.arange(4, dtype=np.uint32)
_SWITCHES = 120
_DEEP_SWITCHES = 1000
_CONFIGURATIONS = (
  ("full", "current"),
  ("full", "classic"),
  ("full_eagle", "current"),
  ("full_off", "current"),
  ("window", "current"),
  ("window_latest", "current"),
  ("full_window_sizes", "current"),
  ("two_full_sizes", "classic"),
  ("full_state_sizes", "current"),
  ("three_windows_eagle", "current"),
  ("chunk", "classic"),
  ("full_window_state_eagle", "current"),
  ("full_host", "classic"),
  ("full_window_host_costs", "current"),
)


# Their options are in others, too.
_LIKE_OTHERS = {
  ("full", "classic"),
  ("full", "current"),
  ("full_eagle", "current"),
  ("full_host", "classic"),
  ("two_full_sizes", "classic"),
  ("window", "current"),
}


@slow_except("pair", _CONFIGURATIONS, ("full_window_sizes", "current"))
@pytest.mark.parametrize(
  "pair",
  [
    pytest.param(pair, marks=pytest.mark.deep) if pair in _LIKE_OTHERS else pair
    for pair in _CONFIGURATIONS
  ],
  ids="-".join,
)
def test_states_equal_those_of_a_cache_on_the_device(pair, pytestconfig):
  """Random steps on the host or by verbs; see `bridge_walk`."""
  deep = pytestconfig.getoption("deep")
  walk = Walk(SETUPS[pair[0]], pair[1], seed=0)
  while walk.num_switches < (_DEEP_SWITCHES if deep else _SWITCHES):
    step = walk.step()
    assert not differences(walk), f"{step}, switch {walk.num_switches}"
  jaxkv.check(walk.manager.state)


@pytest.mark.parametrize(
  "name",
  [
    "full_window_sizes",
    pytest.param("full_host", marks=pytest.mark.slow),
    pytest.param("state", marks=pytest.mark.deep),
  ],
)
def test_events_mirror_the_index(name):
  """Events count the keys of both memories after changes of either side."""
  setup = SETUPS[name]
  options = setup.options | {"num_events": 500}
  setup = dataclasses.replace(setup, options=options)
  walk = Walk(setup, "current", seed=0, is_paired=False)
  keys = collections.Counter()
  event_types = set()
  while walk.num_switches < _SWITCHES:
    step = walk.step()
    events, num_lost = walk.manager.take_events()
    for event in events:
      event_types.add(type(event))
      if isinstance(event, jaxkv.host.Cleared):
        keys.clear()
      else:
        keys[event.key] += 1 if isinstance(event, jaxkv.host.Stored) else -1
    pages = walk.manager.pages
    cached = pages.keys(pages.cached_in_order())
    assert num_lost == 0
    assert +keys == collections.Counter(cached), step
    assert min(keys.values(), default=0) >= 0, step
  assert event_types >= {jaxkv.host.Stored, jaxkv.host.Removed}


@pytest.fixture
def cache():
  """Request a has 9 of 10 tokens in slot 0; b was freed and is cached."""
  cache = single(CacheManager, key=KEY, max_requests=10)
  admit(cache, request("b", range(100, 110)))
  cache.free(request("b", []))
  admit(cache, request("a", range(9)))
  return cache


def test_the_state_is_that_of_the_device_verbs(cache):
  """The same requests, admitted and committed on the device."""
  state = jaxkv.init(cache.config, jnp.asarray(KEY))
  for tokens in (range(100, 110), range(9)):
    padded = [[*tokens, *[0] * (16 - len(tokens))]]
    state, _ = jaxkv.admit(state, [0], padded, [len(tokens)])
    state, _ = jaxkv.commit(state, padded, [len(tokens)], slots=[0])
    if tokens[0]:
      state, _ = jaxkv.free(state, slots=[0])
  ours = cache.state
  jaxkv.check(ours)
  for name in ("page_table", "length", "num_pages", "secret", "root"):
    np.testing.assert_array_equal(getattr(ours, name), getattr(state, name))
  assert jaxkv.free_pages(ours) == jaxkv.free_pages(state)
  prompt = [[*range(100, 110)]]
  match = jaxkv.match(ours, prompt, [10])
  assert match.num_cached_tokens.tolist() == [8]
  assert match.pages.tolist() == jaxkv.match(state, prompt, [10]).pages.tolist()


def test_a_loop_decodes_and_the_scheduler_goes_on(cache):
  """Tokens of a jitted loop fill pages, which other requests then hit."""
  tokens = jnp.arange(20, 27, dtype=jnp.int32)

  @jax.jit
  def loop(state):
    def step(state, token):
      counts = jnp.zeros((state.config.num_slots,), jnp.int32).at[0].set(1)
      state, _ = jaxkv.allocate(state, counts)
      row = jnp.full((state.config.num_slots, 1), token)
      return jaxkv.commit(state, row, counts)[0], None

    return jax.lax.scan(step, state, tokens)[0]

  req = request("a", range(9), num_computed_tokens=9, status="running")
  # From here on the manager knows the request by this object.
  cache.allocate_slots(req, 1)
  state = loop(cache.state)
  req.token_ids += tokens.tolist()
  req.num_computed_tokens = 16
  assert cache.take(state) == []
  jaxkv.check(cache.state)
  repeat = request("c", [*req.token_ids, 1])
  assert hit_of(cache, repeat) == ([cache.get_page_ids("a")[0][:4]], 16)
  assert decode(cache, req, [30, 31]) is not None


@slow_except("page_sizes", [(4,), (8, 4)], (8, 4))
@pytest.mark.parametrize("page_sizes", [(4,), (8, 4)], ids=str)
def test_pages_of_replaced_tokens_get_new_keys(page_sizes):
  groups = [FullAttention(page_size=page_size) for page_size in page_sizes]
  cache = CacheManager(40, groups, 64, key=KEY)
  req = request("a", range(15))
  admit(cache, req)
  slot = np.flatnonzero(np.asarray(cache.state.num_pages)[:, 0]).tolist()
  new = [*range(20, 26)]
  state, _ = jaxkv.truncate(cache.state, [9], slots=slot)
  state, _ = jaxkv.allocate(state, [6], slots=slot)
  state, _ = jaxkv.commit(state, [new], [6], slots=slot)
  req.token_ids[9:] = new
  assert cache.take(state) == []
  assert decode(cache, req, [26]) is not None
  assert hit_of(cache, request("b", [*req.token_ids, 1]))[1] == 16
  # The third page never held these tokens.
  mixed = [*range(12), *req.token_ids[12:], 1]
  assert hit_of(cache, request("c", mixed))[1] == 8
  state = cache.state
  jaxkv.check(state)
  prompts = np.asarray([[*req.token_ids, 1], mixed])
  match = jaxkv.match(state, prompts, [17, 17])
  assert match.num_cached_tokens.tolist() == [16, 8]


def test_offloaded_pages_keep_their_groups():
  """A loop evicts the pages of both groups to offload memory."""
  groups = [FullAttention(page_size=4), SlidingWindow(8, page_size=4)]
  cache = CacheManager(9, groups, 64, key=KEY, offload_pages=8, max_requests=2)
  one = request("a", range(9))
  admit(cache, one)
  cache.free(one)
  state, _ = jaxkv.allocate(cache.state, [16, 0])
  state, _ = jaxkv.free(state, slots=[0])
  assert cache.take(state) == []
  pages = cache.pages.cached_in_order()
  assert len(pages) == 4 and min(pages) > 9
  keys = np.asarray(state.pool.index.entry, "<u4")[pages, :4]
  assert cache.pages.keys(pages) == [key.tobytes() for key in keys]
  assert hit_of(cache, request("b", range(9)))[1] == 8


def _with_a_state_of_a_loop():
  """A manager that took a state after 8 of 9 tokens, and the tokens."""
  cache = CacheManager(9, [jaxkv.Recurrent(page_size=4)], 64, key=KEY)
  tokens = [*range(9)]
  state, _ = jaxkv.admit(cache.state, [0], [tokens], [8])
  state, _ = jaxkv.commit(state, [tokens], [8], slots=[0])
  state, _ = jaxkv.free(state, slots=[0])
  cache.take(state)
  return cache, tokens


@pytest.mark.slow
def test_states_that_a_loop_has_published_are_written():
  cache, tokens = _with_a_state_of_a_loop()
  # In this step already, without `new_step_starts`.
  assert admit(cache, request("c", tokens)) == ([[0, 1]], [[2]])


def test_statistics_after_an_older_state():
  """Counts that the older state lowers are not negative afterwards."""
  cache = single(CacheManager, key=KEY, track_residency=True, max_requests=10)
  admit(cache, request("a", range(9)))
  cache.free(request("a", []))
  old_state = cache.state
  admit(cache, request("z", range(200, 236)))
  assert sum(cache.make_prefix_cache_stats().lifetime) > 0
  cache.take(old_state)
  stats = cache.make_prefix_cache_stats()
  assert sum(stats.lifetime) == sum(stats.idle) == 0


def test_ages_after_a_loop():
  """Pages that a loop released count as released when the state is taken."""
  cache = single(CacheManager, key=KEY, track_residency=True, max_requests=10)
  admit(cache, request("a", range(9)))
  state, _ = jaxkv.free(cache.state, slots=[0])
  cache.take(state)
  admit(cache, request("z", range(200, 237)))
  assert cache.make_prefix_cache_stats().idle[0] == 2


def test_events_of_a_loop(cache):
  """Pages that a loop published in a freed slot have no group or parent."""
  cache = single(CacheManager, key=KEY, num_events=16, max_requests=10)
  req = request("a", range(9))
  admit(cache, req)
  first_event, second_event = cache.take_events().events
  ended = [*range(40, 49)]
  new = [*range(20, 27)]
  state, _ = jaxkv.admit(cache.state, [1], [ended], [9])
  state, _ = jaxkv.commit(state, [ended], [9], slots=[1])
  state, _ = jaxkv.free(state, slots=[1])
  state, _ = jaxkv.allocate(state, [7], slots=[0])
  state, _ = jaxkv.commit(state, [new], [7], slots=[0])
  state, _ = jaxkv.evict(state, [first_event.page])
  req.token_ids.extend(new)
  cache.take(state)
  removed, *stored = cache.take_events().events
  assert removed == (first_event.page, 0, first_event.key)
  tokens = [(40, 41, 42, 43), (44, 45, 46, 47), (8, 20, 21, 22), tuple(new[3:])]
  assert [event.tokens for event in stored] == tokens
  keys = cache.pages.keys([event.page for event in stored])
  assert [event.key for event in stored] == keys
  unknown = (None, None, None)
  assert [(e.group, e.parent, e.root) for e in stored] == [
    unknown,
    unknown,
    (0, second_event.key, first_event.root),
    (0, stored[2].key, first_event.root),
  ]
  # The manager evicts a page of which only the key is known.
  cache.evict_pages([stored[0].page])
  assert cache.take_events().events == [(stored[0].page, None, keys[0])]


@pytest.mark.parametrize(
  ("group", "options"),
  [
    (CrossAttention(page_size=4), {"enable_caching": False}),
    (SpeculativeRecurrent(2, page_size=4), {}),
  ],
)
def test_managers_of_host_groups_have_no_state(group, options):
  """Their pages can be managed, but not as a value."""
  cache = CacheManager(12, [FullAttention(page_size=4), group], 32, **options)
  assert admit(cache, request("a", range(5)))[1] is not None
  name = type(group).__name__
  with pytest.raises(ValueError, match=rf"a device has for `state`.*{name}"):
    _ = cache.state


@pytest.mark.slow
def test_pages_of_a_sequence_that_ended_on_the_device(cache):
  """Their prefix is not known on the host, and they are hit by their keys."""
  slot = np.flatnonzero(np.asarray(cache.state.num_pages)[:, 0] == 0)[0]
  tokens = [*range(40, 49)]
  state, _ = jaxkv.admit(cache.state, [slot], [tokens], [9])
  state, _ = jaxkv.commit(state, [tokens], [9], slots=[slot])
  state, _ = jaxkv.free(state, slots=[slot])
  assert cache.take(state) == []
  assert hit_of(cache, request("c", tokens))[1] == 8
  assert (
    admit(cache, request("c", tokens))[0][0]
    == hit_of(cache, request("d", tokens))[0][0]
  )
  assert jaxkv.match(cache.state, [tokens], [9]).num_cached_tokens[0] == 8


@pytest.mark.slow
def test_a_state_of_a_sequence_that_ended_on_the_device():
  """The state before the last token is hit by its key, and was written."""
  cache, tokens = _with_a_state_of_a_loop()
  cache.new_step_starts()
  assert admit(cache, request("c", tokens)) == ([[0, 1]], [[2]])
  jaxkv.check(cache.state)


def test_take_returns_the_requests_that_ended(cache):
  occupied = cache.state.num_pages[:, 0] > 0
  state, _ = jaxkv.free(cache.state, mask=occupied)
  assert cache.take(state) == ["a"]
  assert not cache.holds_pages("a")
  assert cache.num_free_pages == 10


def test_an_older_state_is_taken(cache):
  """Later calls of the manager are lost, and its clock goes back."""
  old_state = cache.state
  queue = cache.free_queue()
  admit(cache, request("later", range(60, 75)))
  assert cache.take(old_state) == ["later"]
  assert cache.free_queue() == queue
  state = cache.state
  assert state.pool.index.clock == old_state.pool.index.clock
  assert state.stats.published_pages == old_state.stats.published_pages
  jaxkv.check(state)


def test_new_slots_are_named(cache):
  slot = int(np.flatnonzero(np.asarray(cache.state.num_pages)[:, 0])[0])
  state, _ = jaxkv.fork(cache.state, [slot], [(slot + 1) % 10])
  with pytest.raises(
    ValueError, match=f"slot {(slot + 1) % 10}, which was empty"
  ):
    cache.take(state)
  child = request("child", range(9), num_computed_tokens=9, status="running")
  assert cache.take(state, {(slot + 1) % 10: child}) == []
  assert cache.get_page_ids("child")[0][:2] == cache.get_page_ids("a")[0][:2]
  with pytest.raises(TypeError, match="`requests` must be a dictionary"):
    cache.take(state, [child])
  with pytest.raises(AttributeError, match="request_id"):
    cache.take(state, {(slot + 1) % 10: None})
  # The child's pages are freed like any other's.
  cache.free(child)
  cache.free(request("a", []))
  assert cache.num_free_pages == 10


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda state: state.secret, "must be a CacheState"),
    (
      lambda state: jaxkv.init(
        dataclasses.replace(state.config, num_slots=9), jnp.asarray(KEY)
      ),
      "must have the manager's config",
    ),
    (lambda state: jaxkv.init(state.config, KEY + 1), "manager's secret"),
    (lambda state: jaxkv.new_epoch(state)[0], "must have epoch 0, got 1"),
    (lambda state: jaxkv.allocate(state, [-1] * 10)[0], "got BAD_LENGTH"),
  ],
)
def test_states_that_are_refused(cache, change, message):
  old_pages = cache.free_queue(), cache.get_page_ids("a")
  with pytest.raises((TypeError, ValueError), match=message):
    cache.take(change(cache.state))
  assert (cache.free_queue(), cache.get_page_ids("a")) == old_pages


def test_tokens_of_a_request_that_are_refused(cache):
  state = cache.state
  slot = int(np.flatnonzero(np.asarray(state.num_pages)[:, 0])[0])
  state, _ = jaxkv.allocate(state, [7], slots=[slot])
  state, _ = jaxkv.commit(state, [[*range(7)]], [7], slots=[slot])
  with pytest.raises(ValueError, match="'a' must have the 16 tokens"):
    cache.take(state)
  other_req = request("a", [*range(9), *range(50, 57)])
  with pytest.raises(ValueError, match="'a' must begin with the tokens"):
    cache.take(state, {slot: other_req})
  salted = request("a", [*range(9), *range(7)], cache_salt="other")
  with pytest.raises(ValueError, match="a request with the salt of slot"):
    cache.take(state, {slot: salted})
  with pytest.raises(
    ValueError, match=r"must name slots with pages, .* \[11\]"
  ):
    cache.take(state, {11: other_req})


def test_a_kind_that_needs_a_device_is_refused_by_name():
  class Mine(FullAttention):
    def num_skipped_tokens(self, num_tokens):
      return jnp.zeros_like(num_tokens)

  with pytest.raises(TypeError, match=r"`Mine.num_skipped_tokens` must return"):
    CacheManager(11, [Mine(page_size=4)], 64)


class TestItems:
  """The host masks tokens of images and embeddings, and a loop masks none."""

  @staticmethod
  def _begun(**items):
    cache = CacheManager(11, [FullAttention(page_size=8)], 64, key=KEY)
    req = request("a", range(6), **items)
    admit(cache, req)
    return cache, req

  @staticmethod
  def _take_longer(cache, req, tokens):
    """Takes a state to which a loop appended tokens."""
    count = [len(tokens)]
    state, _ = jaxkv.allocate(cache.state, count, slots=[0])
    state, _ = jaxkv.commit(state, [tokens], count, slots=[0])
    req.token_ids.extend(tokens)
    req.num_computed_tokens += len(tokens)
    assert cache.take(state) == []

  @pytest.mark.parametrize("tokens", [[7], [7, 8], [7, 8, 9, 10, 11, 12, 13]])
  @pytest.mark.parametrize(
    "items",
    [
      {"mm": [MultimodalItem("cat", 3, 2)]},
      {"prompt_embeds": np.ones((6, 2), np.float32)},
    ],
    ids=["image", "embeddings"],
  )
  def test_a_loop_appends_tokens_to_their_last_page(self, items, tokens):
    cache, req = self._begun(**items)
    self._take_longer(cache, req, tokens)
    # A second loop and the host continue.
    self._take_longer(cache, req, [20])
    assert decode(cache, req, [21, 22, 23, 24]) is not None
    jaxkv.check(cache.state)

  def test_a_loop_must_not_commit_an_image(self):
    cache, req = self._begun(mm=[MultimodalItem("cat", 5, 3)])
    with pytest.raises(ValueError, match="must begin with the tokens"):
      self._take_longer(cache, req, [7, 8])

  def test_the_first_tokens_of_a_page_are_masked(self):
    """A mask of one token is too short to tell images apart."""
    cache, req = self._begun(mm=[MultimodalItem("cat", 8, 1)])
    assert decode(cache, req, [6, 7, 8]) is not None
    with pytest.raises(ValueError, match="must begin with the tokens"):
      self._take_longer(cache, req, [9])
