"""A manager with page references and a readable event log, for vLLM's classes.

Pages here are blocks in `jaxkv._src.host.vllm.manager`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.cache import telemetry
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.prefix import rules
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.verbs.free import free
from jaxkv._src.cache.verbs.pin import touch
from jaxkv._src.cache.verbs.pin import unpin
from jaxkv._src.host import calls
from jaxkv._src.host import pins
from jaxkv._src.host.atomic import atomic
from jaxkv._src.host.atomic import query
from jaxkv._src.host.atomic import transition
from jaxkv._src.host.lookup import fetched
from jaxkv._src.host.manager import CacheManager
from jaxkv._src.host.request import tokens_of
from jaxkv._src.host.types import CachePages

_ROWS = 64  # Of the log that are read at once.


class LogRow(NamedTuple):
  """A row of the event log."""

  kind: int  # STORED, REMOVED or CLEARED of `jaxkv._src.cache.telemetry`
  page: int
  group: int
  column: int  # in the page table; for stored pages
  key: bytes
  parent: bytes  # key of the page before; for stored pages


class Columns(NamedTuple):
  """Columns of a request's pages, by group."""

  first: list[int]  # the first column that a call filled
  stop: list[int]  # one past the last
  skipped: list[int]  # columns that the request skipped when it began


class _Beginning:
  """A request with only its first tokens."""

  def __init__(self, request: Any, num_tokens: int):
    self._request = request
    self.token_ids = tokens_of(request)[:num_tokens]

  def __getattr__(self, name: str) -> Any:
    return getattr(self._request, name)


class PageCache(CacheManager):
  """A `CacheManager` that also holds references to single pages.

  Attributes:
    num_rows_read: rows of the event log read since it was emptied.
  """

  num_rows_read = 0

  @property
  def is_full(self) -> bool:
    """True if `max_requests` requests hold pages."""
    return self._slots.is_full

  def request_ids(self) -> list[str]:
    """Returns the requests that hold pages."""
    return list(self._slots.by_name)

  @property
  def most_pages(self) -> tuple[int, ...]:
    """The most pages that one sequence ever holds, by group."""
    return self._limits.most_pages

  def num_needed_pages(
    self,
    request_id: str,
    num_tokens: int,
    num_state_tokens: int,
    num_encoder_tokens: int,
    *,
    capped: bool,
  ) -> int:
    """Counts the further pages that a request needs.

    Recurrent groups count `num_state_tokens`. With `capped`, a group that frees
    pages counts the most that it holds at once.
    """
    config, needed = self.config, 0
    held = self.get_page_ids(request_id)
    for group, kind in enumerate(config.groups):
      tokens = num_state_tokens if kind.holds_states else num_tokens
      tokens = num_encoder_tokens if kind.holds_encoder else tokens
      columns = -(-tokens // config.page_sizes[group]) + kind.num_speculative
      new = max(columns - len(held[group]), 0)
      if kind.holds_states:
        # The columns between two states hold the null page.
        new = min(new, 1 + (0 if held[group] else kind.num_speculative))
      elif capped:
        most = min(columns, self.most_pages[group])
        new = max(most - len(held[group]), 0)
      needed += new
    return needed

  def num_published_tokens(self, request_id: str) -> int:
    """Returns the number of a request's published tokens."""
    slot = self._slots.by_name.get(request_id)
    return 0 if slot is None else int(self._slots.sent[slot])

  def find_pages(
    self, request: Any, most: int | None
  ) -> tuple[CachePages, int]:
    """Runs `get_computed_pages` for a hit of at most `most` tokens."""
    if most is None:
      return self.get_computed_pages(request)
    return self.get_computed_pages(_Beginning(request, most + 1))

  @atomic
  def hand_over(self, request: Any) -> list[int]:
    """Removes a request, and returns its pages with their references.

    `release_pages` drops the references.
    """
    name = request.request_id
    slot = self._slots.by_name.get(name)
    if slot is None:
      return []
    pages = [page for column in self.get_page_ids(name) for page in column]

    def then(_: None) -> list[int]:
      if self._slots.by_name.get(name) == slot:
        self._slots.forget(name)
      self._slots.release(slot)
      return [page for page in pages if page]

    return self.run(_hand_over, np.asarray([slot], np.int32), then=then)

  @atomic
  def take_pages(self, count: int) -> list[int]:
    """Takes pages from the free queue, until `release_pages`.

    Raises:
      ValueError: too few are free.
    """
    if count > self.num_free_pages:
      raise ValueError(
        f"`count` must be at most {self.num_free_pages}, got {count}: more "
        "pages are not free."
      )
    width = calls.width_for(count)
    pages = self.run(
      _take, np.asarray(count, np.int32), then=np.asarray, width=width
    )
    return pages[:count].tolist()

  @atomic
  def hold_pages(self, page_ids: Sequence[int]) -> None:
    """Adds a reference to pages; free ones leave the free queue.

    Raises:
      ValueError: a page is neither in use nor cached.
    """
    if page_ids:
      ok = self.run(_hold, calls.pad_pages(page_ids), then=np.asarray)
      self._check(page_ids, ok, "in use or cached, to be held")

  @atomic
  def release_pages(self, page_ids: Sequence[int]) -> None:
    """Drops references of `hold_pages`, `take_pages` and `hand_over`.

    The first page is evicted first.

    Raises:
      ValueError: a reference does not exist.
    """
    if page_ids:
      ok = self.run(_release, calls.pad_pages(page_ids), then=np.asarray)
      self._check(page_ids, ok, "held, and not by a request")

  def _check(self, page_ids: Sequence[int], ok: np.ndarray, what: str) -> None:
    wrong = [page for page, good in zip(page_ids, ok, strict=False) if not good]
    if wrong:
      raise ValueError(f"`page_ids` must be {what}, got {wrong} among them.")

  @atomic
  def read_log(
    self, before: int = 0, after: int = 0, behind: int = 0
  ) -> tuple[list[LogRow], Columns]:
    """Reads the rows of the event log since the last reading.

    Args:
      before: a request's published tokens before a call.
      after: its published tokens now.
      behind: tokens with which it began.

    Returns:
      The rows, oldest first, and the columns of these token counts.
    """
    rows, columns, read = [], Columns([], [], []), self.num_rows_read
    while True:
      tokens = np.asarray([read, before, after, behind], np.int32)
      packed = fetched(self.ask(_read_log, tokens))
      count, columns = int(packed[0]), _columns(packed, self.config.num_groups)
      num_new = min(count - read, _ROWS)
      body = packed[1 + 3 * self.config.num_groups :].reshape(_ROWS, -1)
      rows += [_row(values) for values in body[:num_new]]
      read += num_new
      if read == count:
        break
    self.num_rows_read = read
    if count > self.config.event_log // 2:

      def then(_: None) -> None:
        self.num_rows_read = 0

      self.run(_empty_log, then=then)
    return rows, columns

  def keys_of(self, page_ids: Sequence[int]) -> list[bytes | None]:
    """Returns the keys of pages; None for pages that are not cached."""
    if not self.config.prefix_caching or not len(page_ids):
      return [None] * len(page_ids)
    cached, keys, _ = self._entries()
    return [
      hashing.key_bytes(keys[page]) if cached[page] else None
      for page in page_ids
    ]

  def groups_of(self, page_ids: Sequence[int]) -> list[int]:
    """Returns the groups in which pages were last published."""
    if not self.config.event_log or not len(page_ids):
      return [0] * len(page_ids)
    group_of = self.read(lambda state: state.pool.events.group_of)
    return group_of[np.asarray(page_ids, np.int32)].tolist()

  def pages_of(self, key: bytes) -> list[int]:
    """Returns the cached pages with a key, in order of publication."""
    if not self.config.prefix_caching:
      return []
    cached, keys, age = self._entries()
    words = np.frombuffer(key, "<u4")
    pages = np.flatnonzero(np.all(keys == words, axis=1) & cached)
    return pages[np.argsort(age[pages])[::-1]].tolist()

  def _entries(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns, for all pages: whether they are cached, keys and ages."""
    cached, keys, age = jax.device_get(self.ask(_entries))
    return cached, keys, age

  def cached_keys(self) -> set[bytes]:
    """Returns the keys of all cached pages."""
    found = self.keys_of(range(self.config.num_pages))
    return {key for key in found if key is not None}

  def ref_counts(self) -> np.ndarray:
    """Returns int32[N], the reference counts of all pages."""
    return self.read(lambda state: state.pool.ref_count)


@transition
def _hand_over(state: CacheState, slots: Array) -> tuple[CacheState, None]:
  """Pins the pages of slots int32[1] and frees the slots."""
  columns = jnp.arange(state.config.pages_per_slot, dtype=jnp.int32)
  pages = indexing.take(state.page_table, slots)
  held = columns[None, None] < indexing.take(state.num_pages, slots)[..., None]
  state, _ = touch(state, pages, mask=held & (pages > 0))
  return free(state, slots=slots)[0], None


@transition
def _take(
  state: CacheState, count: Array, *, width: int
) -> tuple[CacheState, Array]:
  """Pops and pins pages; returns int32[width], padded by null pages."""
  pool, pages = pins.take(state.pool, count, width)
  return dataclasses.replace(state, pool=pool), pages


@transition
def _hold(state: CacheState, pages: Array) -> tuple[CacheState, Array]:
  """Pins pages int32[X], 0 for none; returns bool[X]: those pinned."""
  state, out = touch(state, pages, mask=pages > 0)
  return state, out.ok


@transition
def _release(state: CacheState, pages: Array) -> tuple[CacheState, Array]:
  """Unpins pages int32[X], 0 for none, in order."""
  pages = pages[::-1]  # The verb begins at the end.
  state, out = unpin(state, pages, mask=pages > 0)
  return state, out.ok[::-1]


@transition
def _empty_log(state: CacheState) -> tuple[CacheState, None]:
  log = state.pool.events
  assert log is not None
  pool = dataclasses.replace(state.pool, events=telemetry.empty_log(log))
  return dataclasses.replace(state, pool=pool), None


@query
def _entries(state: CacheState) -> tuple[Array, Array, Array]:
  """Returns bool[N], uint32[N, 4] and uint32[N] for `PageCache._entries`."""
  index = state.pool.index
  assert index is not None
  pages = jnp.arange(state.config.num_pages, dtype=jnp.int32)
  age = index.clock - prefix_index.stamp_of(index, pages)
  cached = prefix_index.contains(index, pages)
  return cached, prefix_index.key_of(index, pages), age


@query
def _read_log(state: CacheState, tokens: Array) -> Array:
  """Returns int32[X]: the number of events, columns by group, and log rows.

  `tokens` is int32[4]: the first row, and the arguments of
  `PageCache.read_log`.
  """
  log = state.pool.events
  assert log is not None
  first, before, after, behind = tokens
  rows = first + jnp.arange(_ROWS, dtype=jnp.int32)
  numbers = [log.kind, log.page, log.group, log.column]
  parts = [indexing.take(values, rows)[:, None] for values in numbers]
  for words in (log.key, log.parent):
    parts.append(
      lax.bitcast_convert_type(indexing.take(words, rows), jnp.int32)
    )
  ends = [
    rules.final_pages(state.config, count).reshape(-1)
    for count in (before, after)
  ]
  ends.append(state.config.sizes.skipped_pages(behind).reshape(-1))
  body = jnp.concatenate(parts, axis=1).reshape(-1)
  return jnp.concatenate([log.count[None], *ends, body])


def _columns(packed: np.ndarray, num_groups: int) -> Columns:
  ends = packed[1 : 1 + 3 * num_groups].reshape(3, num_groups)
  return Columns(*ends.tolist())


def _row(values: np.ndarray) -> LogRow:
  numbers, key, parent = np.split(values, [4, 4 + hashing.KEY_WORDS])
  kind, page, group, column = numbers.tolist()
  return LogRow(kind, page, group, column, key.tobytes(), parent.tobytes())
