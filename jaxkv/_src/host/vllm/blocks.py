"""Blocks for vLLM's schedulers: views of a pool, without state."""

import dataclasses
from collections.abc import Sequence
from typing import Any


class KVCacheBlock:
  """A block of a pool. Its properties read the newest state.

  Attributes:
    block_id: its id.
    pool: the `BlockPool`.
    is_null: True for the null block, which replaces blocks behind a window.
  """

  __slots__ = ("block_id", "is_null", "pool")

  def __init__(self, block_id: int, pool: Any):
    self.block_id = block_id
    self.pool = pool
    self.is_null = block_id == 0

  @property
  def ref_cnt(self) -> int:
    """Its reference count; 0 for the null block."""
    return self.pool.ref_count(self.block_id)

  @property
  def block_hash(self) -> bytes | None:
    """Its hash and four bytes of its group; None if it is not cached."""
    return self.pool.hashes.hash_of(self.block_id)

  @property
  def block_hash_num_tokens(self) -> int | None:
    """Tokens from the sequence's start to its end; None if not cached."""
    return self.pool.hashes.num_tokens(self.block_id)

  def __repr__(self) -> str:
    return f"KVCacheBlock(block_id={self.block_id}, ref_cnt={self.ref_cnt})"


@dataclasses.dataclass
class KVCacheBlocks:
  """Blocks by group.

  Attributes:
    blocks: a list of blocks for each group, with the null block behind a
      window; empty tuples for no blocks.
  """

  blocks: tuple[Sequence[KVCacheBlock], ...]

  def __add__(self, other: "KVCacheBlocks") -> "KVCacheBlocks":
    """Concatenates the blocks of each group."""
    pairs = zip(self.blocks, other.blocks, strict=True)
    return KVCacheBlocks(tuple([*first, *second] for first, second in pairs))

  def get_block_ids(
    self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
  ) -> Any:
    """Returns ids by group.

    Args:
      allow_none: returns None in place of empty lists.
      group_ids: the groups to return; None for all.
    """
    groups = self.blocks
    if group_ids is not None:
      groups = tuple(groups[number] for number in group_ids)
    if allow_none and not any(groups):
      return None
    return tuple([block.block_id for block in group] for group in groups)

  def get_unhashed_block_ids(self) -> list[int]:
    """Returns ids of the only group's blocks that are not cached now.

    Raises:
      ValueError: there are several groups.
    """
    (unhashed,) = self.get_unhashed_block_ids_all_groups()
    return unhashed

  def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
    """Returns ids of blocks that are not cached now, without null blocks."""
    return [
      [
        block.block_id
        for block in group
        if block.block_hash is None and not block.is_null
      ]
      for group in self.blocks
    ]

  def new_empty(self) -> "KVCacheBlocks":
    """Returns empty blocks with as many groups."""
    return KVCacheBlocks(tuple(() for _ in self.blocks))
