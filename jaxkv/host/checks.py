"""Arguments of a manager's calls, refused before anything is changed."""

import operator
from typing import Any

from jaxkv.cache.config import CacheConfig
from jaxkv.host.pages import CachePages


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
