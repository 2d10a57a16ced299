"""Converts eSurge's KV-cache group specs to `GroupKind`."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any
from typing import ClassVar

from jaxkv._src.cache.group_kinds import ChunkedLocal
from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.group_kinds import SlidingWindow
from jaxkv._src.host.calls import at_least


@dataclasses.dataclass(frozen=True)
class ChunkKeepingLastPage(ChunkedLocal):
  """Chunked layers whose sequences keep their last full page, as in eSurge.

  The page is freed when the next one is full.
  """

  keeps_last_page: ClassVar[bool] = True


def kinds_of(
  groups: Sequence[Any], max_model_len: int, *, caching: bool
) -> tuple[GroupKind, ...]:
  """Returns the kind of each group.

  Args:
    groups: kinds, or objects with a `kv_cache_spec` that has a `page_size`, and
      `sliding_window`, `attention_chunk_size` or `shapes`. A spec that has both
      window and chunk, even None, is full attention.
    max_model_len: tokens of the longest sequence.
    caching: True if pages are published.

  Raises:
    TypeError: an object is neither.
    ValueError: a size is out of range.
  """
  at_least("max_model_len", max_model_len, 1)
  specs = [_spec_of(group) for group in groups]
  sizes = [spec.page_size or 1 for spec in specs if not _has_states(spec)]
  # One page for a whole sequence, and a multiple of all other pages.
  block = math.lcm(*sizes)
  whole = -(-max_model_len // block) * block
  return tuple(_kind_of(spec, whole, caching) for spec in specs)


def has_states(group: Any) -> bool:
  """True if a group holds states, one page a sequence."""
  return _has_states(_spec_of(group))


def shares_prefixes(group: Any) -> bool:
  """True if a group keeps every page, so that leading ones can be shared."""
  spec = _spec_of(group)
  if isinstance(spec, GroupKind):
    return isinstance(spec, FullAttention)
  return isinstance(_kind_of(spec, 1, False), FullAttention) and (
    not _has_states(spec)
  )


def page_size_of(group: Any) -> int:
  """Returns the tokens a page of a group."""
  return _spec_of(group).page_size


def _spec_of(group: Any) -> Any:
  if isinstance(group, GroupKind):
    return group
  spec = getattr(group, "kv_cache_spec", None)
  if spec is None or not hasattr(spec, "page_size"):
    raise TypeError(
      "`kv_cache_groups` must hold group kinds, or objects with a "
      f"kv_cache_spec that has a page_size, got {group!r}."
    )
  return spec


def _has_states(spec: Any) -> bool:
  return not isinstance(spec, GroupKind) and hasattr(spec, "shapes")


def _kind_of(spec: Any, whole: int, caching: bool) -> GroupKind:
  if isinstance(spec, GroupKind):
    return spec
  if _has_states(spec):
    return FullAttention(page_size=whole)
  size = spec.page_size
  has_window = hasattr(spec, "sliding_window")
  has_chunk = hasattr(spec, "attention_chunk_size")
  if has_window and not has_chunk:
    return SlidingWindow(window=spec.sliding_window, page_size=size)
  if has_chunk and not has_window:
    kind = ChunkKeepingLastPage if caching else ChunkedLocal
    return kind(chunk=spec.attention_chunk_size, page_size=size)
  return FullAttention(page_size=size)
