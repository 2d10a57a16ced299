"""The sizes and options of a manager."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.arrays.arguments import check_bool
from jaxkv._src.arrays.arguments import is_number
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.host.groups import CrossAttention


@dataclasses.dataclass(frozen=True)
class ManagerOptions:
  """The options of a `CacheManager`, and the limits that follow from them.

  Attributes:
    config: the sizes and options of the cache.
    max_model_len: tokens of the longest sequence.
    max_encoder_tokens: tokens of the longest encoder input.
    keep_free: pages that waiting requests leave free while others run.
    most_pages: the most pages of one sequence at once, by group; not for groups
      of states.
    num_events: the capacity of the event log.
    track_new_pages: True to record the pages that are allocated.
    track_residency: True to count the ages of evicted pages.
  """

  config: CacheConfig
  max_model_len: int
  max_encoder_tokens: int
  keep_free: int
  most_pages: tuple[int, ...]
  num_events: int
  track_new_pages: bool
  track_residency: bool

  @functools.cached_property
  def first_self_group(self) -> int:
    """The index of the first group that holds the sequence's own tokens."""
    return _hold_encoder(self.config.groups).index(False)


def make(
  groups: Sequence[GroupKind],
  *,
  max_model_len: int,
  max_encoder_tokens: int | None,
  max_in_flight: int | None,
  max_requests: int,
  policy: str,
  watermark: float,
  num_events: int,
  track_new_pages: bool,
  track_residency: bool,
  **fields: Any,
) -> ManagerOptions:
  """Returns the options of a `CacheManager` with these arguments.

  `fields` are further fields of `CacheConfig`.
  """
  as_count("max_model_len", max_model_len, 1)
  as_count("max_requests", max_requests, 1)
  as_count("num_events", num_events, 0)
  check_bool("track_new_pages", track_new_pages)
  check_bool("track_residency", track_residency)
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
  _check_groups(groups, fields["prefix_retention_interval"])
  needs_caching = num_events or track_residency or fields["offload_pages"]
  _check_caching(
    groups, fields["prefix_caching"], needs_caching=bool(needs_caching)
  )
  encoder = _longest_encoder(groups, max_model_len, max_encoder_tokens)
  # At each multiple of the alignment, all groups end a page. A prefix is hashed
  # after every `page_size` tokens, because any group may end a page there.
  page_sizes = [group.page_size or 0 for group in groups]
  alignment = math.lcm(*page_sizes)
  page_size = math.gcd(*page_sizes)
  config = CacheConfig(
    page_size=page_size,
    num_slots=max_requests,
    # A slot has whole pages of every group: a multiple of the alignment.
    pages_per_slot=-(-max_model_len // alignment) * (alignment // page_size),
    groups=tuple(groups),
    free_policy="unhashed_first" if policy == "current" else "lru",
    prefix_rules=policy,
    **fields,
  )
  return ManagerOptions(
    config=config,
    max_model_len=max_model_len,
    max_encoder_tokens=encoder,
    # Rounded down, as in vLLM.
    keep_free=int(watermark * config.total_pages),
    most_pages=tuple(
      kind.most_pages(size, in_flight, encoder if is_encoder else max_model_len)
      for kind, size, is_encoder in zip(
        groups, page_sizes, _hold_encoder(groups), strict=True
      )
    ),
    num_events=num_events,
    track_new_pages=track_new_pages,
    track_residency=track_residency,
  )


def _hold_encoder(groups: Sequence[GroupKind]) -> list[bool]:
  """Returns, for each group, True if pages hold the encoder's tokens."""
  return [isinstance(kind, CrossAttention) for kind in groups]


def _check_groups(groups: Sequence[GroupKind], interval: int | None) -> None:
  if not isinstance(groups, Sequence):
    raise TypeError(f"`groups` must be a list of kinds, got {groups!r}.")
  sizes = [group.page_size for group in groups if isinstance(group, GroupKind)]
  if not groups or len(sizes) < len(groups) or None in sizes:
    raise ValueError(
      "`groups` must be one or more kinds, each with its page_size, such as "
      f"[FullAttention(page_size=16)]; got {groups}."
    )
  if all(_hold_encoder(groups)):
    raise ValueError(
      "`groups` must have a group for the sequences' own tokens, got "
      f"{groups}; add one, such as FullAttention(page_size=16)."
    )
  kinds = [type(group) for group in groups]
  if interval and all(kind.published is GroupKind.published for kind in kinds):
    raise ValueError(
      "`prefix_retention_interval` must be None or 0 without a sliding-window "
      f"or recurrent group, got {interval}."
    )


def _check_caching(
  groups: Sequence[GroupKind], caching: bool, *, needs_caching: bool
) -> None:
  check_bool("enable_caching", caching)
  if not caching:
    if needs_caching:
      raise ValueError(
        "`num_events`, `track_residency` and `offload_pages` need "
        "enable_caching=True: they are about published pages."
      )
    return
  if any(_hold_encoder(groups)):
    raise ValueError(
      "`enable_caching` must be False with CrossAttention: K/V depends on the "
      "encoder's input, which page keys do not cover."
    )
  # A prefix can end only where every group of states ends a page.
  page_size = math.gcd(*[group.page_size or 0 for group in groups])
  for group in groups:
    if group.holds_states and group.page_size != page_size:
      raise ValueError(
        f"`page_size` of {group} must be the greatest common divisor of all "
        f"groups' sizes, {page_size}, got {group.page_size}."
      )


def _longest_encoder(
  groups: Sequence[GroupKind], max_model_len: int, limit: int | None
) -> int:
  """Returns the tokens of the longest encoder input; 0 if there is none."""
  if any(_hold_encoder(groups)):
    limit = max_model_len if limit is None else limit
    return as_count("max_encoder_tokens", limit, 1)
  if limit is not None:
    raise ValueError(
      "`max_encoder_tokens` must be None without a CrossAttention group, got "
      f"{limit}."
    )
  return 0
