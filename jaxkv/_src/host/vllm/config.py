"""Converts vLLM's `KVCacheConfig` to group kinds. Refuses unsupported options.

vLLM is not imported: a spec is recognized by the names of its class and bases.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxkv._src.cache.group_kinds import ChunkedLocal
from jaxkv._src.cache.group_kinds import CrossAttention
from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.group_kinds import Recurrent
from jaxkv._src.cache.group_kinds import SlidingWindow
from jaxkv._src.host.vllm.events import EventGroup

# Specs that need what the core does not have, and why.
_REFUSED = {
  "RSWASpec": "it keeps the prompt and a window, but not what is between",
  "CircularBufferSpec": "its one block is written in a circle",
  "EncoderOnlyAttentionSpec": "it has no blocks; leave its group out",
  "HiSparseHotSpec": "HiSparse has a second pool",
  "HiSparseResidentSpec": "HiSparse has a second pool",
}
# What events call a spec, the most special class first.
_KINDS = {
  "SlidingWindowMLASpec": "sliding_window_mla",
  "MLAAttentionSpec": "mla_attention",
  "SinkFullAttentionSpec": "sink_full_attention",
  "FullAttentionSpec": "full_attention",
  "ChunkedLocalAttentionSpec": "chunked_local_attention",
  "SlidingWindowSpec": "sliding_window",
  "MambaSpec": "mamba",
  "EncoderOnlyAttentionSpec": "encoder_only_attention",
  "CrossAttentionSpec": "cross_attention",
}


@dataclasses.dataclass(frozen=True)
class RunningState(GroupKind):
  """Layers with one state a sequence, which is never cached.

  vLLM's `MambaSpec` with `mamba_cache_mode="none"`. A page is as long as the
  longest sequence, so there is one, and one more for each of the
  `num_speculative` draft tokens.
  """

  num_speculative: int = dataclasses.field(  # pyright: ignore
    default=0, metadata={"minimum": 0}
  )

  def most_pages(self, page_size: int, in_flight: int, longest: int) -> int:
    """See `GroupKind`."""
    return -(-longest // page_size) + self.num_speculative


def has_class(spec: Any, name: str) -> bool:
  """True if a spec is of vLLM's class of this name."""
  return any(base.__name__ == name for base in type(spec).__mro__)


def layer_specs(spec: Any) -> list[Any]:
  """Returns the specs of a group's layers, or the spec itself."""
  if has_class(spec, "UniformTypeKVCacheSpecs"):
    return list(spec.kv_cache_specs.values())
  return [spec]


def kind_name(spec: Any) -> str:
  """Returns the name of a spec's kind in events."""
  names = {
    next((_KINDS[name] for name in _KINDS if has_class(layer, name)), "unknown")
    for layer in layer_specs(spec)
  }
  if len(names) == 1:
    return names.pop()
  layers = layer_specs(spec)
  full = all(has_class(layer, "FullAttentionSpec") for layer in layers)
  return "full_attention" if full else "unknown"


def window_of(spec: Any) -> int | None:
  """Returns the window of a spec in events."""
  windows = {
    layer.sliding_window if has_class(layer, "SlidingWindowSpec") else None
    for layer in layer_specs(spec)
  }
  return windows.pop() if len(windows) == 1 else None


def event_groups(specs: Sequence[Any]) -> list[EventGroup]:
  """Returns the fields of groups in events."""
  return [
    EventGroup(spec.block_size, kind_name(spec), window_of(spec))
    for spec in specs
  ]


def is_attention(spec: Any) -> bool:
  """True for specs whose new blocks vLLM zeroes, if it zeroes any."""
  return all(has_class(layer, "AttentionSpec") for layer in layer_specs(spec))


def group_kinds(
  groups: Sequence[Any], max_model_len: int, *, enable_caching: bool
) -> list[GroupKind]:
  """Converts vLLM's groups, which have a `kv_cache_spec`, to group kinds.

  Raises:
    ValueError: a group's kind is not supported.
  """
  if not groups:
    raise ValueError(
      "`kv_cache_config.kv_cache_groups` must have one group or more, got "
      "none: without a group there is no block to manage."
    )
  for group in groups:
    _check_group(group)
  specs = [layer_specs(group.kv_cache_spec)[0] for group in groups]
  sizes = [spec.block_size for spec in specs if not _is_running_state(spec)]
  align = math.lcm(*sizes)
  # A page of a running state is at least as long as every sequence.
  longest = -(-max_model_len // align) * align
  kinds = [_kind_of(spec, longest, enable_caching) for spec in specs]
  for spec, kind in zip(specs, kinds, strict=True):
    if isinstance(kind, RunningState) and spec.block_size < max_model_len:
      raise ValueError(
        "`block_size` of a MambaSpec with mamba_cache_mode='none' must be at "
        f"least max_model_len, {max_model_len}, got {spec.block_size}."
      )
  return kinds


def _check_group(group: Any) -> None:
  role = getattr(group, "role", "default")
  if getattr(role, "value", role) != "default":
    raise ValueError(
      f"`role` of a group must be 'default', got {role!r}: HiSparse has a "
      "second pool and is not supported."
    )
  if getattr(group, "host_resident", False):
    raise ValueError("`host_resident` of a group must be False, got True.")
  for spec in layer_specs(group.kv_cache_spec):
    for name, reason in _REFUSED.items():
      if has_class(spec, name):
        raise ValueError(
          f"`kv_cache_spec` must not be a {name}: {reason}. Use vLLM's own "
          "KVCacheManager for this model."
        )


def _is_running_state(spec: Any) -> bool:
  return (
    has_class(spec, "MambaSpec")
    and getattr(spec, "mamba_cache_mode", "none") != "align"
  )


def _kind_of(spec: Any, longest: int, enable_caching: bool) -> GroupKind:
  size = spec.block_size
  if has_class(spec, "MambaSpec"):
    return _state_kind(spec, longest, enable_caching)
  if has_class(spec, "SlidingWindowSpec"):
    _check_window(spec)
    return SlidingWindow(spec.sliding_window, page_size=size)
  if has_class(spec, "ChunkedLocalAttentionSpec"):
    return ChunkedLocal(spec.attention_chunk_size, page_size=size)
  if has_class(spec, "CrossAttentionSpec"):
    return CrossAttention(page_size=size)
  if has_class(spec, "FullAttentionSpec"):
    return FullAttention(page_size=size)
  raise ValueError(
    f"`kv_cache_spec` must be one of {sorted(_KINDS)}, got {spec!r}."
  )


def _check_window(spec: Any) -> None:
  for name in ("extra_retained_tokens", "bounded_replay"):
    if getattr(spec, name, None):
      raise ValueError(
        f"`{name}` of a window must be 0 or False, got {getattr(spec, name)}."
      )


def _state_kind(spec: Any, longest: int, enable_caching: bool) -> GroupKind:
  if getattr(spec, "num_prefill_checkpoint_blocks", 0):
    raise ValueError(
      "`num_prefill_checkpoint_blocks` of a MambaSpec must be 0, got "
      f"{spec.num_prefill_checkpoint_blocks}."
    )
  scratch = getattr(spec, "num_speculative_blocks", 0)
  if not _is_running_state(spec):
    return Recurrent(scratch, page_size=spec.block_size)
  if enable_caching:
    raise ValueError(
      "`mamba_cache_mode` must be 'align' with enable_caching=True, got "
      f"{spec.mamba_cache_mode!r}."
    )
  return RunningState(scratch, page_size=longest)


def check_sizes(
  kinds: Sequence[GroupKind],
  *,
  scheduler_block_size: int,
  hash_block_size: int,
  enable_caching: bool,
) -> None:
  """Raises for block sizes with which hits in vLLM end inside blocks."""
  if not enable_caching:
    return  # There is no hit that could end anywhere.
  sizes = [kind.page_size or 0 for kind in kinds]
  if scheduler_block_size != math.lcm(*sizes):
    raise ValueError(
      "`scheduler_block_size` must be the least common multiple of all block "
      f"sizes, {math.lcm(*sizes)}, got {scheduler_block_size}."
    )
  if any(size % hash_block_size for size in sizes):
    raise ValueError(
      f"`hash_block_size` must divide all block sizes, {sizes}, got "
      f"{hash_block_size}."
    )
  states = [kind.page_size for kind in kinds if kind.holds_states]
  if any(size != hash_block_size for size in states):
    raise ValueError(
      "`hash_block_size` must be the block size of MambaSpec groups, "
      f"{states}, got {hash_block_size}: hits inside a block are not supported."
    )


def draft_groups(
  groups: Sequence[Any], kinds: Sequence[GroupKind], use_eagle: bool
) -> set[int]:
  """Returns the groups of a draft model, as vLLM flags them.

  Raises:
    ValueError: only some of the groups would drop their last block.
  """
  flagged = {
    number
    for number, group in enumerate(groups)
    if getattr(group, "is_eagle_group", False)
  }
  everything = set(range(len(kinds)))
  if use_eagle and flagged and flagged != everything:
    raise ValueError(
      "`is_eagle_group` must be set for all groups or for none with "
      f"use_eagle=True, got groups {sorted(flagged)} of {len(kinds)}."
    )
  return flagged or (everything if use_eagle else set())


def check_options(**options: tuple[int, int]) -> None:
  """Raises for unsupported options, name=(value, maximum)."""
  for name, (value, maximum) in options.items():
    if value > maximum:
      raise ValueError(
        f"`{name}` must be at most {maximum}, got {value}: more is "
        "not supported by jaxkv.host.vllm."
      )


def retention(
  kv_cache_config: Any,
  kinds: Sequence[GroupKind],
  scheduler_block_size: int,
  enable_caching: bool,
) -> int | None:
  """Reads `prefix_cache_retention_interval` of vLLM's config.

  Raises:
    ValueError: it is not a multiple of the hit's granularity.
  """
  name = "prefix_cache_retention_interval"
  interval = getattr(kv_cache_config, name, None)
  if interval is None:
    return None
  if interval < 0:
    raise ValueError(f"`{name}` must be non-negative or None, got {interval}.")
  sparse = [isinstance(kind, SlidingWindow | Recurrent) for kind in kinds]
  if interval and not any(sparse):
    raise ValueError(
      f"`{name}` must be 0 or None for a model with no sliding-window or Mamba "
      f"group, got {interval}."
    )
  if interval % scheduler_block_size:
    raise ValueError(
      f"`{name}` must be a multiple of scheduler_block_size, "
      f"{scheduler_block_size}, got {interval}."
    )
  return interval if enable_caching else None


def holds_tokens(kind: GroupKind) -> bool:
  """True if blocks of a kind hold K/V of the sequence's own tokens."""
  return not (
    kind.holds_states or kind.holds_encoder or isinstance(kind, RunningState)
  )
