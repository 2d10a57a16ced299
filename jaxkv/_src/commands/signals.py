"""Ends the process when SIGINT or SIGTERM arrives, whatever it is doing.

Python runs a signal handler in the main thread, between two bytecodes. It can
be late by a whole compilation, and an exception that it raises is dropped if
the main thread is in a callback of the garbage collector, such as jax's. So the
handler here does nothing. The C part of Python writes the signal's number into
a pipe at once, and a thread that reads the pipe ends the process.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


def install(clean_up: Callable[[], None]) -> None:
  """Lets the first SIGINT or SIGTERM end the process with status 128 + number.

  A signal that the parent process has chosen to ignore stays ignored. Call it
  in the main thread.

  Args:
    clean_up: called before the end, in another thread.
  """
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
  for number in _WORDS:
    if signal.getsignal(number) != signal.SIG_IGN:
      signal.signal(number, lambda *_: None)
  threading.Thread(target=_watch, args=(reader, clean_up), daemon=True).start()


def uninstall() -> None:
  """Restores the system's handlers, when the result has been written."""
  for number in _WORDS:
    if signal.getsignal(number) != signal.SIG_IGN:
      signal.signal(number, signal.SIG_DFL)


def _watch(reader: int, clean_up: Callable[[], None]) -> None:
  number = os.read(reader, 1)[0]
  try:
    with contextlib.suppress(OSError):
      clean_up()
    word = _WORDS[signal.Signals(number)]
    # Not by sys.stderr, whose lock the main thread may hold.
    with contextlib.suppress(OSError):
      os.write(2, f"\nerror: {word}; run it again\n".encode())
  finally:
    os._exit(128 + number)
