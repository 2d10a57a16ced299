"""Interrupts a call at any bytecode of the library, as a signal handler can.

Bytecodes of other packages do not count: an interrupt there leaves the library
at the call that it made. And on Python 3.11 it can leave the lock of a cached
property of jax behind, for which callbacks in other threads then wait forever.
"""

import gc
import pathlib
import sys
from collections.abc import Callable

import jaxkv

_LIBRARY = str(pathlib.Path(jaxkv.__file__).parent)


class Interrupted(Exception):
  """The exception that interrupts a call."""


def interrupted(call: Callable[[], object], *points: int) -> bool:
  """Interrupts a call before the bytecodes `points`; False if it ended first.

  A second point interrupts the call while it handles the first interrupt.
  """
  count = 0

  def trace(frame, event, _):
    nonlocal count
    if not frame.f_code.co_filename.startswith(_LIBRARY):
      return None
    # Python 3.13 reports bytecodes only where a frame's function is set first.
    frame.f_trace = trace
    frame.f_trace_opcodes, frame.f_trace_lines = True, False
    if event == "opcode":
      count += 1
      if count in points:
        raise Interrupted
    return trace

  old_trace = sys.gettrace()
  # Python drops an exception that is raised in a callback of the collector.
  gc.disable()
  # Python 3.12 reports none to a function that is set before a frame asks.
  sys._getframe().f_trace_opcodes = True
  sys.settrace(trace)
  try:
    call()
  except Exception as error:
    # jax may raise another error while it handles this one.
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, Interrupted):
      cause = cause.__context__
    assert cause is not None, error
    return True
  finally:
    sys.settrace(old_trace)
    gc.enable()
  assert count, "the call ran no bytecode of the library"
  return False
