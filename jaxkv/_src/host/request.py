"""Requests, and the attributes that a cache manager reads."""

import array
import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np


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

  Managers take any object with `request_id`, `token_ids` and
  `num_computed_tokens`. Other attributes that an object lacks have the defaults
  given here, except that an object without a `status` is running as soon as it
  has computed tokens.

  Attributes:
    request_id: its name.
    token_ids: prompt and output.
    num_prompt_tokens: length of the prompt; None if all tokens are prompt at
      first.
    num_computed_tokens: tokens whose K/V is computed, as the scheduler counts.
    num_in_flight_tokens: computed tokens of a step that has not ended. Pages
      that this step reads are not given back yet.
    status: "waiting", "running" or "preempted".
    cache_salt: requests with different salts share no page.
    lora_name: requests with different adapters share no page.
    mm: items whose placeholders stand among the tokens.
    prompt_logprobs: whether the whole prompt must be computed, so that no
      prefix of it is looked up. It is still cached for others.
    shared_prefix_boundary: tokens of it that some groups had cached when not
      all had; set by the last lookup.
  """

  request_id: str
  token_ids: list[int]
  num_prompt_tokens: int | None = None
  num_computed_tokens: int = 0
  num_in_flight_tokens: int = 0
  status: str = "waiting"
  cache_salt: str | None = None
  lora_name: str | None = None
  mm: Sequence[MultimodalItem] = ()
  prompt_logprobs: bool = False
  shared_prefix_boundary: int = 0

  def __post_init__(self):
    if self.num_prompt_tokens is None:
      self.num_prompt_tokens = len(self.token_ids)

  @property
  def num_tokens(self) -> int:
    """The number of tokens, prompt and output."""
    return len(self.token_ids)


_NAMES = [field.name for field in dataclasses.fields(Request)]


def read_request(request: Any) -> Request:
  """A copy of any object with the attributes of `Request`, read once.

  The copy's status is in lower case, also that of a member of an enum.
  """
  known = {n: getattr(request, n) for n in _NAMES if hasattr(request, n)}
  known["token_ids"] = _tokens_of(request)
  begun = "running" if request.num_computed_tokens else "waiting"
  status = known.get("status", begun)
  known["status"] = str(getattr(status, "name", status)).lower()
  return Request(**known)


def tokens_of_all(running: Sequence[Any]) -> list[Sequence[int]]:
  """All tokens of each request."""
  try:
    return [request.token_ids for request in running]
  except AttributeError:
    return [_tokens_of(request) for request in running]


def _tokens_of(request: Any) -> Sequence[int]:
  if hasattr(request, "token_ids"):
    return request.token_ids
  return request.all_token_ids


def salt_of(request: Request) -> np.ndarray:
  """uint32[4]: a hash of salt and adapter; zeros for neither.

  Both are tagged and preceded by their length, so no salt equals the name of an
  adapter.
  """
  parts = {"cache_salt": request.cache_salt, "lora_name": request.lora_name}
  if not any(parts.values()):
    return np.zeros((4,), np.uint32)
  digest = hashlib.blake2b(digest_size=16, person=b"jaxkv-request")
  for tag, value in parts.items():
    if value:
      data = str(value).encode()
      digest.update(f"{tag}:{len(data)}:".encode() + data)
  return np.frombuffer(digest.digest(), "<u4").astype(np.uint32)


def content(
  request: Any, tokens: Sequence[int], start: int, stop: int
) -> np.ndarray:
  """int32[stop - start]: the contents that the request's tokens stand for.

  32 bits of a hash of the item and the position in it replace a placeholder, so
  different images at the same position are different contents.
  """
  try:
    held = int32s(tokens[start:stop])
  except (OverflowError, TypeError) as error:
    raise ValueError(
      f"`token_ids` of {request.request_id!r} must be 32-bit integers, got "
      f"others from {start} to {stop}: {error}."
    ) from error
  for item in getattr(request, "mm", None) or ():
    begin = max(item.offset, start)
    end = min(item.offset + item.length, stop)
    if begin < end:
      data = item.identifier.encode()
      stream = hashlib.shake_256(data).digest(4 * item.length)
      bits = np.frombuffer(stream, "<i4")[begin - item.offset :]
      held[begin - start : end - start] = bits[: end - begin]
  return held


def int32s(values: Sequence[int]) -> np.ndarray:
  """int32[len(values)], without rounding or wrapping.

  For lists as fast as numpy, which would cast floats and strings of digits.

  Raises:
    TypeError: a value is not an integer.
    OverflowError: a value does not fit.
  """
  if not isinstance(values, list):
    # Each element of an array of another library would be an array.
    values = getattr(values, "tolist", lambda: list(values))()
  return np.asarray(array.array("i", values))
