"""Runs a function in several threads."""

import threading
from collections.abc import Callable


def run_in_threads(work: Callable[[int], None], count: int = 4) -> None:
  """Runs `work` with the numbers 0 .. count - 1, each in a thread.

  Errors of the threads are raised as one AssertionError.
  """
  errors: list[Exception] = []

  def caught(index: int) -> None:
    try:
      work(index)
    except Exception as error:
      errors.append(error)

  threads = [threading.Thread(target=caught, args=(i,)) for i in range(count)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert errors == []
