"""New blocks of requests, for workers that zero them and for metrics."""

from collections.abc import Sequence

from jaxkv._src.host.atomic import atomic
from jaxkv._src.host.manager import CacheManager
from jaxkv._src.host.vllm.block_pool import BlockPool


class NewBlocks:
  """Records the blocks of allocations.

  Attributes:
    are_recorded: True if a group is zeroed or metrics are collected.
    undo_log: that of the manager.
  """

  def __init__(
    self, manager: CacheManager, pool: BlockPool, is_zeroed: Sequence[bool]
  ):
    self.undo_log = manager.undo_log
    self.are_recorded = any(is_zeroed) or pool.metrics_collector is not None
    self._manager = manager
    self._pool = pool
    self._zeroed = {group for group, zeroes in enumerate(is_zeroed) if zeroes}
    self._ids: list[list[int]] = [[] for _ in is_zeroed]

  def add(
    self,
    request_id: str,
    new: Sequence[list[int]],
    hit: Sequence[list[int]] | None,
    skipped_groups: Sequence[int],
  ) -> None:
    """Adds the blocks of an allocation.

    Args:
      request_id: the request.
      new: the new blocks by group, without those for external tokens.
      hit: the blocks with which the request begins; None if it began before.
      skipped_groups: groups whose blocks for external tokens others fill.
    """
    tables = self._manager.get_page_ids(request_id)
    for group, blocks in enumerate(new):
      loaded = []
      if hit is not None:
        hits = set(hit[group]) if hit else set()
        # Of the table, the part before the new blocks: null blocks behind a
        # window, blocks of the hit, and blocks for external tokens.
        old = tables[group][: len(tables[group]) - len(blocks)]
        self._pool.count_accessed(page for page in old if page in hits)
        loaded = [page for page in old if page and page not in hits]
      zeroed = blocks if group in skipped_groups else [*loaded, *blocks]
      self._add_zeroed(group, zeroed)
      self._pool.count_allocated([*loaded, *blocks])

  @atomic
  def add_from(self, request_id: str, start_token: int) -> None:
    """Adds a request's blocks from a token on."""
    tables = self._manager.get_page_ids(request_id)
    sizes = self._manager.config.page_sizes
    for group, (table, size) in enumerate(zip(tables, sizes, strict=True)):
      self._add_zeroed(group, table[start_token // size :])

  @atomic
  def take(self) -> list[int]:
    """Returns the blocks to zero since the last call, group by group."""
    self.undo_log.save_attribute(self, "_ids")
    taken, self._ids = self._ids, [[] for _ in self._ids]
    return [number for ids in taken for number in ids]

  def _add_zeroed(self, group: int, blocks: Sequence[int]) -> None:
    if group in self._zeroed:
      self.undo_log.save_length(self._ids[group])
      self._ids[group] += blocks
