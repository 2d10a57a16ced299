"""Leaves a call wherever a signal handler could."""

import sys
from collections.abc import Callable


class Interrupted(Exception):
  """Raised where a signal handler could."""


def interrupted(call: Callable[[], object], point: int) -> bool:
  """Makes a call and leaves it before its bytecode number `point`.

  Returns:
    Whether it was left.
  """
  count = 0

  def trace(frame, event, _):
    nonlocal count
    frame.f_trace_opcodes, frame.f_trace_lines = True, False
    if event == "opcode":
      count += 1
      if count == point:
        raise Interrupted
    return trace

  before = sys.gettrace()
  sys.settrace(trace)
  try:
    call()
  except Exception as error:
    # jax may answer with an error of its own.
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, Interrupted):
      cause = cause.__context__
    assert cause is not None, error
    return True
  finally:
    sys.settrace(before)
  return False
