"""Which request stands in which slot, and the tokens that the device has."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.host.request import content
from jaxkv._src.host.request import int32s

_WIDTHS = (64, 4096, 65536)
"""Numbers of tokens for which calls are compiled, up to the longest sequence;
and 1, for many requests that decode together."""


class RequestSlots:
  """Which request stands in which slot of the state.

  Attributes:
    by_name: request id -> slot, of the requests that hold pages.
    sent: int32[B], tokens of each slot that were published, as the device
      answered; the next call sends those behind them.
    with_items: slots of requests with placeholders among their tokens.
  """

  def __init__(self, config: CacheConfig, max_requests: int):
    self.by_name: dict[str, int] = {}
    self.sent = np.zeros((config.num_slots,), np.int32)
    self.with_items: set[int] = set()
    self._max_requests = max_requests
    self._last_asked: tuple[tuple[Any, ...], np.ndarray] | None = None
    self._vacant = list(range(config.num_slots))[::-1]
    widths = [width for width in _WIDTHS if width < config.slot_tokens]
    self._widths = (*widths, config.slot_tokens)

  def vacant(self) -> int | None:
    """A slot for one more request; it is not taken until `hold`.

    None where there are as many slots as pages, and none is vacant.

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

  def hold(self, request: Any, slot: int) -> None:
    """Gives a vacant slot to a request."""
    self._vacant.remove(slot)
    self.by_name[request.request_id] = slot
    if getattr(request, "mm", None):
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

  def padded(self, request: Any, start: int, stop: int) -> np.ndarray:
    """int32[1, T]: tokens of a request, T one of a few widths."""
    tokens = np.zeros((1, self._width(stop - start)), np.int32)
    if stop > start:
      tokens[0, : stop - start] = content(request, start, stop)
    return tokens

  def padded_all(
    self,
    running: Sequence[Any],
    tokens: list[Sequence[int]],
    start: np.ndarray,
    stop: np.ndarray,
  ) -> np.ndarray:
    """int32[B, T]: the same for many requests.

    Args:
      running: R requests.
      tokens: all tokens of each.
      start: int32[R].
      stop: int32[R], not before `start` for a row that counts.
    """
    counts = stop - start
    most = int(counts.max())
    if most <= 1 and not self.with_items:
      # Decoding: the newest token of each; a loop over rows is too slow.
      newest = np.zeros((len(self.sent), 1), np.int32)
      ends = zip(tokens, stop.tolist(), strict=True)
      last = [known[end - 1] for known, end in ends]
      try:
        newest[: len(running), 0] = int32s(last)
        return newest
      except (OverflowError, TypeError):
        pass  # The loop below names the request, if its token counts.
    padded = np.zeros((len(self.sent), self._width(most)), np.int32)
    for row in np.flatnonzero(counts > 0).tolist():
      request, begin, end = running[row], int(start[row]), int(stop[row])
      padded[row, : end - begin] = content(request, begin, end)
    return padded

  def _width(self, count: int) -> int:
    return next(width for width in self._widths if width >= count)
