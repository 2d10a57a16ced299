"""Blocks as vLLM's schedulers see them: a pool and a number, no state."""

import dataclasses
import itertools
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

from jaxkv._src.host.types import CachePages

BlockIds = tuple[list[int], ...]


class KVCacheBlock:
  """A block of a pool; every attribute but the first two is read when asked.

  Attributes:
    block_id: its number.
    pool: the `BlockPool`.
  """

  __slots__ = ("block_id", "pool")

  def __init__(self, block_id: int, pool: Any):
    self.block_id = block_id
    self.pool = pool

  @property
  def is_null(self) -> bool:
    """Whether it is the null block, which stands where a window moved on."""
    return self.block_id == 0

  @property
  def ref_cnt(self) -> int:
    """Its references; 0 for the null block."""
    return int(self.pool.ref_counts()[self.block_id])

  @property
  def block_hash(self) -> bytes | None:
    """Its hash and four bytes of its group; None if it is not cached."""
    return self.pool.hashes_of([self.block_id])[0]

  @property
  def block_hash_num_tokens(self) -> int | None:
    """Tokens from the sequence's start to its end; None if not cached."""
    return self.pool.num_hashed_tokens([self.block_id])[0]

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, KVCacheBlock):
      return NotImplemented
    return self.block_id == other.block_id and self.pool is other.pool

  def __hash__(self) -> int:
    return hash((self.block_id, id(self.pool)))

  def __repr__(self) -> str:
    return f"KVCacheBlock(block_id={self.block_id}, ref_cnt={self.ref_cnt})"


@dataclasses.dataclass
class KVCacheBlocks:
  """Blocks by group.

  Attributes:
    blocks: a list of blocks for each group; the null block where a window has
      moved on. An empty tuple for no blocks.
    found: what a lookup knows besides the blocks, so that the allocation need
      not hash the tokens again.
  """

  blocks: tuple[Sequence[KVCacheBlock], ...]
  found: CachePages | None = dataclasses.field(
    default=None, compare=False, repr=False
  )

  @property
  def pages(self) -> CachePages | None:
    """The same for the core; None if there is no block."""
    if self.found is not None or not any(self.blocks):
      return self.found
    return CachePages(self.get_block_ids())

  def __add__(self, other: "KVCacheBlocks") -> "KVCacheBlocks":
    """Blocks of both, group by group."""
    pairs = zip(self.blocks, other.blocks, strict=True)
    return KVCacheBlocks(tuple([*one, *two] for one, two in pairs))

  def get_block_ids(
    self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
  ) -> Any:
    """Ids by group.

    Args:
      allow_none: whether the answer is None if there is no block at all.
      group_ids: the groups asked for; None for all.

    Returns:
      A tuple of lists, or None.
    """
    groups = self.blocks
    if group_ids is not None:
      groups = tuple(groups[number] for number in group_ids)
    if allow_none and not any(groups):
      return None
    return tuple([block.block_id for block in group] for group in groups)

  def get_unhashed_block_ids(self) -> list[int]:
    """Ids of the only group's blocks that are not cached now.

    Raises:
      ValueError: there are several groups.
    """
    if len(self.blocks) != 1:
      raise ValueError(
        "KVCacheBlocks must have one group, got "
        f"{len(self.blocks)}; use get_unhashed_block_ids_all_groups."
      )
    return [block.block_id for block in _unhashed(self.blocks[0])]

  def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
    """Ids of blocks that are not cached now, by group; no null blocks."""
    return [
      [block.block_id for block in _unhashed(group) if not block.is_null]
      for group in self.blocks
    ]

  def new_empty(self) -> "KVCacheBlocks":
    """No blocks, for the same number of groups."""
    return KVCacheBlocks(tuple(() for _ in self.blocks))


def _unhashed(blocks: Sequence[Any]) -> Iterator[Any]:
  """The blocks that are not cached; one reading for all that are ours."""
  if not blocks or not isinstance(blocks[0], KVCacheBlock):
    return (block for block in blocks if block.block_hash is None)
  hashes = blocks[0].pool.hashes_of([block.block_id for block in blocks])
  return itertools.compress(blocks, (one is None for one in hashes))
