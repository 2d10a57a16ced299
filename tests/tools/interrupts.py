"""Interrupts a call at any bytecode of the library, as a signal handler can.

Bytecodes of other packages do not count: an interrupt there leaves the library
at the call that it made. And on Python 3.11 it can leave the lock of a cached
property of jax behind, for which callbacks in other threads then wait forever.
"""

import gc
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jaxkv

_EVERY = 29
"""Without --deep, one point of so many is tried."""
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


def check_atomic(
  prepared: Callable[[], tuple[Any, Any]],
  call: Callable[[Any, Any], object],
  everything: Callable[[Any], object],
  *,
  is_deep: bool,
  may_change_nothing: bool = False,
  go_on: Callable[[Any, Any], object] | None = None,
) -> Any:
  """Interrupts a call at many points: it took effect completely or not at all.

  Args:
    prepared: makes a manager and its requests.
    call: makes a call of the manager.
    everything: returns all on which later calls of the manager depend.
    is_deep: True to interrupt it at every point.
    may_change_nothing: True for a call that only reads.
    go_on: makes a call after each interrupted one.

  Returns:
    The manager of the last call, which was not interrupted.
  """
  unchanged, _ = prepared()
  changed, requests = prepared()
  call(changed, requests)
  outcomes = [everything(unchanged), everything(changed)]
  outcome_indices = set()
  point = 1
  while True:
    manager, requests = prepared()
    if not interrupted(lambda m=manager, r=requests: call(m, r), point):
      break
    state = everything(manager)
    assert state in outcomes, f"left before bytecode {point}"
    outcome_indices.add(outcomes.index(state))
    if go_on is not None:
      go_on(manager, requests)
    point += 1 if is_deep else _EVERY
  assert point > 20 and 0 in outcome_indices
  changes = outcomes[0] != outcomes[1]
  assert changes or may_change_nothing
  if is_deep and changes:
    assert outcome_indices == {0, 1}
  return manager
