"""The slot of each request, and its number of published tokens."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.telemetry import Drained
from jaxkv._src.cache.telemetry import Stored
from jaxkv._src.host.request import KnownRequest
from jaxkv._src.host.request import content
from jaxkv._src.host.request import int32s
from jaxkv._src.host.request import page_mask
from jaxkv._src.host.request import touched_pages


class RequestSlots:
  """The slots of the state and the requests in them.

  Attributes:
    config: sizes of the state.
    by_name: request id -> slot, for the requests that hold pages.
    sent: int32[B], each slot's published tokens, as the device reported them.
      The next call sends the tokens after them.
    with_items: slots of requests that have placeholders among their tokens.
    masked: masked tokens of a page -> its real tokens, for unread events.
  """

  def __init__(self, config: CacheConfig, max_requests: int, secret: bytes):
    self.config = config
    self._secret = secret
    self.by_name: dict[str, int] = {}
    self.sent = np.zeros((config.num_slots,), np.int32)
    self.with_items: set[int] = set()
    self.masked: dict[tuple[int, ...], tuple[int, ...]] = {}
    self._max_requests = max_requests
    self._last_asked: tuple[tuple[Any, ...], np.ndarray] | None = None
    self._vacant = list(range(config.num_slots))[::-1]

  @property
  def is_full(self) -> bool:
    """True if every slot is in use."""
    return not self._vacant

  def vacant(self) -> int | None:
    """Returns a vacant slot, which `hold` then takes.

    Returns None if no slot is vacant because every page has one.

    Raises:
      RuntimeError: `max_requests` requests already hold pages.
    """
    if self._vacant:
      return self._vacant[-1]
    if len(self.sent) == self._max_requests:
      raise RuntimeError(
        f"`max_requests` must be more than {self._max_requests} for this "
        "request to hold pages too; free one first, or make the CacheManager "
        "with a larger number."
      )
    return None

  def hold(self, request: KnownRequest, slot: int) -> None:
    """Gives a vacant slot to a request; idempotent."""
    if request.items:
      self.with_items.add(slot)
    self.by_name[request.request_id] = slot
    if slot in self._vacant[-1:]:
      self._vacant.pop()

  def slot_of(self, name: str) -> int:
    """Returns the slot of a request; a KeyError if it holds no page."""
    if name not in self.by_name:
      raise KeyError(f"{name!r} holds no page; call allocate_slots for it.")
    return self.by_name[name]

  def slots_of(self, running: Sequence[Any]) -> np.ndarray:
    """Returns int32[R], the slots of requests.

    Consecutive calls with the same requests return the same array.

    Raises:
      KeyError: a request holds no page.
      ValueError: a request is repeated.
    """
    if self._last_asked is not None:
      before, slots = self._last_asked
      if len(before) == len(running) and all(
        map(operator.is_, before, running)
      ):
        return slots
    names = [request.request_id for request in running]
    if len(set(names)) < len(names):
      again = next(name for name in names if names.count(name) > 1)
      raise ValueError(f"`running` must name each request once, got {again!r}.")
    slots = np.array([self.slot_of(name) for name in names], np.int32)
    self._last_asked = (tuple(running), slots)
    return slots

  def forget(self, name: str) -> int | None:
    """Removes a request. Returns its slot, which stays in use, or None."""
    self._last_asked = None
    return self.by_name.pop(name, None)

  def release(self, slot: int) -> None:
    """Makes the slot of a removed request vacant; idempotent."""
    self.sent[slot] = 0
    self.with_items.discard(slot)
    if slot not in self._vacant[-1:]:
      self._vacant.append(slot)

  def content(self, request: KnownRequest, begin: int, end: int) -> np.ndarray:
    """Returns the masked tokens `begin .. end`, see `request.content`."""
    size = self.config.page_size
    held = content(request, begin, end, size, self._secret)
    if self.config.event_log:
      self._note_masked(request, begin, end)
    return held

  def _note_masked(self, request: KnownRequest, begin: int, end: int) -> None:
    size = self.config.page_size
    for page in touched_pages(request, begin, end, size):
      real = int32s(request.token_ids[page * size : (page + 1) * size])
      if len(real) == size and len(self.masked) < self.config.event_log:
        mask = page_mask(request, page, size, self._secret)
        self.masked[tuple((real ^ mask).tolist())] = tuple(real.tolist())

  def unmasked(self, drained: Drained) -> Drained:
    """Restores the real tokens in events."""
    if not self.masked:
      return drained
    size = self.config.page_size

    def real(event: Any) -> Any:
      if not isinstance(event, Stored):
        return event
      parts = [
        event.tokens[begin : begin + size]
        for begin in range(0, len(event.tokens), size)
      ]
      tokens = sum((self.masked.get(part, part) for part in parts), ())
      return event._replace(tokens=tokens)

    return drained._replace(events=[real(event) for event in drained.events])
