"""Serves concurrent calls of several threads in batches."""

import threading
from collections.abc import Callable
from typing import Any


class _Call:
  """A thread's request and its result or error."""

  def __init__(self, request: Any):
    self.request = request
    self.result: Any = None
    self.error: BaseException | None = None
    self.done = False


class ThreadBatches:
  """Serves requests of several threads in batches, in the calling threads.

  If no batch is in progress, a call serves its request at once. Requests that
  arrive during a batch form the next batch, in the order of their arrival. The
  first waiting thread that takes the lock serves the next batch.
  """

  def __init__(self, serve: Callable[[list[Any]], list[Any]]):
    """Creates an empty queue of requests.

    `serve` maps a list of requests to their results. It never runs in two
    threads at once. If `serve` raises, each call of the batch raises.
    """
    self._serve = serve
    self._turn = threading.Lock()
    self._access = threading.Lock()
    self._calls: list[_Call] = []

  def call(self, request: Any) -> Any:
    """Returns the result of a request, or raises the error of `serve`."""
    call = _Call(request)
    with self._access:
      self._calls.append(call)
    try:
      # While this thread waits for the lock, another thread can serve its call.
      with self._turn:
        if not call.done:
          self._serve_all()
    finally:
      # After an interrupt, no later batch serves the call.
      with self._access:
        if call in self._calls:
          self._calls.remove(call)
    if call.error is not None:
      raise call.error
    return call.result

  def _serve_all(self) -> None:
    calls: list[_Call] = []
    try:
      with self._access:
        calls, self._calls = self._calls, []
      results = self._serve([call.request for call in calls])
      for call, result in zip(calls, results, strict=True):
        call.result = result
    # BaseException, because the waiting threads must end on Ctrl-C as well.
    except BaseException as error:
      for call in calls:
        call.error = error
      # Raised here too, because `calls` is still empty if it came too early.
      raise
    finally:
      for call in calls:
        call.done = True
