"""The demand of an allocation: the checked arguments of `allocate_slots`."""

import operator
from collections.abc import Sequence
from typing import NamedTuple

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.host.cache_pages import CachePages
from jaxkv._src.host.config import ManagerOptions
from jaxkv._src.host.request import RequestFields

PLAIN = (0, None, 0, 0, 0, False, False)
"""The arguments of most steps of a running request, which need few checks.

Tokens and pages of a hit, external tokens, encoder tokens, reserved pages,
whether to delay publication, and whether the whole sequence must fit.
"""


class Demand(NamedTuple):
  """The sizes of an allocation, in tokens unless a comment says otherwise."""

  num_computed: int = 0  # computed, hit and external, minus in-flight tokens
  external: int = 0  # tokens whose K/V is loaded from elsewhere
  room: int = 0  # tokens that need pages, lookahead included
  tokens: int = 0  # tokens that need states: `room` without lookahead
  encoder: int = 0  # encoder tokens that need pages
  whole: int = 0  # tokens of the sequence if all of it must fit, else 0
  keep_free: int = 0  # pages that must stay free
  reserved: int = 0  # further pages that must stay free; `whole` ignores them
  publish: int = 0  # final tokens, whose full pages are published
  hits: Sequence[list[int]] = ()  # the pages of a new request's hit, by group


def check_length(options: ManagerOptions, name: str, length: int) -> None:
  """Raises if a sequence is too long."""
  if length > options.max_model_len:
    raise ValueError(
      f"`max_model_len` is {options.max_model_len}; {name!r} must have at most "
      f"as many tokens, got {length}."
    )


def demand_of(
  options: ManagerOptions,
  request: RequestFields,
  hit: CachePages | None,
  *,
  holds_pages: bool,
  delay_cache_pages: bool,
  full_sequence_must_fit: bool,
  has_scheduled_requests: bool,
  **counts: int,
) -> Demand:
  """Checks the arguments of `allocate_slots`; returns the call's demand."""
  counts = _as_counts(options, request, counts)
  num_found = counts["num_new_computed_tokens"]
  external = counts["num_external_computed_tokens"]
  hits = _pages_of_hit(
    options.config, request, num_found, hit, holds_pages=holds_pages
  )
  num_computed = counts["num_computed_tokens"] + num_found + external
  total = num_computed + counts["num_new_tokens"]
  check_length(options, request.request_id, total)
  # Pages that steps in flight still use must not be freed.
  in_flight = counts["num_in_flight_tokens"] if holds_pages else 0
  longest = options.max_model_len
  waits = request.status in ("waiting", "preempted")
  return Demand(
    num_computed=max(num_computed - in_flight, 0),
    external=external,
    room=min(total + counts["num_lookahead_tokens"], longest),
    tokens=total,
    encoder=counts["num_encoder_tokens"],
    whole=min(request.num_tokens, longest) if full_sequence_must_fit else 0,
    keep_free=options.keep_free if waits and has_scheduled_requests else 0,
    reserved=counts["reserved_pages"],
    publish=num_found if delay_cache_pages else min(total, request.num_tokens),
    hits=hits,
  )


def _as_counts(
  options: ManagerOptions, request: RequestFields, counts: dict[str, int]
) -> dict[str, int]:
  """Returns the counts of a call and of its request as ints, or raises."""
  all_counts = {
    **counts,
    "num_computed_tokens": request.num_computed_tokens,
    "num_in_flight_tokens": request.num_in_flight_tokens,
  }
  for name, count in all_counts.items():
    # Most numbers are valid, and this test avoids a function call for them.
    if count.__class__ is not int or count < 0:
      all_counts[name] = as_count(name, count, 0)
  counts = all_counts
  if counts["num_encoder_tokens"] > options.max_encoder_tokens:
    raise ValueError(
      f"`num_encoder_tokens` must be at most {options.max_encoder_tokens}, got "
      f"{counts['num_encoder_tokens']}; increase max_encoder_tokens (needs a "
      "CrossAttention group)."
    )
  tokens = ("new", "new_computed", "external_computed")
  if not any(counts[f"num_{name}_tokens"] for name in tokens):
    raise ValueError(
      "`num_new_tokens`, the tokens of the hit and external tokens of "
      f"{request.request_id!r} must not all be 0."
    )
  return counts


def _pages_of_hit(
  config: CacheConfig,
  request: RequestFields,
  num_found: int,
  hit: CachePages | None,
  *,
  holds_pages: bool,
) -> list[list[int]]:
  """Returns the pages of a hit as ints.

  Raises if the request cannot have this hit; does not compare tokens.
  """
  name = request.request_id
  pages = [[] for _ in config.groups]
  if hit is not None:
    if not isinstance(hit, CachePages):
      raise TypeError(
        f"`new_computed_pages` of {name!r} must be CachePages or None, got "
        f"{hit!r}."
      )
    pages = [_as_pages(config, name, column) for column in hit.pages]
  if holds_pages and (num_found or any(pages)):
    raise ValueError(
      f"`new_computed_pages` of {name!r} must be empty, and "
      f"`num_new_computed_tokens` 0, got {hit} and {num_found}: the request "
      "holds pages already."
    )
  if not holds_pages and request.num_computed_tokens:
    raise ValueError(
      f"`num_computed_tokens` of {name!r} must be 0, got "
      f"{request.num_computed_tokens}: the request holds no page."
    )
  # Every hit ends where all groups end a page.
  if num_found % config.alignment:
    raise ValueError(
      f"`num_new_computed_tokens` of {name!r} must be a multiple of "
      f"{config.alignment}, as every hit is, got {num_found}."
    )
  num_pages = [num_found // size for size in config.page_sizes]
  if [len(column) for column in pages] != num_pages:
    raise ValueError(
      f"`new_computed_pages` of {name!r} must have {num_pages} pages for "
      f"{num_found} tokens, got {hit}."
    )
  return pages


def _as_pages(config: CacheConfig, name: str, column: list[int]) -> list[int]:
  last = config.num_numbers - 1
  try:
    # `map` is faster than a loop over pages, of which there can be hundreds.
    pages = [*map(operator.index, column)]
  except TypeError as error:
    raise TypeError(
      f"`new_computed_pages` of {name!r} must be lists of page ids, got "
      f"{column!r}: {error}."
    ) from None
  if pages and not 0 <= min(pages) <= max(pages) <= last:
    raise ValueError(
      f"`new_computed_pages` of {name!r} must be 0 to {last}, got {column!r}."
    )
  return pages
