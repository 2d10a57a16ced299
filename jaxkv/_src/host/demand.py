"""What `CacheManager.allocate_slots` asks for, as the numbers of a `Call`."""

from collections.abc import Sequence
from typing import Any

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.host.checks import check_counts
from jaxkv._src.host.checks import check_length
from jaxkv._src.host.checks import check_progress
from jaxkv._src.host.options import Limits
from jaxkv._src.host.requests import status_of
from jaxkv._src.host.requests import tokens_of


def fields_of(
  request: Any,
  limits: Limits,
  *,
  new: int,
  found: int,
  external: int,
  lookahead: int,
  encoder: int,
  reserved: int,
  delayed: bool,
  whole: bool,
  others_run: bool,
) -> dict[str, int]:
  """Fields of a `Call` by name.

  Args:
    request: any object with the attributes of `Request`.
    limits: of the manager.
    new: tokens that will be computed.
    found: tokens that a lookup found.
    external: tokens behind those that come from elsewhere.
    lookahead: room behind all of them.
    encoder: tokens of the encoder.
    reserved: pages promised to others.
    delayed: whether nothing is published but what was found.
    whole: whether all known tokens must fit.
    others_run: whether newcomers must leave pages free.

  Raises:
    TypeError: a number is no int.
    ValueError: one is negative, all are 0, or the sequence is too long.
  """
  check_counts(
    num_new_tokens=new,
    num_new_computed_tokens=found,
    num_lookahead_tokens=lookahead,
    num_external_computed_tokens=external,
    num_encoder_tokens=encoder,
    reserved_pages=reserved,
  )
  check_progress(request)
  if new + found + external == 0:
    raise ValueError(
      f"allocate_slots for {request.request_id!r} asks for nothing: new, "
      "found and external tokens are all 0."
    )
  if encoder > limits.max_encoder_tokens:
    raise ValueError(
      f"num_encoder_tokens of {request.request_id!r} must be at most "
      f"{limits.max_encoder_tokens} (max_encoder_tokens; 0 without a "
      f"CrossAttention group), got {encoder}."
    )
  known = len(tokens_of(request))
  behind = request.num_computed_tokens + found + external
  total = behind + new
  check_length(request, total, limits.max_model_len)
  newcomer = status_of(request) in ("waiting", "preempted")
  return {
    "behind": behind,
    "external": external,
    "room": min(total + lookahead, limits.max_model_len),
    "tokens": total,
    "encoder": encoder,
    "whole": min(known, limits.max_model_len) if whole else 0,
    "spare": limits.spare if newcomer and others_run else 0,
    "reserved": reserved,
    "publish": found if delayed else min(total, known),
  }


def check_shard(hint: int | None, num_shards: int | None) -> None:
  """Raises ValueError for a shard that is not the only one."""
  if num_shards not in (None, 1) or hint not in (None, 0):
    raise ValueError(
      f"data_parallel_size={num_shards} and dp_shard_hint={hint}: a "
      "CacheManager is one shard; make one for each, with that shard's pages "
      "and requests."
    )


def unzeroed_groups(
  config: CacheConfig, numbers: Sequence[int]
) -> tuple[int, ...]:
  """`skip_zeroing_group_ids`, of which there must be such groups.

  Raises:
    ValueError: a number is out of range.
  """
  for number in numbers:
    if number not in range(config.num_groups):
      raise ValueError(
        f"skip_zeroing_group_ids must be 0 to {config.num_groups - 1}, got "
        f"{list(numbers)}."
      )
  return tuple(numbers) if config.track_new_pages else ()
