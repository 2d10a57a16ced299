"""Converts eSurge's specs of KV-cache groups to `GroupKind`s."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any
from typing import ClassVar

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.cache.group_kinds import ChunkedLocal
from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.group_kinds import SlidingWindow


@dataclasses.dataclass(frozen=True)
class ChunkKeepingLastPage(ChunkedLocal):
  """Chunked layers whose sequences keep their last full page, as in eSurge.

  That page can be freed only when the next page is full.
  """

  keeps_last_page: ClassVar[bool] = True


def spec_of(group: Any) -> Any:
  """Returns `group` if it is a `GroupKind`, else its `kv_cache_spec`."""
  if isinstance(group, GroupKind):
    return group
  spec = getattr(group, "kv_cache_spec", None)
  if spec is None or not hasattr(spec, "page_size"):
    raise TypeError(
      "`kv_cache_groups` must hold group kinds, or objects with a "
      f"kv_cache_spec that has a page_size, got {group!r}."
    )
  return spec


def has_states(spec: Any) -> bool:
  """True for eSurge's `MambaSpec`; each sequence has one page for its state."""
  return hasattr(spec, "shapes")


def kinds_of(
  specs: Sequence[Any], max_model_len: int, *, caching: bool
) -> tuple[GroupKind, ...]:
  """Returns the kind of each group, from a `GroupKind` or eSurge's spec.

  The attributes `sliding_window`, `attention_chunk_size` and `shapes`
  distinguish specs.
  """
  as_count("max_model_len", max_model_len, 1)
  sizes = [spec.page_size or 1 for spec in specs if not has_states(spec)]
  # A page of states has room for the longest sequence. Its size is a multiple
  # of all other sizes, so the least common multiple of all sizes is not larger.
  block = math.lcm(*sizes)
  state_size = -(-max_model_len // block) * block
  return tuple(_kind_of(spec, state_size, caching) for spec in specs)


def _kind_of(spec: Any, state_size: int, caching: bool) -> GroupKind:
  if isinstance(spec, GroupKind):
    return spec
  if has_states(spec):
    return FullAttention(page_size=state_size)
  # eSurge's `FullAttentionSpec` has both attributes, and other specs have one.
  size = spec.page_size
  has_window = hasattr(spec, "sliding_window")
  has_chunk = hasattr(spec, "attention_chunk_size")
  if has_window and not has_chunk:
    return SlidingWindow(window=spec.sliding_window, page_size=size)
  if has_chunk and not has_window:
    kind = ChunkKeepingLastPage if caching else ChunkedLocal
    return kind(chunk=spec.attention_chunk_size, page_size=size)
  return FullAttention(page_size=size)
