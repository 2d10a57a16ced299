"""Validates a manager's options and derives its limits."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.arrays.arguments import is_number
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.group_kinds import GroupKind


@dataclasses.dataclass(frozen=True)
class Limits:
  """The limits that a manager enforces.

  Attributes:
    config: the sizes and options of the cache.
    max_model_len: tokens of the longest sequence.
    max_encoder_tokens: tokens of the longest encoder input.
    max_requests: the most requests that hold pages at once.
    keep_free: pages that waiting requests leave free while others run.
    most_pages: the most pages of one sequence at once, by group.
  """

  config: CacheConfig
  max_model_len: int
  max_encoder_tokens: int
  max_requests: int
  keep_free: int
  most_pages: tuple[int, ...]


def make(
  groups: Sequence[GroupKind],
  *,
  max_model_len: int,
  max_encoder_tokens: int | None,
  max_in_flight: int | None,
  max_requests: int,
  policy: str,
  watermark: float,
  **options: Any,
) -> Limits:
  """Returns the limits of a `CacheManager` with these arguments.

  `options` are further fields of `CacheConfig`.
  """
  as_count("max_model_len", max_model_len, 1)
  as_count("max_requests", max_requests, 1)
  as_count("num_events", options["event_log"], 0)
  in_flight = max_model_len if max_in_flight is None else max_in_flight
  as_count("max_in_flight", in_flight, 1)
  if policy not in ("current", "classic"):
    raise ValueError(
      f"`policy` must be 'current' or 'classic', got {policy!r}."
    )
  if not (is_number(watermark) and 0 <= watermark < 1):
    raise ValueError(
      f"`watermark` must be at least 0 and below 1, got {watermark!r}."
    )
  _check_groups(groups, options["prefix_retention_interval"])
  _check_caching(groups, options)
  encoder = _longest_encoder(groups, max_model_len, max_encoder_tokens)
  # At each multiple of the alignment, all groups end a page. A prefix is hashed
  # after every `page_size` tokens, because any group may end a page there.
  sizes = [group.page_size or 0 for group in groups]
  alignment, page_size = math.lcm(*sizes), math.gcd(*sizes)
  scratch = max(group.num_speculative for group in groups) * page_size
  # A slot has whole pages of every group: a multiple of the alignment.
  slot_pages = -(-max(encoder, max_model_len + scratch) // alignment)
  config = CacheConfig(
    page_size=page_size,
    # A request usually writes to a page that no other request holds, so more
    # slots than usable pages would rarely be occupied.
    num_slots=min(max_requests, max(1, options["num_pages"] - 1)),
    pages_per_slot=slot_pages * (alignment // page_size),
    groups=tuple(groups),
    free_policy="unhashed_first" if policy == "current" else "lru",
    prefix_rules=policy,
    **options,
  )
  return Limits(
    config=config,
    max_model_len=max_model_len,
    max_encoder_tokens=encoder,
    max_requests=max_requests,
    # Rounded down, as in vLLM.
    keep_free=int(watermark * config.num_pages),
    most_pages=tuple(
      kind.most_pages(
        size, in_flight, encoder if kind.holds_encoder else max_model_len
      )
      for kind, size in zip(groups, sizes, strict=True)
    ),
  )


def _check_groups(groups: Sequence[GroupKind], interval: int | None) -> None:
  if not isinstance(groups, Sequence):
    raise TypeError(f"`groups` must be a list of kinds, got {groups!r}.")
  sizes = [group.page_size for group in groups if isinstance(group, GroupKind)]
  if not groups or len(sizes) < len(groups) or None in sizes:
    raise ValueError(
      "`groups` must be one or more kinds, each with its page_size, such as "
      f"[FullAttention(page_size=16)]; got {groups}."
    )
  page_size = math.gcd(*[size or 0 for size in sizes])
  for group in groups:
    if group.holds_states and group.page_size != page_size:
      raise ValueError(
        f"`page_size` of {group} must be the greatest common divisor of all "
        f"groups' sizes, {page_size}, got {group.page_size}."
      )
  kinds = [type(group) for group in groups]
  if interval and all(kind.published is GroupKind.published for kind in kinds):
    raise ValueError(
      "`prefix_retention_interval` must be None or 0 without a sliding-window "
      f"or recurrent group, got {interval}."
    )


def _check_caching(
  groups: Sequence[GroupKind], options: dict[str, Any]
) -> None:
  caching = options["prefix_caching"]
  if not isinstance(caching, bool):
    raise TypeError(f"`enable_caching` must be True or False, got {caching!r}.")
  if caching and any(kind.holds_encoder for kind in groups):
    raise ValueError(
      "`enable_caching` must be False with CrossAttention: K/V depends on the "
      "encoder's input, which page keys do not cover."
    )
  fields = ("event_log", "track_residency", "offload_pages")
  if not caching and any(options[field] for field in fields):
    raise ValueError(
      "`num_events`, `track_residency` and `offload_pages` need "
      "enable_caching=True: they are about published pages."
    )


def _longest_encoder(
  groups: Sequence[GroupKind], max_model_len: int, limit: int | None
) -> int:
  """Returns the tokens of the longest encoder input; 0 if there is none."""
  if any(group.holds_encoder for group in groups):
    limit = max_model_len if limit is None else limit
    return as_count("max_encoder_tokens", limit, 1)
  if limit is not None:
    raise ValueError(
      "`max_encoder_tokens` must be None without a CrossAttention group, got "
      f"{limit}."
    )
  return 0
