"""Checks the arguments of a manager's calls."""

import operator
from collections.abc import Sequence

import numpy as np

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.host.allocate import Demand
from jaxkv._src.host.request import RequestFields
from jaxkv._src.host.request import int32s
from jaxkv._src.host.state import Limits
from jaxkv._src.host.types import CachePages


def at_least(name: str, value: int, minimum: int) -> int:
  """Returns the value as an int; raises if it is not one or is too small."""
  try:
    # Python counts a bool as an int; here it is a mistake.
    if isinstance(value, bool | np.bool_):
      raise TypeError
    number = operator.index(value)
  except TypeError:
    raise TypeError(
      f"`{name}` must be an int, got {value!r} of type {type(value).__name__}."
    ) from None
  if number < minimum:
    raise ValueError(f"`{name}` must be at least {minimum}, got {number}.")
  return number


def check_length(limits: Limits, name: str, length: int) -> None:
  """Raises if a sequence is too long."""
  if length > limits.max_model_len:
    raise ValueError(
      f"`max_model_len` is {limits.max_model_len}; {name!r} must have at most "
      f"as many tokens, got {length}."
    )


def demand_of(
  limits: Limits,
  request: RequestFields,
  hit: CachePages | None,
  *,
  holds_pages: bool,
  delay_cache_pages: bool,
  full_sequence_must_fit: bool,
  has_scheduled_requests: bool,
  silent: Sequence[int],
  **counts: int,
) -> Demand:
  """Checks the arguments of `allocate_slots` and returns its sizes."""
  num_found = counts["num_new_computed_tokens"]
  external = counts["num_external_computed_tokens"]
  _check_counts(limits, request, counts)
  _check_hit(limits.config, request, num_found, hit, holds_pages=holds_pages)
  num_computed = request.num_computed_tokens + num_found + external
  total = num_computed + counts["num_new_tokens"]
  check_length(limits, request.request_id, total)
  # Steps in flight still write to the pages of these tokens.
  in_flight = request.num_in_flight_tokens if holds_pages else 0
  longest = limits.max_model_len
  waits = request.status in ("waiting", "preempted")
  whole = min(request.num_tokens, longest) if full_sequence_must_fit else 0
  return Demand(
    num_computed=max(num_computed - in_flight, 0),
    external=external,
    room=min(total + counts["num_lookahead_tokens"], longest),
    tokens=total,
    encoder=counts["num_encoder_tokens"],
    whole=whole,
    keep_free=limits.keep_free if waits and has_scheduled_requests else 0,
    reserved=counts["reserved_pages"],
    publish=num_found if delay_cache_pages else min(total, request.num_tokens),
    silent=silent,
  )


def _check_counts(
  limits: Limits, request: RequestFields, counts: dict[str, int]
) -> None:
  for name, count in counts.items():
    at_least(name, count, 0)
  at_least("num_computed_tokens", request.num_computed_tokens, 0)
  at_least("num_in_flight_tokens", request.num_in_flight_tokens, 0)
  if counts["num_encoder_tokens"] > limits.max_encoder_tokens:
    raise ValueError(
      f"`num_encoder_tokens` must be at most {limits.max_encoder_tokens}, got "
      f"{counts['num_encoder_tokens']}; raise max_encoder_tokens (0 without a "
      "CrossAttention group)."
    )
  tokens = ("new", "new_computed", "external_computed")
  if not any(counts[f"num_{name}_tokens"] for name in tokens):
    raise ValueError(
      "`num_new_tokens`, found and external tokens must not all be 0, as for "
      f"{request.request_id!r}."
    )


def _check_hit(
  config: CacheConfig,
  request: RequestFields,
  num_found: int,
  hit: CachePages | None,
  *,
  holds_pages: bool,
) -> None:
  """Raises for an impossible hit; `check_content` compares its tokens."""
  pages, name = _pages_of(config, request.request_id, hit), request.request_id
  if holds_pages and (num_found or any(pages)):
    raise ValueError(
      f"`new_computed_pages` of {name!r} must be empty, got {hit}: it holds "
      "pages already."
    )
  if not holds_pages and request.num_computed_tokens:
    raise ValueError(
      f"`num_computed_tokens` of {name!r} must be 0, got "
      f"{request.num_computed_tokens}: it holds no page."
    )
  # Every hit ends where all groups end a page.
  if num_found % config.alignment:
    raise ValueError(
      f"`num_new_computed_tokens` of {name!r} must be a multiple of "
      f"{config.alignment}, as every hit is, got {num_found}."
    )
  num_pages = [num_found // size for size in config.page_sizes]
  if [len(column) for column in pages or [()] * len(num_pages)] != num_pages:
    raise ValueError(
      f"`new_computed_pages` of {name!r} must have {num_pages} pages for "
      f"{num_found} tokens, got {hit}."
    )


def _pages_of(
  config: CacheConfig, name: str, hit: CachePages | None
) -> tuple[list[int], ...]:
  if hit is None:
    return ()
  if not isinstance(hit, CachePages):
    raise TypeError(
      f"`new_computed_pages` of {name!r} must be CachePages or None, got "
      f"{hit!r}."
    )
  for column in hit.pages:
    _check_pages(config, name, column)
  return hit.pages


def _check_pages(config: CacheConfig, name: str, column: list[int]) -> None:
  try:
    pages, last = int32s(column), config.num_pages - 1
    if not column or (pages.min() >= 0 and pages.max() <= last):
      return
  except OverflowError:
    pages, last = column, config.num_pages - 1
  except TypeError as error:
    raise TypeError(
      f"`new_computed_pages` of {name!r} must be lists of page ids, got "
      f"{column!r}: {error}."
    ) from None
  raise ValueError(
    f"`new_computed_pages` of {name!r} must be 0 to {last}, got {column!r}."
  )


def check_groups(config: CacheConfig, groups: Sequence[int]) -> None:
  """Raises if a group does not exist."""
  if not all(group in range(config.num_groups) for group in groups):
    raise ValueError(
      f"`skip_zeroing_group_ids` must be 0 to {config.num_groups - 1}, got "
      f"{list(groups)}."
    )
