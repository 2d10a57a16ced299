"""Requests: the attributes that a cache manager reads."""

import array
import dataclasses
import struct
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.host.identity import Item
from jaxkv._src.host.identity import identity_of
from jaxkv._src.host.identity import mask_items


class MultimodalItem(NamedTuple):
  """An image or similar input, which placeholder tokens represent.

  Attributes:
    identifier: a name of the contents, such as a hash.
    offset: the position of the first placeholder in the sequence.
    length: the number of placeholders.
  """

  identifier: str
  offset: int
  length: int


@dataclasses.dataclass
class Request:
  """A sequence, as its scheduler describes it.

  A manager takes any object with `request_id`, `token_ids` (or `all_token_ids`)
  and `num_computed_tokens`, and never writes to it. Missing attributes have the
  defaults below, except that an object without `status` is running once it has
  computed tokens.

  Requests of vLLM and eSurge have further attributes. Requests that differ in
  `lora_request` (its `lora_name`, `lora_path` or `lora_int_id`) share no page.
  An item of `mm_features` has an `identifier` or `mm_hash`. Its range of tokens
  is `mm_position` or `placeholder_range`. A page that overlaps this range is
  shared only if the other request has the same item there. If an item has no
  range, no page is shared with requests that lack the item. The lookup is
  skipped if `skip_reading_prefix_cache` is true. Without this attribute, it is
  skipped if `sampling_params.prompt_logprobs` is not None.

  Attributes:
    request_id: the request's name.
    token_ids: the tokens of prompt and output.
    num_prompt_tokens: tokens of the prompt; None for all initial tokens.
    num_computed_tokens: tokens with computed K/V, as the scheduler counts.
    num_in_flight_tokens: the number of these tokens whose steps still run. They
      are the last ones. Pages that these steps need are not freed.
    status: "waiting", "running" or "preempted".
    cache_salt: a str or bytes; requests with different salts share no page. ""
      and None are the same, as in vLLM.
    lora_name: the adapter; requests with different adapters share no page.
    mm: images and similar inputs with placeholders among the tokens.
    prompt_embeds: embeddings that replace the first tokens, a row for each;
      pages with different embeddings are not shared.
    prompt_logprobs: True to compute the whole prompt without a lookup. Its
      pages are still cached for other requests.
    shared_prefix_boundary: the length of a prefix that some groups, but not
      all, had cached at the lookup; 0 to use the length that the lookup found.
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
    # A manager checks the counts that change while a request runs.
    as_count("num_prompt_tokens", self.num_prompt_tokens, 0)
    as_count("shared_prefix_boundary", self.shared_prefix_boundary, 0)

  @property
  def num_tokens(self) -> int:
    """The number of prompt and output tokens."""
    return len(self.token_ids)


class RequestFields(NamedTuple):
  """The attributes of a request, read once for a call; see `Request`."""

  request_id: str
  token_ids: Sequence[int]  # not copied
  num_tokens: int
  num_prompt_tokens: int
  num_computed_tokens: int
  num_in_flight_tokens: int
  status: str  # in lower case, also for an enum member
  salt: bytes  # 16 bytes; requests with different salts share no page
  items: tuple[Item, ...]  # images and embeddings at ranges of tokens
  skips_lookup: bool
  shared_prefix_boundary: int
  # A device loop has appended the tokens after these, and has masked none.
  num_host_tokens: int | None = None


def read_request(request: Any) -> RequestFields:
  """Reads any object with the three required attributes of `Request`.

  Raises TypeError or ValueError unless counts are integers of at least 0.
  """
  tokens = tokens_of(request)
  salt, items = identity_of(request)
  computed = request.num_computed_tokens
  prompt_length = getattr(request, "num_prompt_tokens", None)
  if prompt_length is None:
    prompt_length = len(tokens)
  # Most numbers are valid, and this test avoids a function call for them.
  elif prompt_length.__class__ is not int or not 0 <= prompt_length < 2**31:
    prompt_length = as_count("num_prompt_tokens", prompt_length, 0)
  boundary = getattr(request, "shared_prefix_boundary", 0)
  if boundary.__class__ is not int or not 0 <= boundary < 2**31:
    boundary = as_count("shared_prefix_boundary", boundary, 0)
  return RequestFields(
    request_id=request.request_id,
    token_ids=tokens,
    num_tokens=len(tokens),
    num_prompt_tokens=prompt_length,
    num_computed_tokens=computed,
    num_in_flight_tokens=getattr(request, "num_in_flight_tokens", 0),
    status=_status_of(request, computed),
    salt=salt,
    items=items,
    skips_lookup=_skips_lookup(request),
    shared_prefix_boundary=boundary,
  )


def tokens_of(request: Any) -> Sequence[int]:
  """Returns the tokens of a request's prompt and output."""
  # Requests of eSurge and vLLM have `all_token_ids`. For them, `getattr` with a
  # default is faster than an AttributeError.
  tokens = getattr(request, "token_ids", None)
  return request.all_token_ids if tokens is None else tokens


def first_tokens(request: RequestFields, count: int) -> list[int]:
  """Returns a copy of a request's first tokens."""
  tokens = request.token_ids[:count]
  return tokens if isinstance(tokens, list) else list(tokens)


def _status_of(request: Any, computed: int) -> str:
  status = getattr(request, "status", None)
  if status is None:
    return "running" if computed else "waiting"
  # A member of an enum has a name, and a str has none.
  return str(getattr(status, "name", status)).lower()


def _skips_lookup(request: Any) -> bool:
  # vLLM derives this attribute from `sampling_params`, so it is read first.
  skips = getattr(request, "skip_reading_prefix_cache", None)
  if skips is not None:
    return bool(skips)
  # In `sampling_params`, 0 requests log-probs too: those of the prompt's tokens
  # without alternatives. Only None requests none.
  sampling = getattr(request, "sampling_params", None)
  return (
    bool(getattr(request, "prompt_logprobs", None))
    or getattr(sampling, "prompt_logprobs", None) is not None
  )


def content(
  request: RequestFields, start: int, stop: int, size: int, secret: bytes
) -> bytes:
  """Returns the tokens from `start` to `stop` as int32 bytes.

  Tokens of pages that overlap an item are masked; see `mask_items`.
  """
  try:
    tokens = int32s(request.token_ids[start:stop])
  except (OverflowError, TypeError) as error:
    raise ValueError(
      f"`token_ids` of {request.request_id!r} must be 32-bit integers, got "
      f"another value at a position from {start} to {stop - 1}: {error}."
    ) from error
  if not request.items:
    return tokens
  return mask_items(
    tokens, request.items, start, size, secret, request.num_host_tokens
  )


def int32s(values: Sequence[int]) -> bytes:
  """Converts integers to int32 bytes without rounding or wrapping.

  Raises TypeError for other values, and OverflowError for larger ones.
  """
  if not isinstance(values, list):
    # `list` of a jax or torch array gives arrays, and `tolist` gives ints.
    values = getattr(values, "tolist", lambda: list(values))()
  # `struct` is twice as fast as numpy, which would also cast floats and strings
  # of digits.
  try:
    return struct.pack(f"{len(values)}i", *values)
  except struct.error:
    # `array` raises TypeError for a wrong type and OverflowError for a value
    # out of range. `struct.error` does not distinguish them.
    return array.array("i", values).tobytes()
