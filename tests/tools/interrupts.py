"""Interrupts a call at any bytecode, as a signal handler can."""

import sys
from collections.abc import Callable


class Interrupted(Exception):
  """The exception that interrupts a call."""


def interrupted(call: Callable[[], object], point: int) -> bool:
  """Interrupts a call before its bytecode `point`; False if it ended first."""
  count = 0

  def trace(frame, event, _):
    nonlocal count
    frame.f_trace_opcodes, frame.f_trace_lines = True, False
    if event == "opcode":
      count += 1
      if count == point:
        raise Interrupted
    return trace

  old_trace = sys.gettrace()
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
  return False
