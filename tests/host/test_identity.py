"""Requests with equal tokens that must not share pages, and those that may."""

import collections
import dataclasses
import functools
import hashlib
import types
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import FullAttention
from jaxkv.host import CacheManager
from jaxkv.host import MultimodalItem
from jaxkv.host import Request
from jaxkv.host.vllm import KVCacheManager
from tests.host.esurge import requests
from tests.host.scheduling import LONGEST
from tests.host.scheduling import admit
from tests.host.scheduling import decode
from tests.host.scheduling import request
from tests.host.scheduling import single
from tests.host.vllm import stand_ins

TOKENS = list(range(17))


@pytest.fixture
def cache():
  """One group, 10 pages of 4 tokens."""
  return single(CacheManager)


def of_vllm(**fields):
  """A request with the attributes of vLLM's, all that it reads besides."""
  defaults = {
    "request_id": "again",
    "all_token_ids": TOKENS,
    "num_computed_tokens": 0,
    "lora_request": None,
    "mm_features": [],
    "prompt_embeds": None,
    "cache_salt": None,
    "skip_reading_prefix_cache": False,
    "sampling_params": types.SimpleNamespace(prompt_logprobs=None),
  }
  return types.SimpleNamespace(**defaults | fields)


def adapter(name="a", path="/a", number=1):
  return types.SimpleNamespace(
    lora_name=name, lora_path=path, lora_int_id=number
  )


def feature(identifier, offset, length):
  place = types.SimpleNamespace(offset=offset, length=length)
  return types.SimpleNamespace(identifier=identifier, mm_position=place)


EMBEDS = np.random.default_rng(0).normal(size=(17, 3)).astype(np.float32)
OTHER_END = EMBEDS + np.eye(17, 3, -9, dtype=np.float32)
"""Other embeddings from position 9 on."""


def found(cache, first, second):
  """Tokens found of a request after another one ran and went."""
  first.request_id = "first"
  admit(cache, Admitted(first))
  cache.free(first)
  return cache.get_computed_pages(second)[1]


class Admitted:
  """Any request, with the length that `admit` asks for."""

  def __init__(self, inner):
    self.__dict__["inner"] = inner

  def __getattr__(self, name):
    if name == "num_tokens":
      return len(getattr(self.inner, "all_token_ids", None) or TOKENS)
    return getattr(self.inner, name)

  def __setattr__(self, name, value):
    setattr(self.inner, name, value)


@pytest.mark.parametrize(
  ("first", "second", "tokens"),
  [
    pytest.param({}, {}, 16, id="nothing"),
    pytest.param({"lora_request": adapter()}, {}, 0, id="an adapter"),
    pytest.param({}, {"lora_request": adapter()}, 0, id="an adapter later"),
    pytest.param(
      {"lora_request": adapter()},
      {"lora_request": adapter()},
      16,
      id="the same adapter",
    ),
    pytest.param(
      {"lora_request": adapter()},
      {"lora_request": adapter(path="/b")},
      0,
      id="an adapter of another path",
    ),
    pytest.param(
      {"lora_request": adapter("x")},
      {"cache_salt": "x"},
      0,
      id="an adapter named as a salt",
    ),
    pytest.param(
      {"mm_features": [feature("cat", 5, 3)]},
      {"mm_features": [feature("cat", 5, 3)]},
      16,
      id="the same image",
    ),
    pytest.param(
      {"mm_features": [feature("cat", 5, 3)]},
      {"mm_features": [feature("dog", 5, 3)]},
      4,
      id="another image in the second page",
    ),
    pytest.param(
      {"mm_features": [feature("cat", 7, 1)]},
      {"mm_features": [feature("dog", 7, 1)]},
      4,
      id="another image of one token",
    ),
    pytest.param(
      {"mm_features": [types.SimpleNamespace(mm_hash="cat")]},
      {"mm_features": [types.SimpleNamespace(mm_hash="dog")]},
      0,
      id="another image nobody knows where",
    ),
    pytest.param(
      {"mm_features": [types.SimpleNamespace(mm_hash="cat")]},
      {"mm_features": [types.SimpleNamespace(mm_hash="cat")]},
      16,
      id="the same image nobody knows where",
    ),
    pytest.param(
      {"prompt_embeds": EMBEDS}, {"prompt_embeds": EMBEDS}, 16, id="embeddings"
    ),
    pytest.param(
      {"prompt_embeds": EMBEDS},
      {"prompt_embeds": jnp.asarray(EMBEDS)},
      16,
      id="embeddings of jax",
    ),
    pytest.param(
      {"prompt_embeds": EMBEDS},
      {"prompt_embeds": OTHER_END},
      8,
      id="other embeddings from the third page on",
    ),
    pytest.param(
      {"prompt_embeds": EMBEDS}, {}, 0, id="embeddings in place of tokens"
    ),
    pytest.param({"cache_salt": b""}, {}, 0, id="an empty salt of bytes"),
    pytest.param({"cache_salt": "a"}, {"cache_salt": b"a"}, 0, id="its type"),
    pytest.param({"cache_salt": ""}, {}, 16, id="an empty salt as in vLLM"),
  ],
)
def test_told_apart(cache, first, second, tokens):
  assert found(cache, of_vllm(**first), of_vllm(**second)) == tokens


@pytest.mark.parametrize(
  "fields",
  [
    {"skip_reading_prefix_cache": True},
    {
      "skip_reading_prefix_cache": None,
      "sampling_params": types.SimpleNamespace(prompt_logprobs=0),
    },
  ],
)
def test_whose_prompt_is_computed_whole(cache, fields):
  """It finds nothing, and is found by others."""
  one = of_vllm(**fields)
  assert found(cache, of_vllm(), one) == 0
  assert found(cache, one, of_vllm()) == 16


@pytest.mark.parametrize(
  ("fields", "error", "message"),
  [
    ({"cache_salt": 0}, TypeError, "`cache_salt` of 'again' must be a str"),
    ({"cache_salt": False}, TypeError, "`cache_salt` of 'again' must be"),
    ({"lora_name": 1}, TypeError, "`lora_name` of 'again' must be a str"),
    ({"lora_request": "a"}, TypeError, "`lora_request` .* must have a lora"),
    ({"mm_features": ["cat"]}, TypeError, "must have an identifier or"),
    ({"mm": [(None, 0, 2)]}, TypeError, "`mm` of 'again' must have an ident"),
    ({"mm_features": [feature("cat", 3, -1)]}, ValueError, "`length` must be"),
    ({"mm_features": [feature("cat", 0.5, 1)]}, TypeError, "`offset` must be"),
    ({"pixel_values": EMBEDS}, ValueError, "`pixel_values` of 'again' must"),
    ({"prompt_embeds": [1.0, 2.0]}, TypeError, "`prompt_embeds` of 'again'"),
  ],
)
def test_what_cannot_be_read_is_named(cache, fields, error, message):
  one = of_vllm(**fields)
  with pytest.raises(error, match=message):
    cache.get_computed_pages(one)
  with pytest.raises(error, match=message):
    cache.allocate_slots(one, 9)
  assert cache.num_free_pages == 10


Named = collections.namedtuple(
  "Named", "request_id token_ids num_computed_tokens"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
  request_id: str
  token_ids: list
  num_computed_tokens: int = 0


@pytest.mark.parametrize(
  "one", [Named("a", TOKENS, 0), Frozen("a", TOKENS)], ids=["tuple", "slots"]
)
def test_requests_that_take_no_attribute(cache, one):
  pages, tokens = cache.get_computed_pages(one)
  assert cache.allocate_slots(one, 17, tokens, pages) is not None
  cache.free(one)
  assert cache.get_computed_pages(one)[1] == 16


def test_tokens_that_changed_after_the_lookup(cache):
  """Other tokens than were hashed are hashed again."""
  admit(cache, request("a", TOKENS))
  one = Request("b", list(TOKENS))
  pages, tokens = cache.get_computed_pages(one)
  one.token_ids[:] = [99, *TOKENS[1:]]
  with pytest.raises(ValueError, match="must hold the tokens"):
    cache.allocate_slots(one, 1, tokens, pages)
  empty = cache.create_empty_page_list()
  changed = dataclasses.replace(empty, lookup=pages.lookup)
  assert cache.allocate_slots(one, 17, 0, changed) is not None
  cache.free(one)
  assert cache.get_computed_pages(one)[1] == 16
  jaxkv.check(cache.state)


def test_pages_that_were_taken_after_the_lookup(cache):
  """Another request writes them now, though no page has a new key yet."""
  first = request("first", TOKENS)
  admit(cache, first)
  cache.free(first)
  again = request("again", TOKENS)
  pages, tokens = cache.get_computed_pages(again)
  assert tokens == 16
  # Its tokens fill no page, but it has room in all of them.
  other = request("other", [99])
  assert cache.allocate_slots(other, 1, num_lookahead_tokens=39) is not None
  with pytest.raises(ValueError, match="must hold the tokens"):
    cache.allocate_slots(again, 0, tokens, pages)
  assert cache.get_page_ids("again") == ([],)
  jaxkv.check(cache.state)


def test_pages_that_were_evicted_after_the_lookup(cache):
  admit(cache, request("first", TOKENS))
  again = request("again", TOKENS)
  pages, tokens = cache.get_computed_pages(again)
  cache.evict_pages(pages.get_page_ids()[0][-1:])
  with pytest.raises(ValueError, match="must hold the tokens"):
    cache.allocate_slots(again, 1, tokens, pages)


def test_every_row_of_a_page_tells_it_apart(cache):
  """Embeddings that differ in one row share the pages before it."""
  admit(cache, request("first", TOKENS, prompt_embeds=EMBEDS))
  for row in range(len(TOKENS)):
    other = EMBEDS.copy()
    other[row, -1] += 1
    again = request("again", TOKENS, prompt_embeds=other)
    assert cache.get_computed_pages(again)[1] == min(row // 4 * 4, 16)


def test_events_have_the_tokens_of_requests():
  """Not what stands for them where an image touches a page."""
  cache = single(CacheManager, num_events=16)
  one = request("a", TOKENS[:9], mm=[MultimodalItem("cat", 3, 2)])
  admit(cache, one)
  decode(cache, one, [7, 7, 7])
  told = [event.tokens for event in cache.take_events().events]
  assert told == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 7, 7, 7)]


KEY = jaxkv.salt("the same for each manager")


def small_pages(scheduler, size):
  """A manager of pages of so many tokens, for a kind of scheduler."""
  if scheduler == "host":
    return CacheManager(11, [FullAttention(page_size=size)], LONGEST, key=KEY)
  if scheduler == "esurge":
    return requests.manager(requests.full(page_size=size), key=KEY)
  spec = stand_ins.FullAttentionSpec(size)
  config = stand_ins.Config(11, [stand_ins.Group(spec)])
  # It takes no key, as vLLM's manager does not.
  secret = np.asarray(KEY).tobytes()
  with mock.patch("os.urandom", lambda _: secret):
    return KVCacheManager(config, LONGEST, size, size)


def image_request(scheduler, identifier, name, tokens):
  """A request whose second token stands for an image."""
  place = requests.Place(1, 1)
  if scheduler == "host":
    return Request(name, tokens, mm=[MultimodalItem(identifier, 1, 1)])
  if scheduler == "vllm":
    item = types.SimpleNamespace(identifier=identifier, mm_position=place)
    # Hits do not depend on the hashes, which name blocks of one token.
    hashes = [bytes([number]) for number in range(len(tokens))]
    return stand_ins.Request(name, tokens, hashes, mm_features=[item])
  item = requests.Feature(identifier, place)
  return requests.EngineRequest(name, tokens, mm_features=[item])


@functools.cache
def images_of_one_mask():
  """Two images with the same 32 bits that mask a placeholder.

  Of some 100,000 identifiers, two have the same by chance. A manager that
  masks tokens differently must tell them apart as well.
  """
  secret = np.asarray(small_pages("host", 1).state.secret).tobytes()
  seen = {}
  while True:
    identifier = f"image {len(seen)}"
    key = repr([("mm", identifier, 0, 1)]).encode()
    bits = hashlib.shake_256(secret + key).digest(4)
    if bits in seen:
      return seen[bits], identifier
    seen[bits] = identifier


def publish(scheduler, cache, one):
  """Admits a request as its scheduler does; then others may find it."""
  admits = {"host": admit, "vllm": stand_ins.admit, "esurge": requests.admit}
  assert admits[scheduler](cache, one) is not None


def tokens_found(scheduler, cache, one):
  if scheduler == "vllm":
    return cache.get_computed_blocks(one)[1]
  return cache.get_computed_pages(one)[1]


@pytest.mark.parametrize("scheduler", ["host", "vllm", "esurge"])
def test_images_whose_masks_are_equal(scheduler):
  """With 32 bits a page, the second was taken for the first."""
  cache = small_pages(scheduler, 1)
  one, other = images_of_one_mask()
  tokens = [5, 9, 6, 7]
  publish(scheduler, cache, image_request(scheduler, one, "a", tokens))
  again = image_request(scheduler, one, "b", tokens)
  assert tokens_found(scheduler, cache, again) == 3
  collides = image_request(scheduler, other, "c", tokens)
  assert tokens_found(scheduler, cache, collides) <= 1


@pytest.mark.parametrize("size", [1, 3])
def test_content_of_small_pages(size):
  """Requests with equal items share all pages, others are no hit of them all.

  They differ in an image, in the last row of embeddings that a page has, in
  the adapter or in the salt.
  """
  cache = small_pages("host", size)
  tokens = list(range(10))
  rows = np.arange(20, dtype=np.float32).reshape(10, 2)
  cat, dog = MultimodalItem("cat", 2, 2), MultimodalItem("dog", 6, 1)
  variants = [
    {},
    {"mm": [cat]},
    {"mm": [cat, dog]},
    {"mm": [cat, dog._replace(identifier="fox")]},
    {"mm": [cat, dog], "cache_salt": "a"},
    {"mm": [cat, dog], "lora_name": "a"},
    {"prompt_embeds": rows},
    {"prompt_embeds": rows + np.eye(10, 2, -8, dtype=np.float32)},
  ]
  for number, fields in enumerate(variants):
    first = request("first", tokens, **fields)
    admit(cache, first)
    cache.free(first)
    for other, others in enumerate(variants):
      found = cache.get_computed_pages(request("again", tokens, **others))[1]
      assert (found == 9) == (other == number), (fields, others)
    assert cache.reset_prefix_cache()


@pytest.mark.parametrize("count", [True, False, np.bool_(True), 1.0, "1"])
def test_counts_are_ints(cache, count):
  """A flag at the place of a count came from another system's order."""
  one = request("a", TOKENS)
  with pytest.raises(TypeError, match="must be an int"):
    cache.allocate_slots(one, 17, 0, None, count)
  with pytest.raises(TypeError, match="must be an int"):
    cache.allocate_slots(one, 17, num_external_computed_tokens=count)


def test_what_differs_in_order_has_a_name(cache):
  """ESurge's sixth argument and vLLM's tenth."""
  with pytest.raises(TypeError, match="positional"):
    cache.allocate_slots(request("a", TOKENS), 17, 0, None, 0, True)
  assert cache.num_free_pages == 10
