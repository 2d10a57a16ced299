"""Arguments of a manager's calls, refused before anything is changed."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.host.pages import CachePages
from jaxkv._src.host.requests import int32s

# Two of them are less than an int64.
_MOST_TOKENS = 2**61


def at_least(name: str, value: int, least: int) -> int:
  """The value as an int.

  Raises:
    TypeError: it is none.
    ValueError: it is less than `least`.
  """
  try:
    number = operator.index(value)
  except TypeError:
    raise TypeError(
      f"{name} must be an int, got {value!r} of type {type(value).__name__}."
    ) from None
  if number < least:
    raise ValueError(f"{name} must be at least {least}, got {number}.")
  return number


def check_counts(**counts: int) -> None:
  """Raises for numbers that are not ints, or negative."""
  for name, count in counts.items():
    at_least(name, count, 0)


def checked_step(
  num_new_tokens: Sequence[int] | int, lookahead: int, num_running: int
) -> np.ndarray:
  """int64[R] or int64[]: new tokens of each request, or of every one.

  Raises:
    TypeError: a number is no int.
    ValueError: one is too small or too large, or there are not as many as
      requests.
  """
  _within("num_lookahead_tokens", lookahead, 0)
  if isinstance(num_new_tokens, int):
    return np.asarray(_within("num_new_tokens", num_new_tokens, 1), np.int64)
  num_new = np.asarray(num_new_tokens)
  if num_new.dtype.kind not in "iu":
    raise TypeError(f"num_new_tokens must be ints, got {num_new_tokens!r}.")
  if num_new.shape not in ((), (num_running,)):
    raise ValueError(
      f"num_new_tokens must be one number or one for each of {num_running} "
      f"requests, got an array of shape {num_new.shape}."
    )
  at_least("num_new_tokens", num_new.min(), 1)
  _within("num_new_tokens", num_new.max(), 1)
  return num_new.astype(np.int64)


def checked_progress(
  running: Sequence[Any], recycles: bool
) -> tuple[np.ndarray, np.ndarray]:
  """int32[R] each: computed tokens, and those behind which no request looks.

  Args:
    running: R requests.
    recycles: whether a window moves on; if not, both are the same.

  Raises:
    TypeError: a count is no int.
    ValueError: one is negative, or has more than 32 bits.
  """
  try:
    ready = int32s([request.num_computed_tokens for request in running])
    behind = ready
    if recycles:
      in_flight = [getattr(one, "num_in_flight_tokens", 0) for one in running]
      behind = np.maximum(ready - int32s(in_flight), 0)
    if not ready.size or ready.min() >= 0:
      return ready, behind
  except (OverflowError, TypeError):
    pass  # Told below, by name.
  for request in running:
    check_progress(request)
  raise ValueError("A request has counts of more than 32 bits.")


def check_progress(request: Any) -> None:
  """Raises for counts of a request that are not ints, or negative."""
  check_counts(
    num_computed_tokens=request.num_computed_tokens,
    num_in_flight_tokens=getattr(request, "num_in_flight_tokens", 0),
  )


def _within(name: str, value: int, least: int) -> int:
  """As `at_least`, and so that sums of it do not overflow."""
  number = at_least(name, value, least)
  if number > _MOST_TOKENS:
    raise ValueError(f"{name} must be at most {_MOST_TOKENS}, got {number}.")
  return number


def check_length(request: Any, length: int, longest: int) -> None:
  """Raises ValueError for a sequence that would be too long."""
  if length > longest:
    raise ValueError(
      f"{request.request_id!r} would have {length} tokens, more than "
      f"max_model_len, {longest}."
    )


def check_hit(
  config: CacheConfig,
  request: Any,
  slot: int | None,
  found: int,
  hit: CachePages | None,
) -> None:
  """Raises ValueError for what no lookup can have given.

  Whether the pages hold the request's tokens is left to the device.

  Args:
    config: sizes of the cache.
    request: whose hit it is.
    slot: where it stands, None for a newcomer.
    found: tokens of the hit.
    hit: its pages.
  """
  pages, name = hit.pages if hit else (), request.request_id
  if slot is not None and (found or any(pages)):
    raise ValueError(f"{name!r} holds pages already, so a lookup can add none.")
  if slot is None and request.num_computed_tokens:
    raise ValueError(
      f"{name!r} holds no page, so num_computed_tokens must be 0, got "
      f"{request.num_computed_tokens}."
    )
  if found % config.alignment:
    raise ValueError(
      f"num_new_computed_tokens={found} of {name!r} end inside a page; hits "
      f"are multiples of {config.alignment}."
    )
  wanted = [found // size for size in config.page_sizes]
  if [len(column) for column in pages or [()] * len(wanted)] != wanted:
    raise ValueError(
      f"num_new_computed_tokens={found} of {name!r} need {wanted} pages in "
      f"new_computed_pages, got {hit}."
    )
