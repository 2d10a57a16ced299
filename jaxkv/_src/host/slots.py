"""Which request stands in which slot, and how many tokens it published."""

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
  """Which request stands in which slot of the state.

  Attributes:
    config: sizes of the state.
    by_name: request id -> slot, of the requests that hold pages.
    sent: int32[B], tokens of each slot that were published, as the device
      answered; the next call sends those behind them.
    with_items: slots of requests with placeholders among their tokens.
    masked: contents of pages -> their tokens, where an item touches them; only
      for events that are still to be read.
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
    """Whether every slot is taken."""
    return not self._vacant

  def vacant(self) -> int | None:
    """A slot for one more request; it is not taken until `hold`.

    None if every page has a slot and no slot is vacant.

    Raises:
      RuntimeError: there are `max_requests` already.
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
    """Gives a vacant slot to a request; twice is as once."""
    if request.items:
      self.with_items.add(slot)
    self.by_name[request.request_id] = slot
    if slot in self._vacant[-1:]:
      self._vacant.pop()

  def slot_of(self, name: str) -> int:
    """The slot of a request that holds pages.

    Raises:
      KeyError: it holds none.
    """
    if name not in self.by_name:
      raise KeyError(f"{name!r} holds no page; call allocate_slots for it.")
    return self.by_name[name]

  def slots_of(self, running: Sequence[Any]) -> np.ndarray:
    """int32[R]: the slots of requests.

    A scheduler asks for the same requests at every step and gets the same
    array.

    Raises:
      KeyError: a request holds no page.
      ValueError: a request is named twice.
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
    """Takes a request out; its slot, which stays in use, or None."""
    self._last_asked = None
    return self.by_name.pop(name, None)

  def release(self, slot: int) -> None:
    """Makes the slot of a forgotten request vacant; twice is as once."""
    self.sent[slot] = 0
    self.with_items.discard(slot)
    if slot not in self._vacant[-1:]:
      self._vacant.append(slot)

  def content(self, request: KnownRequest, begin: int, end: int) -> np.ndarray:
    """int32[end - begin]: what stands for the tokens, see `content`."""
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
    """Events with the tokens of requests, not what stands for them."""
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
