"""A manager's options as the sizes of a cache."""

import math
from collections.abc import Sequence
from typing import NamedTuple
from typing import TypedDict

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.groups.kinds import GroupKind
from jaxkv._src.host.checks import at_least


class Options(TypedDict):
  """Fields of `CacheConfig` that are passed on as they are."""

  prefix_caching: bool
  draft_model: bool
  event_log: int
  track_new_pages: bool
  track_residency: bool
  seed: int


class Limits(NamedTuple):
  """What a manager enforces beside the sizes of its cache.

  Attributes:
    max_model_len: tokens of the longest sequence.
    max_encoder_tokens: tokens of the longest encoder input.
    spare: pages that newcomers leave free while others run.
    most_pages: by group, pages that one sequence ever holds.
  """

  max_model_len: int
  max_encoder_tokens: int
  spare: int
  most_pages: tuple[int, ...]


def make_config(
  groups: Sequence[GroupKind],
  max_model_len: int,
  max_encoder_tokens: int | None,
  *,
  num_pages: int,
  max_requests: int,
  policy: str,
  retention: int | None,
  options: Options,
) -> CacheConfig:
  """Sizes for so many requests of so many tokens; see `CacheManager`."""
  _check_options(options)
  _check_kinds(groups, options["prefix_caching"])
  at_least("max_model_len", max_model_len, 1)
  at_least("max_requests", max_requests, 1)
  if policy not in ("current", "classic"):
    raise ValueError(f"policy must be 'current' or 'classic', got {policy!r}.")
  keeps_all = all(
    type(group).reusable is GroupKind.reusable for group in groups
  )
  if retention and keeps_all:
    raise ValueError(
      f"retention={retention} is for windows, and there is none; give None or "
      "0."
    )
  sizes = [group.page_size or 0 for group in groups]
  alignment, page_size = math.lcm(*sizes), math.gcd(*sizes)
  for group, size in zip(groups, sizes, strict=True):
    if group.holds_states and size != page_size:
      raise ValueError(
        f"{group} must have the smallest pages, of {page_size} tokens."
      )
  scratch = max(group.num_speculative for group in groups) * page_size
  longest = _longest_encoder(groups, max_model_len, max_encoder_tokens)
  longest = max(longest, max_model_len + scratch)
  slot_tokens = -(-longest // alignment) * alignment
  return CacheConfig(
    num_pages=num_pages,
    page_size=page_size,
    num_slots=min(max_requests, max(1, num_pages - 1)),
    pages_per_slot=slot_tokens // page_size,
    groups=tuple(groups),
    unhashed_first=policy == "current",
    classic=policy == "classic",
    retention=retention,
    **options,
  )


def make_limits(
  config: CacheConfig,
  max_model_len: int,
  watermark: float,
  max_in_flight: int | None,
  max_encoder_tokens: int | None,
) -> Limits:
  """See `CacheManager`."""
  if not 0 <= watermark < 1:
    raise ValueError(f"watermark must be in 0 .. 1, got {watermark}.")
  in_flight = max_model_len if max_in_flight is None else max_in_flight
  at_least("max_in_flight", in_flight, 1)
  encoder = _longest_encoder(config.groups, max_model_len, max_encoder_tokens)
  return Limits(
    max_model_len=max_model_len,
    max_encoder_tokens=encoder,
    spare=int(watermark * config.num_pages),
    most_pages=tuple(
      kind.most_pages(
        size, in_flight, encoder if kind.holds_encoder else max_model_len
      )
      for kind, size in zip(config.groups, config.page_sizes, strict=True)
    ),
  )


def _longest_encoder(
  groups: Sequence[GroupKind], max_model_len: int, most: int | None
) -> int:
  """Tokens of the longest encoder input; 0 where no group holds any."""
  if not any(group.holds_encoder for group in groups):
    if most is not None:
      raise ValueError(
        f"max_encoder_tokens={most} is for CrossAttention, and there is none."
      )
    return 0
  return at_least(
    "max_encoder_tokens", max_model_len if most is None else most, 1
  )


def _check_options(options: Options) -> None:
  """Raises for what a manager calls by another name, and by that name."""
  caching, events = options["prefix_caching"], options["event_log"]
  for name, value in (
    ("enable_caching", caching),
    ("use_eagle", options["draft_model"]),
  ):
    if not isinstance(value, bool):
      raise TypeError(f"{name} must be True or False, got {value!r}.")
  at_least("num_events", events, 0)
  if not caching and (events or options["track_residency"]):
    raise ValueError(
      "num_events and track_residency need enable_caching=True: nothing is "
      "published or evicted without it."
    )


def _check_kinds(groups: Sequence[GroupKind], caching: bool) -> None:
  """Raises for what is no list of sized kinds, or never cached."""
  if not isinstance(groups, Sequence):
    raise TypeError(f"groups must be a list of kinds, got {groups!r}.")
  sized = [
    isinstance(group, GroupKind) and group.page_size is not None
    for group in groups
  ]
  if not groups or not all(sized):
    raise ValueError(
      "groups must be one or more kinds, each with its page_size, such as "
      f"[FullAttention(page_size=16)]; got {groups}."
    )
  if caching and any(kind.holds_encoder for kind in groups):
    raise ValueError(
      "enable_caching must be False with CrossAttention: what a decoder "
      "computes depends on the encoder's input, of which page keys know "
      "nothing."
    )
