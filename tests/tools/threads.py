"""Threads that share one thing."""

import threading
from collections.abc import Callable


def run_in_threads(work: Callable[[int], None], count: int = 4) -> None:
  """Runs `work` in some threads at once, each with its number.

  Raises:
    AssertionError: one of them raised an error; it is shown.
  """
  errors: list[Exception] = []

  def caught(number: int) -> None:
    try:
      work(number)
    except Exception as error:
      errors.append(error)

  threads = [
    threading.Thread(target=caught, args=(number,)) for number in range(count)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert errors == []
