"""Converts vLLM's `KVCacheConfig` to group kinds; refuses unsupported options.

vLLM is not imported: a spec is recognized by the names of its class and bases.
"""

import math
from collections.abc import Sequence
from typing import Any

from jaxkv._src.cache.group_kinds import ChunkedLocal
from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.group_kinds import Recurrent
from jaxkv._src.cache.group_kinds import SlidingWindow
from jaxkv._src.host.groups import CrossAttention
from jaxkv._src.host.groups import SpeculativeRecurrent
from jaxkv._src.host.vllm.events import EventGroup

# The supported specs, each with its `kv_cache_spec_kind` in events.
_NAMES = {
  "ChunkedLocalAttentionSpec": "chunked_local_attention",
  "CrossAttentionSpec": "cross_attention",
  "FullAttentionSpec": "full_attention",
  "MLAAttentionSpec": "mla_attention",
  "MambaSpec": "mamba",
  "SinkFullAttentionSpec": "sink_full_attention",
  "SlidingWindowMLASpec": "sliding_window_mla",
  "SlidingWindowSpec": "sliding_window",
}
# Specs that are refused, even those with a supported base, such as `RSWASpec`.
_REFUSED = {
  "CircularBufferSpec",
  "EncoderOnlyAttentionSpec",
  "HiSparseHotSpec",
  "HiSparseResidentSpec",
  "RSWASpec",
}


def require(name: str, value: Any, expected: Any) -> None:
  """Raises ValueError unless an option is `expected`, 0, False or None."""
  value = getattr(value, "value", value)  # The value of an enum member.
  if value and value != expected:
    raise ValueError(
      f"`{name}` must be {expected!r}, got {value!r}; use vLLM's own "
      "KVCacheManager for other values."
    )


def require_attributes(owner: Any, **expected: Any) -> None:
  """Calls `require` for attributes of `owner`; a missing one counts as None."""
  for name, value in expected.items():
    require(name, getattr(owner, name, None), value)


def is_attention(spec: Any) -> bool:
  """True if all layers of a group's spec are attention layers."""
  return all("AttentionSpec" in _classes(layer) for layer in _layers(spec))


def event_groups(
  specs: Sequence[Any], hash_block_size: int
) -> list[EventGroup]:
  """Returns the `EventGroup` of each spec."""
  groups = []
  for number, spec in enumerate(specs):
    windows = {
      layer.sliding_window if "SlidingWindowSpec" in _classes(layer) else None
      for layer in _layers(spec)
    }
    groups.append(
      EventGroup(
        number,
        spec.block_size,
        spec.block_size // hash_block_size,
        _event_kind(spec),
        windows.pop() if len(windows) == 1 else None,
      )
    )
  return groups


def _event_kind(spec: Any) -> str:
  layers = _layers(spec)
  names = {_NAMES[_supported_class(layer)] for layer in layers}
  if len(names) == 1:
    return names.pop()
  is_full = all("FullAttentionSpec" in _classes(layer) for layer in layers)
  return "full_attention" if is_full else "unknown"


def group_kinds(
  groups: Sequence[Any],
  max_model_len: int,
  *,
  enable_caching: bool,
  use_eagle: bool,
) -> list[GroupKind]:
  """Converts groups, each with a `kv_cache_spec`, to group kinds.

  Raises:
    ValueError: a spec or an option of a group is not supported.
  """
  flagged = {bool(getattr(group, "is_eagle_group", False)) for group in groups}
  if use_eagle and len(flagged) > 1:
    raise ValueError(
      "`is_eagle_group` must be set for all groups or for none with "
      "use_eagle=True, got some."
    )
  specs = []
  for group in groups:
    require_attributes(group, role="default", host_resident=False)
    for layer in _layers(group.kv_cache_spec):
      _supported_class(layer)
    specs.append(_layers(group.kv_cache_spec)[0])
  sizes = [spec.block_size for spec in specs if not _is_running_state(spec)]
  align = math.lcm(*sizes)
  # A page of a running state has room for the longest sequence.
  longest = -(-max_model_len // align) * align
  for spec in filter(_is_running_state, specs):
    if spec.block_size < max_model_len:
      raise ValueError(
        "`block_size` of a MambaSpec must be at least max_model_len, "
        f"{max_model_len}, unless in mode 'align', got {spec.block_size}."
      )
  if enable_caching and any(map(_is_running_state, specs)):
    raise ValueError(
      "`mamba_cache_mode` must be 'align' with enable_caching, got another one."
    )
  return [_kind_of(spec, longest) for spec in specs]


def _kind_of(spec: Any, longest: int) -> GroupKind:
  size = spec.block_size
  match _supported_class(spec):
    case "MambaSpec":
      require_attributes(spec, num_prefill_checkpoint_blocks=0)
      if _is_running_state(spec):
        size = longest
      if spec.num_speculative_blocks:
        return SpeculativeRecurrent(spec.num_speculative_blocks, page_size=size)
      return Recurrent(page_size=size)
    case "SlidingWindowSpec" | "SlidingWindowMLASpec":
      require_attributes(spec, extra_retained_tokens=0, bounded_replay=False)
      return SlidingWindow(spec.sliding_window, page_size=size)
    case "ChunkedLocalAttentionSpec":
      return ChunkedLocal(spec.attention_chunk_size, page_size=size)
    case "CrossAttentionSpec":
      return CrossAttention(page_size=size)
    case _:
      return FullAttention(page_size=size)


def check_sizes(
  kinds: Sequence[GroupKind], scheduler_block_size: int, hash_block_size: int
) -> None:
  """Raises ValueError unless both sizes fit the block sizes of the groups."""
  sizes = [kind.page_size or 0 for kind in kinds]
  if scheduler_block_size != math.lcm(*sizes):
    raise ValueError(
      "`scheduler_block_size` must be the least common multiple of all block "
      f"sizes, {math.lcm(*sizes)}, got {scheduler_block_size}."
    )
  # With a smaller `hash_block_size`, hits in vLLM can end inside a Mamba block.
  states = [kind.page_size for kind in kinds if kind.holds_states]
  is_divisor = all(size % hash_block_size == 0 for size in sizes)
  if not is_divisor or any(size != hash_block_size for size in states):
    raise ValueError(
      f"`hash_block_size` must divide all block sizes, {sizes}, and be the "
      f"block size of MambaSpec groups, {states}, got {hash_block_size}."
    )


def retention(
  kv_cache_config: Any,
  kinds: Sequence[GroupKind],
  scheduler_block_size: int,
  enable_caching: bool,
) -> int | None:
  """Checks `prefix_cache_retention_interval`; returns None without caching."""
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


def _layers(spec: Any) -> list[Any]:
  """Returns `[spec]`, or the specs that a `UniformTypeKVCacheSpecs` has."""
  if "UniformTypeKVCacheSpecs" in _classes(spec):
    return list(spec.kv_cache_specs.values())
  return [spec]


def _classes(spec: Any) -> list[str]:
  """Returns the names of a spec's class and bases, the class first."""
  return [base.__name__ for base in type(spec).__mro__]


def _supported_class(spec: Any) -> str:
  """Returns the name of the most derived supported class of a spec."""
  for name in _classes(spec):
    if name in _REFUSED:
      break
    if name in _NAMES:
      return name
  raise ValueError(
    f"`kv_cache_spec` must be one of {sorted(_NAMES)}, got {spec!r}; use "
    "vLLM's own KVCacheManager for this model."
  )


def _is_running_state(spec: Any) -> bool:
  is_state = _supported_class(spec) == "MambaSpec"
  return is_state and spec.mamba_cache_mode != "align"
