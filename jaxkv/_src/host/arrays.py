"""A manager's calls as arrays for the device, and its answers as lists."""

from collections.abc import Iterator

import numpy as np

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.state import CacheState
from jaxkv._src.host.step import Advanced
from jaxkv._src.host.step import Call
from jaxkv._src.host.types import CachePages

_PAGES_AT_ONCE = 64
_ROW_OF = {name: row for row, name in enumerate(Call._fields)}
_NOWHERE = np.iinfo(np.int32).max


def call_fields(
  num_rows: int, num_asked: int, **fields: int | np.ndarray
) -> np.ndarray:
  """int32[F, R]: the fields of `step.Call`, 0 where not given.

  No slot has the number of the rows past those asked for.
  """
  call = np.zeros((len(Call._fields), num_rows), np.int32)
  call[_ROW_OF["slots"]] = _NOWHERE
  for name, values in fields.items():
    call[_ROW_OF[name], :num_asked] = values
  return call


def padded_hit(
  config: CacheConfig, hit: CachePages | None
) -> tuple[np.ndarray, np.ndarray]:
  """int32[1, G, M] and int32[1, G]: the pages of a hit, and how many."""
  shape = (1, config.num_groups, config.pages_per_slot)
  pages, stop = np.zeros(shape, np.int32), np.zeros(shape[:2], np.int32)
  for group, column in enumerate(hit.pages if hit else ()):
    pages[0, group, : len(column)] = column
    stop[0, group] = len(column)
  return pages, stop


def page_parts(pages: list[int]) -> Iterator[np.ndarray]:
  """int32[_PAGES_AT_ONCE] each, with the null page behind the last page."""
  for begin in range(0, len(pages), _PAGES_AT_ONCE):
    part = pages[begin : begin + _PAGES_AT_ONCE]
    padded = np.zeros((_PAGES_AT_ONCE,), np.int32)
    padded[: len(part)] = part
    yield padded


def answers(
  state: CacheState, slots: np.ndarray, out: Advanced
) -> list[CachePages | None]:
  """New pages of each row, None where there were too few.

  Few rows have any in one step.
  """
  nothing = CachePages(tuple([] for _ in state.config.groups))
  results: list[CachePages | None] = [nothing] * len(slots)
  counts = out.stop - out.begin
  rows = np.flatnonzero(counts.any(axis=1))
  counts, most = counts[rows], counts.max()
  pages = out.pages[rows, :, :most]
  if most > pages.shape[2]:
    table = np.asarray(state.page_table)[slots[rows]]
    columns = out.begin[rows][..., None] + np.arange(most)
    columns = np.minimum(columns, table.shape[2] - 1)
    pages = np.take_along_axis(table, columns, axis=2)
  for row, groups, count in zip(
    rows.tolist(), pages.tolist(), counts.tolist(), strict=True
  ):
    new = tuple([own[:n] for own, n in zip(groups, count, strict=True)])
    results[row] = CachePages(new, new)
  for row in np.flatnonzero(~out.ok[: len(slots)]):
    results[row] = None
  return results
