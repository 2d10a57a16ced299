"""Calls from several threads, served together."""

import threading
from collections.abc import Callable
from typing import Any


class _Call:
  """One thread's request, and what became of it."""

  def __init__(self, request: Any):
    self.request = request
    self.result: Any = None
    self.error: BaseException | None = None
    self.done = False


class Gathering:
  """Serves requests of threads in batches, without a thread of its own.

  The thread that comes when nobody is served serves itself, at once. Those that
  come meanwhile are served together by one of them, in the order in which they
  came.
  """

  def __init__(self, serve: Callable[[list[Any]], list[Any]]):
    """Begins without requests.

    Args:
      serve: takes requests and gives their results; never called by two threads
        at once. If it raises, all of them do.
    """
    self._serve = serve
    self._turn = threading.Lock()
    self._access = threading.Lock()
    self._calls: list[_Call] = []

  def call(self, request: Any) -> Any:
    """The result of a request, from whichever thread served it.

    Raises:
      BaseException: what `serve` raised.
    """
    own = _Call(request)
    with self._access:
      self._calls.append(own)
    with self._turn:
      if not own.done:
        self._serve_all()
    if own.error is not None:
      raise own.error
    return own.result

  def _serve_all(self) -> None:
    with self._access:
      calls, self._calls = self._calls, []
    try:
      results = self._serve([call.request for call in calls])
      for call, result in zip(calls, results, strict=True):
        call.result = result
    except BaseException as error:
      for call in calls:
        call.error = error
    finally:
      for call in calls:
        call.done = True
