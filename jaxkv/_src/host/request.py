"""Requests: the attributes that a cache manager reads."""

import array
import dataclasses
import hashlib
import struct
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np

from jaxkv._src.cache.prefix.hashing import KEY_WORDS
from jaxkv._src.host.identity import Item
from jaxkv._src.host.identity import identity_of


class MultimodalItem(NamedTuple):
  """An image or similar input, for which placeholder tokens stand.

  Attributes:
    identifier: a name of its contents, such as a hash.
    offset: the position of its first placeholder in the sequence.
    length: the number of its placeholders.
  """

  identifier: str
  offset: int
  length: int


@dataclasses.dataclass
class Request:
  """A sequence, as its scheduler sees it.

  Managers take any object with `request_id`, `token_ids` (or `all_token_ids`)
  and `num_computed_tokens`, and write to none. Other attributes that an object
  lacks have the defaults given here, except that an object without a `status`
  is running as soon as it has computed tokens.

  Requests of vLLM and eSurge are told apart by what tells them apart there:
  `lora_request` (its `lora_name`, `lora_path` and `lora_int_id`), `mm_features`
  (each with an `identifier` or `mm_hash`, and a range `mm_position` or
  `placeholder_range`, without which it tells the whole request apart) and
  `prompt_embeds`. With `skip_reading_prefix_cache`, or else
  `sampling_params.prompt_logprobs`, no prefix is looked up.

  Attributes:
    request_id: its name.
    token_ids: prompt and output.
    num_prompt_tokens: length of the prompt; None if all tokens are prompt at
      first.
    num_computed_tokens: tokens whose K/V is computed, as the scheduler counts.
    num_in_flight_tokens: computed tokens of a step that has not ended. Pages
      that this step reads are not given back yet.
    status: "waiting", "running" or "preempted".
    cache_salt: a str or bytes; requests with different salts share no page. ""
      is none, as in vLLM.
    lora_name: requests with different adapters share no page.
    mm: items whose placeholders stand among the tokens.
    prompt_embeds: array [P, D] of the embeddings that stand for the first P
      tokens; pages with different ones are different.
    prompt_logprobs: whether the whole prompt must be computed, so that no
      prefix of it is looked up. It is still cached for others.
    shared_prefix_boundary: tokens of it that some groups had cached when not
      all had; 0 for what the lookup found.
  """

  request_id: str
  token_ids: list[int]
  num_prompt_tokens: int | None = None
  num_computed_tokens: int = 0
  num_in_flight_tokens: int = 0
  status: str = "waiting"
  cache_salt: str | bytes | None = None
  lora_name: str | None = None
  mm: Sequence[MultimodalItem] = ()
  prompt_embeds: Any = None
  prompt_logprobs: bool = False
  shared_prefix_boundary: int = 0

  def __post_init__(self):
    if self.num_prompt_tokens is None:
      self.num_prompt_tokens = len(self.token_ids)

  @property
  def num_tokens(self) -> int:
    """The number of tokens, prompt and output."""
    return len(self.token_ids)


class KnownRequest(NamedTuple):
  """What a call knows of a request, read once.

  Attributes:
    request_id, num_computed_tokens, num_in_flight_tokens,
      shared_prefix_boundary: as in `Request`.
    token_ids: the sequence, not copied.
    num_tokens: its length.
    num_prompt_tokens: length of the prompt.
    status: in lower case, also that of a member of an enum.
    salt: 16 bytes; requests with different ones share no page.
    items: what stands at its tokens besides them, see `content`.
    skips_lookup: whether no prefix is looked up.
  """

  request_id: str
  token_ids: Sequence[int]
  num_tokens: int
  num_prompt_tokens: int
  num_computed_tokens: int
  num_in_flight_tokens: int
  status: str
  salt: bytes
  items: tuple[Item, ...]
  skips_lookup: bool
  shared_prefix_boundary: int


def read_request(request: Any) -> KnownRequest:
  """Reads any object with the attributes of `Request`.

  Besides them, as vLLM and eSurge have them, what `identity_of` reads, and
  `skip_reading_prefix_cache` or else `sampling_params.prompt_logprobs`.

  Raises:
    AttributeError: it lacks one of the three attributes.
    TypeError, ValueError: as `identity_of`.
  """
  tokens = tokens_of(request)
  salt, items = identity_of(request)
  computed = request.num_computed_tokens
  prompt_length = getattr(request, "num_prompt_tokens", None)
  return KnownRequest(
    request_id=request.request_id,
    token_ids=tokens,
    num_tokens=len(tokens),
    num_prompt_tokens=len(tokens) if prompt_length is None else prompt_length,
    num_computed_tokens=computed,
    num_in_flight_tokens=getattr(request, "num_in_flight_tokens", 0),
    status=_status_of(request, computed),
    salt=salt,
    items=items,
    skips_lookup=_skips_lookup(request),
    shared_prefix_boundary=getattr(request, "shared_prefix_boundary", 0),
  )


def tokens_of(request: Any) -> Sequence[int]:
  """The sequence of a request."""
  try:
    return request.token_ids
  except AttributeError:
    return request.all_token_ids


def tokens_of_all(running: Sequence[Any]) -> list[Sequence[int]]:
  """The sequence of each request, in one pass: a step has many."""
  try:
    return [request.token_ids for request in running]
  except AttributeError:
    return [tokens_of(request) for request in running]


def first_tokens(request: KnownRequest, count: int) -> list[int]:
  """A copy of a request's first tokens."""
  tokens = request.token_ids[:count]
  return tokens if isinstance(tokens, list) else list(tokens)


def _status_of(request: Any, computed: int) -> str:
  status = getattr(request, "status", None)
  if status is None:
    return "running" if computed else "waiting"
  return str(getattr(status, "name", status)).lower()


def _skips_lookup(request: Any) -> bool:
  skips = getattr(request, "skip_reading_prefix_cache", None)
  if skips is not None:
    return bool(skips)
  if getattr(request, "prompt_logprobs", None):
    return True
  sampling = getattr(request, "sampling_params", None)
  return getattr(sampling, "prompt_logprobs", None) is not None


def salt_of(request: KnownRequest, size: int) -> bytes:
  """Returns the salt of a request's page keys, 16 bytes.

  A mask has 32 bits for each token of a page: fewer than 128 in a page of less
  than 4 tokens. There the salt covers all items, so two requests share pages
  only if their items are all equal.

  Args:
    request: the request.
    size: tokens a page.
  """
  if not request.items or size >= KEY_WORDS:
    return request.salt
  keys = [item.key(0, item.stop) for item in request.items]
  digest = hashlib.blake2b(digest_size=16, person=b"jaxkv-items")
  digest.update(request.salt + repr(keys).encode())
  return digest.digest()


def content(
  request: KnownRequest, start: int, stop: int, size: int, secret: bytes
) -> np.ndarray:
  """int32[stop - start]: the contents that the request's tokens stand for.

  In a page that an item touches, its tokens are masked by a hash of the secret
  and of all items there, so pages with different items are different contents,
  with `32 * size` bits between them. See `salt_of` for small pages.

  Args:
    request: the request.
    start: its first token asked for.
    stop: one past the last.
    size: tokens a page.
    secret: of the cache.
  """
  try:
    held = int32s(request.token_ids[start:stop])
  except (OverflowError, TypeError) as error:
    raise ValueError(
      f"`token_ids` of {request.request_id!r} must be 32-bit integers, got "
      f"others from {start} to {stop}: {error}."
    ) from error
  for page in touched_pages(request, start, stop, size):
    begin = page * size
    first, last = max(begin, start), min(begin + size, stop)
    mask = page_mask(request, page, size, secret)
    held[first - start : last - start] ^= mask[first - begin : last - begin]
  return held


def touched_pages(
  request: KnownRequest, start: int, stop: int, size: int
) -> list[int]:
  """Pages among the tokens `start .. stop` that an item touches."""
  pages: set[int] = set()
  for item in request.items:
    first = max(item.start // size, start // size)
    last = min(-(-item.stop // size), -(-stop // size))
    pages.update(range(first, last))
  return sorted(pages)


def page_mask(
  request: KnownRequest, page: int, size: int, secret: bytes
) -> np.ndarray:
  """int32[size]: the mask of a page that an item touches."""
  begin, end = page * size, (page + 1) * size
  keys = [
    item.key(begin, end)
    for item in request.items
    if item.start < end and item.stop > begin
  ]
  stream = hashlib.shake_256(secret + repr(keys).encode()).digest(4 * size)
  return np.frombuffer(stream, "<i4")


def int32s(values: Sequence[int]) -> np.ndarray:
  """int32[len(values)], without rounding or wrapping.

  Twice as fast as numpy, which would cast floats and strings of digits.

  Raises:
    TypeError: a value is not an integer.
    OverflowError: a value does not fit.
  """
  if not isinstance(values, list):
    # Each element of an array of another library would be an array.
    values = getattr(values, "tolist", lambda: list(values))()
  out = np.empty((len(values),), np.int32)
  try:
    struct.pack_into(f"{len(values)}i", out.data, 0, *values)
  except struct.error:
    return np.asarray(array.array("i", values))  # Tells the two errors apart.
  return out
