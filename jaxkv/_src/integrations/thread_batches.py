"""Serves concurrent calls of several threads in batches."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


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
    self._requests: dict[Future, Any] = {}

  def call(self, request: Any) -> Any:
    """Returns the result of a request, or raises the error of `serve`."""
    call = Future()
    with self._access:
      self._requests[call] = request
    try:
      # While this thread waits for the lock, another thread can serve its call.
      with self._turn:
        if not call.done():
          self._serve_all()
    finally:
      # After an interrupt, no later batch serves the call.
      with self._access:
        self._requests.pop(call, None)
    return call.result()

  def _serve_all(self) -> None:
    requests: dict[Future, Any] = {}
    try:
      with self._access:
        requests, self._requests = self._requests, {}
      results = self._serve([*requests.values()])
      for call, result in zip(requests, results, strict=True):
        call.set_result(result)
    # BaseException, because the waiting threads must end on Ctrl-C as well.
    except BaseException as error:
      for call in requests:
        if not call.done():
          call.set_exception(error)
      # Raised here too, because `requests` is still empty if it came too early.
      raise
