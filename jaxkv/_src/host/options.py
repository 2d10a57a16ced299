"""The options of a manager, and the arguments of its calls, validated."""

import math
import operator
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.kinds import GroupKind
from jaxkv._src.host.request import int32s
from jaxkv._src.host.types import CachePages

# The sum of two such numbers fits int64.
_MOST_TOKENS = 2**61


class Limits(NamedTuple):
  """What a manager enforces besides the sizes of its cache.

  Attributes:
    max_model_len: tokens of the longest sequence.
    max_encoder_tokens: tokens of the longest encoder input.
    keep_free: pages that waiting requests leave free while others run.
    most_pages: the most pages that one sequence ever holds, by group.
  """

  max_model_len: int
  max_encoder_tokens: int
  keep_free: int
  most_pages: tuple[int, ...]


def make_config(
  groups: Sequence[GroupKind],
  max_model_len: int,
  max_encoder_tokens: int | None,
  max_requests: int,
  policy: str,
  **options: Any,
) -> CacheConfig:
  """The sizes of the cache; see `CacheManager` for the arguments.

  Validates options under the manager's argument names.
  """
  _check_groups(groups, options["prefix_caching"])
  at_least("max_model_len", max_model_len, 1)
  at_least("max_requests", max_requests, 1)
  at_least("num_events", options["event_log"], 0)
  if policy not in ("current", "classic"):
    raise ValueError(
      f"`policy` must be 'current' or 'classic', got {policy!r}."
    )
  if not isinstance(options["prefix_caching"], bool):
    raise TypeError(
      "`enable_caching` must be True or False, got "
      f"{options['prefix_caching']!r}."
    )
  tells = options["event_log"] or options["track_residency"]
  if tells and not options["prefix_caching"]:
    raise ValueError(
      "`num_events` and `track_residency` need enable_caching=True: they tell "
      "of published pages."
    )
  keeps_all = all(
    type(group).published is GroupKind.published for group in groups
  )
  if options["prefix_retention_interval"] and keeps_all:
    raise ValueError(
      "`prefix_retention_interval` must be None or 0 without a window, got "
      f"{options['prefix_retention_interval']}."
    )
  sizes = [group.page_size or 0 for group in groups]
  alignment, page_size = math.lcm(*sizes), math.gcd(*sizes)
  for group, size in zip(groups, sizes, strict=True):
    if group.holds_states and size != page_size:
      raise ValueError(
        f"`page_size` of {group} must be the smallest of all groups, "
        f"{page_size}, got {size}."
      )
  scratch = max(group.num_speculative for group in groups) * page_size
  longest = _longest_encoder(groups, max_model_len, max_encoder_tokens)
  longest = max(longest, max_model_len + scratch)
  slot_tokens = -(-longest // alignment) * alignment
  return CacheConfig(
    page_size=page_size,
    num_slots=min(max_requests, max(1, options["num_pages"] - 1)),
    pages_per_slot=slot_tokens // page_size,
    groups=tuple(groups),
    free_policy="unhashed_first" if policy == "current" else "lru",
    prefix_rules=policy,
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
    raise ValueError(f"`watermark` must be in 0 .. 1, got {watermark}.")
  in_flight = max_model_len if max_in_flight is None else max_in_flight
  at_least("max_in_flight", in_flight, 1)
  encoder = _longest_encoder(config.groups, max_model_len, max_encoder_tokens)
  return Limits(
    max_model_len=max_model_len,
    max_encoder_tokens=encoder,
    keep_free=int(watermark * config.num_pages),
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
  """Tokens of the longest encoder input; 0 without such a group."""
  if not any(group.holds_encoder for group in groups):
    if most is not None:
      raise ValueError(
        "`max_encoder_tokens` must be None without a CrossAttention group, got "
        f"{most}."
      )
    return 0
  return at_least(
    "max_encoder_tokens", max_model_len if most is None else most, 1
  )


def _check_groups(groups: Sequence[GroupKind], caching: bool) -> None:
  if not isinstance(groups, Sequence):
    raise TypeError(f"`groups` must be a list of kinds, got {groups!r}.")
  sized = [
    isinstance(group, GroupKind) and group.page_size is not None
    for group in groups
  ]
  if not groups or not all(sized):
    raise ValueError(
      "`groups` must be one or more kinds, each with its page_size, such as "
      f"[FullAttention(page_size=16)]; got {groups}."
    )
  if caching and any(kind.holds_encoder for kind in groups):
    raise ValueError(
      "`enable_caching` must be False with CrossAttention: K/V depends on the "
      "encoder's input, which page keys do not cover."
    )


def at_least(name: str, value: int, least: int) -> int:
  """The value as an int.

  Raises:
    TypeError: it is not an int.
    ValueError: it is less than `least`.
  """
  try:
    number = operator.index(value)
  except TypeError:
    raise TypeError(
      f"`{name}` must be an int, got {value!r} of type {type(value).__name__}."
    ) from None
  if number < least:
    raise ValueError(f"`{name}` must be at least {least}, got {number}.")
  return number


def check_counts(**counts: int) -> None:
  """Raises for numbers that are not ints, or negative."""
  for name, count in counts.items():
    at_least(name, count, 0)


def check_shard(hint: int | None, num_shards: int | None) -> None:
  """Raises ValueError for a shard that is not the only one."""
  if num_shards not in (None, 1) or hint not in (None, 0):
    raise ValueError(
      "`data_parallel_size` must be None or 1 and `dp_shard_hint` None or 0, "
      f"got {num_shards} and {hint}; make a CacheManager for each shard, with "
      "that shard's pages and requests."
    )


def check_groups(config: CacheConfig, numbers: Sequence[int]) -> None:
  """Raises ValueError for numbers of no group."""
  for number in numbers:
    if number not in range(config.num_groups):
      raise ValueError(
        f"`skip_zeroing_group_ids` must be 0 to {config.num_groups - 1}, got "
        f"{list(numbers)}."
      )


def check_encoder(limits: Limits, num_tokens: int) -> None:
  """Raises ValueError for an encoder input that is too long."""
  if num_tokens > limits.max_encoder_tokens:
    raise ValueError(
      f"`num_encoder_tokens` must be at most {limits.max_encoder_tokens}, got "
      f"{num_tokens}; raise max_encoder_tokens (0 without a CrossAttention "
      "group)."
    )


def check_length(request: Any, length: int, limits: Limits) -> None:
  """Raises ValueError for a sequence that would be too long."""
  if length > limits.max_model_len:
    raise ValueError(
      f"`max_model_len` is {limits.max_model_len}; {request.request_id!r} must "
      f"have at most as many tokens, got {length}."
    )


def check_progress(request: Any) -> None:
  """Raises for counts of a request that are not ints, or negative."""
  check_counts(
    num_computed_tokens=request.num_computed_tokens,
    num_in_flight_tokens=getattr(request, "num_in_flight_tokens", 0),
  )


def check_hit(
  config: CacheConfig,
  request: Any,
  slot: int | None,
  num_tokens: int,
  hit: CachePages | None,
) -> None:
  """Raises ValueError for a hit that no lookup can have given.

  The device checks whether the pages hold the request's tokens.

  Args:
    config: sizes of the cache.
    request: whose hit it is.
    slot: its slot, None for a request without one.
    num_tokens: tokens of the hit.
    hit: its pages.
  """
  pages, name = hit.pages if hit else (), request.request_id
  if slot is not None and (num_tokens or any(pages)):
    raise ValueError(
      f"`new_computed_pages` of {name!r} must be empty, got {hit}: it holds "
      "pages already."
    )
  if slot is None and request.num_computed_tokens:
    raise ValueError(
      f"`num_computed_tokens` of {name!r} must be 0, got "
      f"{request.num_computed_tokens}: it holds no page."
    )
  if num_tokens % config.alignment:
    raise ValueError(
      f"`num_new_computed_tokens` of {name!r} must be a multiple of "
      f"{config.alignment}, as every hit is, got {num_tokens}."
    )
  wanted = [num_tokens // size for size in config.page_sizes]
  if [len(column) for column in pages or [()] * len(wanted)] != wanted:
    raise ValueError(
      f"`new_computed_pages` of {name!r} must have {wanted} pages for "
      f"{num_tokens} tokens, got {hit}."
    )


def new_tokens(
  num_new_tokens: Sequence[int] | int, lookahead: int, num_running: int
) -> np.ndarray:
  """int64[R] or int64[]: new tokens of each request, or of every one.

  Raises:
    TypeError: a number is not an int.
    ValueError: a number is too small or too large, or there are not as many as
      requests.
  """
  _within("num_lookahead_tokens", lookahead, 0)
  if isinstance(num_new_tokens, int):
    return np.asarray(_within("num_new_tokens", num_new_tokens, 1), np.int64)
  num_new = np.asarray(num_new_tokens)
  if num_new.dtype.kind not in "iu":
    raise TypeError(f"`num_new_tokens` must be ints, got {num_new_tokens!r}.")
  if num_new.shape not in ((), (num_running,)):
    raise ValueError(
      f"`num_new_tokens` must be one number, or one for each of {num_running} "
      f"requests, got an array of shape {num_new.shape}."
    )
  at_least("num_new_tokens", num_new.min(), 1)
  _within("num_new_tokens", num_new.max(), 1)
  return num_new.astype(np.int64)


def progress_of(
  running: Sequence[Any], skips_pages: bool
) -> tuple[np.ndarray, np.ndarray]:
  """int32[R] each: computed tokens, and those that are also written.

  Args:
    running: R requests.
    skips_pages: whether some group leaves pages behind; if not, both are equal.

  Raises:
    TypeError: a count is not an int.
    ValueError: a count is negative, or has more than 32 bits.
  """
  try:
    computed = int32s([request.num_computed_tokens for request in running])
    written = computed
    if skips_pages:
      in_flight = [getattr(one, "num_in_flight_tokens", 0) for one in running]
      written = np.maximum(computed - int32s(in_flight), 0)
    if not computed.size or computed.min() >= 0:
      return computed, written
  except (OverflowError, TypeError):
    pass  # Raised below, with the name.
  for request in running:
    check_progress(request)
  raise ValueError("`num_computed_tokens` must have at most 32 bits.")


def _within(name: str, value: int, least: int) -> int:
  """As `at_least`; and sums of it must not overflow."""
  number = at_least(name, value, least)
  if number > _MOST_TOKENS:
    raise ValueError(f"`{name}` must be at most {_MOST_TOKENS}, got {number}.")
  return number
