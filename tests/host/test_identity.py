"""Requests with equal tokens that must not share pages, and those that may."""

import collections
import dataclasses
import functools
import hashlib
import types

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import FullAttention
from jaxkv.host import CacheManager
from jaxkv.host import MultimodalItem
from jaxkv.host import Request
from tests.host.scheduling import LONGEST
from tests.host.scheduling import admit
from tests.host.scheduling import decode
from tests.host.scheduling import request
from tests.host.scheduling import single

TOKENS = list(range(17))


@pytest.fixture
def cache():
  """One group, 10 pages of 4 tokens."""
  return single(CacheManager)


def of_vllm(**fields):
  """A request with all attributes of vLLM's that a manager reads."""
  defaults = {
    "request_id": "again",
    "all_token_ids": TOKENS,
    "num_tokens": len(TOKENS),
    "num_computed_tokens": 0,
    "lora_request": None,
    "mm_features": [],
    "prompt_embeds": None,
    "cache_salt": None,
    "skip_reading_prefix_cache": False,
    "sampling_params": types.SimpleNamespace(prompt_logprobs=None),
  }
  return types.SimpleNamespace(**defaults | fields)


def adapter(name="a", path="/a", lora_id=1):
  return types.SimpleNamespace(
    lora_name=name, lora_path=path, lora_int_id=lora_id
  )


def feature(identifier, offset, length):
  position = types.SimpleNamespace(offset=offset, length=length)
  return types.SimpleNamespace(identifier=identifier, mm_position=position)


EMBEDS = np.random.default_rng(0).normal(size=(17, 3)).astype(np.float32)
OTHER_END = EMBEDS + np.eye(17, 3, -9, dtype=np.float32)
"""Other embeddings from position 9 on."""


def num_hit_tokens(cache, first_req, second_req):
  """Tokens of the second request that it finds after the first one ended."""
  first_req.request_id = "first"
  admit(cache, first_req)
  cache.free(first_req)
  return cache.get_computed_pages(second_req)[1]


ADAPTER = {"lora_request": adapter()}
CAT = {"mm_features": [feature("cat", 5, 3)]}
CAT_SOMEWHERE = {"mm_features": [types.SimpleNamespace(mm_hash="cat")]}
DOG_SOMEWHERE = {"mm_features": [types.SimpleNamespace(mm_hash="dog")]}
EMBEDDED = {"prompt_embeds": EMBEDS}


@pytest.mark.parametrize(
  ("first_fields", "second_fields", "tokens"),
  [
    pytest.param({}, {}, 16, id="nothing"),
    pytest.param(ADAPTER, {}, 0, id="an adapter"),
    pytest.param({}, ADAPTER, 0, id="an adapter later"),
    pytest.param(ADAPTER, ADAPTER, 16, id="the same adapter"),
    pytest.param(
      ADAPTER,
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
    pytest.param(CAT, CAT, 16, id="the same image"),
    pytest.param(
      CAT,
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
      CAT_SOMEWHERE, DOG_SOMEWHERE, 0, id="another image of unknown position"
    ),
    pytest.param(
      CAT_SOMEWHERE, CAT_SOMEWHERE, 16, id="the same image of unknown position"
    ),
    pytest.param(EMBEDDED, EMBEDDED, 16, id="embeddings"),
    pytest.param(
      EMBEDDED,
      {"prompt_embeds": jnp.asarray(EMBEDS)},
      16,
      id="embeddings of jax",
    ),
    pytest.param(
      EMBEDDED,
      {"prompt_embeds": OTHER_END},
      8,
      id="other embeddings from the third page on",
    ),
    pytest.param(EMBEDDED, {}, 0, id="embeddings in place of tokens"),
    pytest.param({"cache_salt": b""}, {}, 0, id="an empty salt of bytes"),
    pytest.param({"cache_salt": "a"}, {"cache_salt": b"a"}, 0, id="its type"),
    pytest.param({"cache_salt": ""}, {}, 16, id="an empty salt as in vLLM"),
  ],
)
def test_hits_end_before_other_contents(
  cache, first_fields, second_fields, tokens
):
  first_req = of_vllm(**first_fields)
  assert num_hit_tokens(cache, first_req, of_vllm(**second_fields)) == tokens


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
def test_requests_that_skip_the_cache_are_found_by_others(cache, fields):
  req = of_vllm(**fields)
  assert num_hit_tokens(cache, of_vllm(), req) == 0
  assert num_hit_tokens(cache, req, of_vllm()) == 16


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
def test_unreadable_fields_are_named(cache, fields, error, message):
  req = of_vllm(**fields)
  with pytest.raises(error, match=message):
    cache.get_computed_pages(req)
  with pytest.raises(error, match=message):
    cache.allocate_slots(req, 9)
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
  "req", [Named("a", TOKENS, 0), Frozen("a", TOKENS)], ids=["tuple", "slots"]
)
def test_requests_that_take_no_attribute(cache, req):
  pages, tokens = cache.get_computed_pages(req)
  assert cache.allocate_slots(req, 17, tokens, pages) is not None
  cache.free(req)
  assert cache.get_computed_pages(req)[1] == 16


def test_tokens_changed_after_the_lookup_are_hashed_again(cache):
  admit(cache, request("a", TOKENS))
  req = Request("b", list(TOKENS))
  pages, tokens = cache.get_computed_pages(req)
  req.token_ids[:] = [99, *TOKENS[1:]]
  with pytest.raises(ValueError, match="must hold the tokens"):
    cache.allocate_slots(req, 1, tokens, pages)
  empty = cache.create_empty_page_list()
  changed = dataclasses.replace(empty, lookup=pages.lookup)
  assert cache.allocate_slots(req, 17, 0, changed) is not None
  cache.free(req)
  assert cache.get_computed_pages(req)[1] == 16
  jaxkv.check(cache.state)


def test_hits_reused_after_the_lookup_are_refused(cache):
  """Another request writes them now, though no page has a new key yet."""
  first_req = request("first", TOKENS)
  admit(cache, first_req)
  cache.free(first_req)
  repeat = request("again", TOKENS)
  pages, tokens = cache.get_computed_pages(repeat)
  assert tokens == 16
  # Its tokens fill no page, but it has room in all of them.
  other_req = request("other", [99])
  assert cache.allocate_slots(other_req, 1, num_lookahead_tokens=39) is not None
  with pytest.raises(ValueError, match="must hold the tokens"):
    cache.allocate_slots(repeat, 0, tokens, pages)
  assert cache.get_page_ids("again") == ([],)
  jaxkv.check(cache.state)


def test_hits_evicted_after_the_lookup_are_refused(cache):
  admit(cache, request("first", TOKENS))
  repeat = request("again", TOKENS)
  pages, tokens = cache.get_computed_pages(repeat)
  cache.evict_pages(pages.get_page_ids()[0][-1:])
  with pytest.raises(ValueError, match="must hold the tokens"):
    cache.allocate_slots(repeat, 1, tokens, pages)


def test_embeddings_that_differ_in_one_row_are_told_apart(cache):
  """Embeddings that differ in one row share the pages before it."""
  admit(cache, request("first", TOKENS, prompt_embeds=EMBEDS))
  for row in range(len(TOKENS)):
    embeds = EMBEDS.copy()
    embeds[row, -1] += 1
    repeat = request("again", TOKENS, prompt_embeds=embeds)
    assert cache.get_computed_pages(repeat)[1] == min(row // 4 * 4, 16)


def test_events_have_the_tokens_of_requests():
  cache = single(CacheManager, num_events=16)
  req = request("a", TOKENS[:9], mm=[MultimodalItem("cat", 3, 2)])
  admit(cache, req)
  decode(cache, req, [7, 7, 7])
  event_tokens = [event.tokens for event in cache.take_events().events]
  assert event_tokens == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 7, 7, 7)]


KEY = jaxkv.salt("the same for each manager")


def small_pages(page_size):
  """A manager of pages of `page_size` tokens."""
  return CacheManager(
    11, [FullAttention(page_size=page_size)], LONGEST, key=KEY
  )


@functools.cache
def images_of_one_mask():
  """Two images with the same 32 bits that mask a placeholder.

  Of some 100,000 identifiers, two have the same by chance. A manager that
  masks tokens differently must tell them apart as well.
  """
  secret = np.asarray(small_pages(1).state.secret).tobytes()
  identifiers = {}
  while True:
    identifier = f"image {len(identifiers)}"
    key = repr([("mm", identifier, 0, 1)]).encode()
    bits = hashlib.shake_256(secret + key).digest(4)
    if bits in identifiers:
      return identifiers[bits], identifier
    identifiers[bits] = identifier


def test_images_with_equal_masks_are_told_apart():
  """With 32 bits a page, the second was taken for the first."""
  cache = small_pages(1)
  image_a, image_b = images_of_one_mask()
  tokens = [5, 9, 6, 7]
  for name in (image_a, image_b):
    req = request(name, tokens, mm=[MultimodalItem(name, 1, 1)])
    assert cache.get_computed_pages(req)[1] <= 1
    admit(cache, req)
    assert cache.get_computed_pages(request("x", tokens, mm=req.mm))[1] == 3


@pytest.mark.parametrize("page_size", [1, 3])
def test_content_of_small_pages(page_size):
  """Requests with equal items share all pages, other requests fewer.

  They differ in an image, in the last row of embeddings that a page has, in
  the adapter or in the salt.
  """
  cache = small_pages(page_size)
  tokens = list(range(10))
  rows = np.arange(20, dtype=np.float32).reshape(10, 2)
  cat = MultimodalItem("cat", 2, 2)
  dog = MultimodalItem("dog", 6, 1)
  variants = [
    {},
    {"mm": [cat]},
    {"mm": [cat, dog]},
    {"mm": [cat, dog._replace(identifier="fox")]},
    {"mm": [cat, dog], "cache_salt": "a"},
    {"mm": [cat, dog], "lora_name": "a"},
    {"cache_salt": "a"},
    {"lora_name": "a"},
    {"cache_salt": "a", "lora_name": "b"},
    {"cache_salt": "b", "lora_name": "a"},
    {"prompt_embeds": rows},
    {"prompt_embeds": rows + np.eye(10, 2, -8, dtype=np.float32)},
  ]
  for index, fields in enumerate(variants):
    req = request("first", tokens, **fields)
    admit(cache, req)
    cache.free(req)
    for other_index, other_fields in enumerate(variants):
      req = request("again", tokens, **other_fields)
      num_hit = cache.get_computed_pages(req)[1]
      assert (num_hit == 9) == (other_index == index), (fields, other_fields)
    assert cache.reset_prefix_cache()


def test_arguments_of_another_order_are_keyword_only(cache):
  """ESurge's sixth argument and vLLM's tenth."""
  with pytest.raises(TypeError, match="positional"):
    cache.allocate_slots(request("a", TOKENS), 17, 0, None, 0, True)
  assert cache.num_free_pages == 10
