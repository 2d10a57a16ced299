"""Layer groups as eSurge specifies them, as kinds of this library."""

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
  """Layers with chunks, whose sequences keep their last full page, as eSurge's.

  It goes back when the next page is full.
  """

  keeps_last_page: ClassVar[bool] = True


def kinds_of(
  groups: Sequence[Any], max_model_len: int, *, caching: bool
) -> tuple[GroupKind, ...]:
  """The kind of each group.

  Args:
    groups: kinds, or objects with a `kv_cache_spec`, of which these attributes
      are read: `page_size`, and `sliding_window`, `attention_chunk_size` or
      `shapes`. A spec with both a window and a chunk, even None, is that of
      full attention.
    max_model_len: tokens of the longest sequence.
    caching: whether pages are published.

  Raises:
    TypeError: an object is none of these.
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
  """Whether a group is one of states, of which a sequence has one page."""
  return _has_states(_spec_of(group))


def shares_prefixes(group: Any) -> bool:
  """Whether a group keeps every page, so that leading ones can be common."""
  spec = _spec_of(group)
  if isinstance(spec, GroupKind):
    return isinstance(spec, FullAttention)
  return isinstance(_kind_of(spec, 1, False), FullAttention) and (
    not _has_states(spec)
  )


def page_size_of(group: Any) -> int:
  """Tokens a page of a group."""
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
