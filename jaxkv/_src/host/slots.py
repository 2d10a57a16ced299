"""Which request stands in which slot, and how many tokens it published."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.host.request import Request


class RequestSlots:
  """Which request stands in which slot of the state.

  Attributes:
    config: sizes of the state.
    by_name: request id -> slot, of the requests that hold pages.
    sent: int32[B], tokens of each slot that were published, as the device
      answered; the next call sends those behind them.
    with_items: slots of requests with placeholders among their tokens.
  """

  def __init__(self, config: CacheConfig, max_requests: int):
    self.config = config
    self.by_name: dict[str, int] = {}
    self.sent = np.zeros((config.num_slots,), np.int32)
    self.with_items: set[int] = set()
    self._max_requests = max_requests
    self._last_asked: tuple[tuple[Any, ...], np.ndarray] | None = None
    self._vacant = list(range(config.num_slots))[::-1]

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

  def hold(self, request: Request, slot: int) -> None:
    """Gives a vacant slot to a request."""
    self._vacant.remove(slot)
    self.by_name[request.request_id] = slot
    if request.mm:
      self.with_items.add(slot)

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
    """Makes the slot of a forgotten request vacant."""
    self._vacant.append(slot)
    self.sent[slot] = 0
    self.with_items.discard(slot)
