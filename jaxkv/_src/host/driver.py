"""Requests in and out of the state: arrays for the device, lists for Python."""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from jaxkv._src.cache import state as states
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.groups.kinds import FullAttention
from jaxkv._src.cache.telemetry import events
from jaxkv._src.cache.telemetry import new_pages as zeroing
from jaxkv._src.cache.telemetry.events import Drained
from jaxkv._src.cache.telemetry.residency import NUM_BINS
from jaxkv._src.host import allocation
from jaxkv._src.host import requests
from jaxkv._src.host import transitions
from jaxkv._src.host.allocation import Allocated
from jaxkv._src.host.checks import at_least
from jaxkv._src.host.checks import check_length
from jaxkv._src.host.checks import checked_progress
from jaxkv._src.host.checks import checked_step
from jaxkv._src.host.pages import CachePages
from jaxkv._src.host.planning import Call
from jaxkv._src.host.requests import tokens_of
from jaxkv._src.host.slots import Slots
from jaxkv._src.host.transitions import Found

_PAGES_AT_ONCE = 64
_ROW_OF = {name: row for row, name in enumerate(Call._fields)}
_NOWHERE = np.iinfo(np.int32).max


class PoppedPages(NamedTuple):
  """Pages of a request that is gone, still in the slot where it stood.

  Attributes:
    slot: that one.
    pages: their ids by group.
  """

  slot: int
  pages: tuple[list[int], ...]


class Driver:
  """A state, the names of the sequences in it, and how to move it on.

  Args:
    config: sizes of the state.
    caps: most pages by group that one sequence ever holds.
    max_requests: requests that may hold pages at once.

  Attributes:
    state: the cache; every call replaces it.
    slots: where requests stand.
  """

  def __init__(
    self, config: CacheConfig, caps: tuple[int, ...], max_requests: int
  ):
    self.state = states.init(config)
    self.slots = Slots(config, max_requests)
    self._config = config
    self._caps = caps
    self._popped: dict[int, PoppedPages] = {}
    self._step_clock = 0
    self._ages = np.zeros((2, NUM_BINS), np.uint32)

  def new_step(self) -> None:
    """States published from now on count as not written yet."""
    index = self.state.pool.index
    if self._config.holds_states and index is not None:
      self._step_clock = int(np.asarray(index.clock).view(np.int32))

  def look_up(self, request: Any) -> Found:
    """What is cached of a request, as numpy arrays."""
    length = len(tokens_of(request))
    return jax.device_get(
      transitions.look_up(
        self.state,
        self.slots.padded(request, 0, length),
        np.asarray([length], np.int32),
        requests.salt_of(request)[None],
      )
    )

  def advance(
    self,
    request: Any,
    slot: int | None,
    hit: CachePages | None = None,
    **fields: int,
  ) -> Allocated | None:
    """Moves one request on; one without a slot gets one if it is served.

    Args:
      request: any object with the attributes of `Request`; None for a slot of
        which nothing is published.
      slot: where it stands, None for a newcomer.
      hit: pages that a newcomer begins with.
      **fields: of `Call`; 0 where not given.

    Returns:
      What became of it; None if no page can be free because every one is
      some request's.

    Raises:
      ValueError: the hit does not hold the request's tokens.
      RuntimeError: there are `max_requests` already.
    """
    place = self.slots.vacant() if slot is None else slot
    if place is None:
      return None
    publish, sent = fields.get("publish", 0), int(self.slots.sent[place])
    tokens = self.slots.padded(request, sent, max(publish, sent))
    salt = np.zeros((4,), np.uint32)
    if slot is None:
      salt = requests.salt_of(request)
      fields["prompt"] = requests.num_prompt_tokens(request)
      fields["junction"] = getattr(request, "shared_prefix_boundary", 0)
    else:
      fields["behind"] = requests.settled_tokens(
        request, fields.get("behind", 0)
      )
    fields["since"] = self._step_clock
    call = _columns(1, 1, slots=place, **fields)
    begin = (*self._padded_hit(hit), salt[None])
    self.state, out = allocation.allocate(
      self.state, call, begin, tokens, caps=self._caps
    )
    out = allocation.unpacked(out, 1, self._config.num_groups)
    if not out.sound[0]:
      raise ValueError(
        f"new_computed_pages {hit} do not hold the tokens that "
        f"{request.request_id!r} begins with; look it up again."
      )
    if out.ok[0]:
      self.slots.sent[place] = out.length[0]
      if slot is None:
        self.slots.hold(request, place)
    return out

  def advance_all(
    self,
    running: Sequence[Any],
    num_new_tokens: Sequence[int] | int,
    lookahead: int,
    most: int,
  ) -> list[CachePages | None]:
    """Moves many running requests on in one call.

    Args:
      running: R requests.
      num_new_tokens: new tokens of each, or of every one.
      lookahead: tokens to have room for behind them.
      most: tokens of the longest sequence.

    Returns:
      New pages of each request, None where there was no room.

    Raises:
      KeyError: a request holds no page.
      TypeError: a number is no int.
      ValueError: a number is too small, a sequence too long, or a request
        named twice.
    """
    slots, sent = self.slots.of(running), self.slots.sent
    num_new = checked_step(num_new_tokens, lookahead, len(slots))
    computed, behind = checked_progress(running, self._config.recycles)
    tokens = requests.tokens_of_all(running)
    total = computed + num_new
    if total.max() > most:
      check_length(running[int(total.argmax())], int(total.max()), most)
    publish = np.minimum(total, np.array([*map(len, tokens)], np.int32))
    call = _columns(
      self._config.num_slots,
      len(slots),
      slots=slots,
      behind=behind,
      room=np.minimum(total + lookahead, most),
      tokens=total,
      publish=publish,
    )
    padded = self.slots.padded_all(running, tokens, sent[slots], publish)
    self.state, out = allocation.allocate(
      self.state, call, None, padded, caps=self._caps
    )
    out = allocation.unpacked(
      out, self._config.num_slots, self._config.num_groups
    )
    sent[slots] = out.length[: len(slots)]
    return self._answers(slots, out)

  def free(self, request_id: str) -> None:
    """Releases a request, if it holds anything."""
    slot = self.slots.forget(request_id)
    if slot is not None:
      self._free(slot)

  def pop(self, request_id: str) -> PoppedPages | None:
    """Forgets a request but keeps its pages; None if it holds nothing."""
    pages = self.pages_of(request_id)
    slot = self.slots.forget(request_id)
    if slot is None:
      return None
    self._popped[slot] = PoppedPages(slot, pages)
    return self._popped[slot]

  def free_popped(self, popped: PoppedPages) -> None:
    """Releases what was popped.

    Raises:
      ValueError: it was released before.
    """
    if self._popped.get(popped.slot) is not popped:
      raise ValueError(f"{popped} were given back already.")
    self._free(self._popped.pop(popped.slot).slot)

  def _free(self, slot: int) -> None:
    self.slots.release(slot)
    self.state = transitions.free(self.state, np.asarray([slot], np.int32))

  def drain_events(self) -> Drained:
    """Events since the last reading."""
    if not self._config.event_log:
      raise ValueError(
        "The manager keeps no events; make it with "
        "CacheManager(num_events=...), the number of events between two "
        "readings."
      )
    self.state, drained = events.drain_events(self.state)
    return drained

  def take_new_pages(self) -> list[int]:
    """Pages handed out since the last call."""
    if not self._config.track_new_pages:
      raise ValueError(
        "The manager does not keep its new pages; make it with "
        "CacheManager(track_new_pages=True)."
      )
    self.state, new = zeroing.take_new_pages(self.state)
    return np.flatnonzero(np.asarray(new)).tolist()

  def take_ages(self) -> tuple[list[int], list[int]]:
    """Lifetimes and idle times of the pages evicted since the last call."""
    ages = self.state.pool.ages
    if ages is None:
      return [], []
    before, self._ages = (
      self._ages,
      np.stack(jax.device_get((ages.evicted.lifetime, ages.evicted.idle))),
    )
    lifetime, idle = (self._ages - before).tolist()
    return lifetime, idle

  def forget_new(self, pages: list[int]) -> None:
    """Leaves pages out of what `take_new_pages` tells."""
    for part in _parts(pages):
      self.state = transitions.forget_new(self.state, part)

  def evict(self, page_ids: Iterable[int]) -> None:
    """Takes pages out of the index."""
    pages = sorted({at_least("page_ids", page, 0) for page in page_ids})
    if pages and pages[-1] >= self._config.num_pages:
      raise ValueError(
        f"page_ids must be 0 to {self._config.num_pages - 1}, got {pages}."
      )
    for part in _parts(pages):
      self.state = transitions.evict(self.state, part)

  def reset(self) -> bool:
    """Takes all pages out of the index unless one is held; whether it did."""
    if int(self.state.pool.queue.num_free) < self._config.num_pages - 1:
      return False
    self.state = transitions.reset(self.state)
    return True

  def pages_of(self, request_id: str) -> tuple[list[int], ...]:
    """A request's page table by group; empty for one that holds nothing."""
    slot = self.slots.by_name.get(request_id)
    if slot is None:
      return tuple([] for _ in self._config.groups)
    table = np.asarray(self.state.page_table)[:, slot].tolist()
    counts = np.asarray(self.state.num_pages)[:, slot].tolist()
    return tuple(row[:count] for row, count in zip(table, counts, strict=True))

  def num_common(self, request_id: str) -> list[int]:
    """Leading pages of a request that all requests hold; 0 for windows."""
    holders = len(self.slots.by_name)
    refs = np.asarray(self.state.pool.ref_count)
    common = []
    for kind, pages in zip(
      self._config.groups, self.pages_of(request_id), strict=True
    ):
      shared = np.cumprod(refs[pages] == holders)
      whole = isinstance(kind, FullAttention)
      common.append(int(np.sum(shared)) if whole else 0)
    return common

  def _padded_hit(
    self, hit: CachePages | None
  ) -> tuple[np.ndarray, np.ndarray]:
    """int32[G, 1, M], int32[1, G]: pages, and how many."""
    shape = (self._config.num_groups, 1, self._config.pages_per_slot)
    pages, stop = np.zeros(shape, np.int32), np.zeros((1, shape[0]), np.int32)
    for group, column in enumerate(hit.pages if hit else ()):
      pages[group, 0, : len(column)] = column
      stop[0, group] = len(column)
    return pages, stop

  def _answers(
    self, slots: np.ndarray, out: Allocated
  ) -> list[CachePages | None]:
    """New pages of each row; only few rows have any in a step."""
    nothing = CachePages(tuple([] for _ in self._config.groups))
    answers: list[CachePages | None] = [nothing] * len(slots)
    counts = out.stop - out.begin
    rows = np.flatnonzero(counts.any(axis=1))
    counts, most = counts[rows], counts.max()
    pages = out.pages[:, rows, :most]
    if most > pages.shape[2]:
      table = np.asarray(self.state.page_table)[:, slots[rows]]
      columns = out.begin[rows].T[..., None] + np.arange(most)
      columns = np.minimum(columns, table.shape[2] - 1)
      pages = np.take_along_axis(table, columns, axis=2)
    for row, groups, count in zip(
      rows.tolist(),
      pages.swapaxes(0, 1).tolist(),
      counts.tolist(),
      strict=True,
    ):
      new = tuple([own[:n] for own, n in zip(groups, count, strict=True)])
      answers[row] = CachePages(new, new)
    for row in np.flatnonzero(~out.ok[: len(slots)]):
      answers[row] = None
    return answers


def _parts(pages: list[int]) -> Iterator[np.ndarray]:
  """int32[_PAGES_AT_ONCE] each, the null page behind the last."""
  for begin in range(0, len(pages), _PAGES_AT_ONCE):
    part = pages[begin : begin + _PAGES_AT_ONCE]
    padded = np.zeros((_PAGES_AT_ONCE,), np.int32)
    padded[: len(part)] = part
    yield padded


def _columns(
  num_rows: int, num_asked: int, **fields: int | np.ndarray
) -> np.ndarray:
  """int32[F, R]: the fields of `Call`; what is not given is 0.

  Rows past those asked for are none: no slot has their number.
  """
  call = np.zeros((len(Call._fields), num_rows), np.int32)
  call[_ROW_OF["slots"]] = _NOWHERE
  for name, values in fields.items():
    call[_ROW_OF[name], :num_asked] = values
  return call
