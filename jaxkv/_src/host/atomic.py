"""Calls that take effect completely or not at all.

A signal handler runs between two bytecodes of the main thread and may raise
there, as Ctrl-C does. So a call records how to undo each change before it makes
the change. If the call raises, its changes are undone, newest first.
"""

import functools
import threading
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Concatenate
from typing import ParamSpec
from typing import TypeVar

Args = ParamSpec("Args")
Out = TypeVar("Out")

_MISSING = object()


class UndoLog:
  """The changes of the current call, and how to undo them.

  Each entry is a function and its arguments. The function writes old values
  back. It does no harm if it runs twice, or if the change was never made, so an
  interrupted undo can be repeated.

  Attributes:
    lock: held by the thread that runs an atomic method.
    entries: the changes since `commit`.
    record: appends an entry, `(function, *arguments)`.
    commit: makes all changes final.
  """

  def __init__(self):
    # Reentrant, because atomic methods call each other.
    self.lock = threading.RLock()
    # `record` and `commit` are bound to this list, so it is never replaced.
    self.entries: list[tuple[Any, ...]] = []
    self.record = self.entries.append
    # `clear` is one call of C code, which no signal handler interrupts.
    self.commit = self.entries.clear

  def save_attribute(self, owner: Any, name: str) -> None:
    """Records an attribute that is about to change."""
    self.record((setattr, owner, name, getattr(owner, name)))

  def replace(self, owner: Any, **values: Any) -> None:
    """Records attributes and sets them to new values."""
    for name, value in values.items():
      self.record((setattr, owner, name, getattr(owner, name)))
      setattr(owner, name, value)

  def save_items(self, values: list[Any], places: Sequence[int]) -> None:
    """Records the elements of a list that are about to change."""
    self.record((_restore_items, values, places, [values[n] for n in places]))

  def save_key(self, mapping: dict[Any, Any], key: Any) -> None:
    """Records an entry of a dictionary that is about to change."""
    self.record((_restore_key, mapping, key, mapping.get(key, _MISSING)))

  def save_length(self, values: list[Any]) -> None:
    """Records a list to which elements are about to be appended."""
    self.record((_shorten, values, len(values)))

  def undo(self, first_entry: int = 0) -> None:
    """Undoes the changes from entry `first_entry` on, newest first."""
    for function, *arguments in reversed(self.entries[first_entry:]):
      function(*arguments)
    # Removed last, so that an interrupted undo can be repeated.
    del self.entries[first_entry:]


def atomic(
  method: Callable[Concatenate[Any, Args], Out],
) -> Callable[Concatenate[Any, Args], Out]:
  """Makes a method atomic; `self.undo_log` must be an `UndoLog`.

  If one atomic method calls another, the outer one commits all changes.
  """

  @functools.wraps(method)
  def call(self: Any, *args: Args.args, **kwargs: Args.kwargs) -> Out:
    log = self.undo_log
    # An outer atomic method of this thread may catch an error of `method` and
    # continue, so only the changes of `method` are undone.
    if log.lock._is_owned():
      first_entry = len(log.entries)
      try:
        return method(self, *args, **kwargs)
      except BaseException:
        log.undo(first_entry)
        raise
    with log.lock:
      # Entries of an earlier call are left only if its undo was interrupted.
      if log.entries:
        log.undo()
      try:
        result = method(self, *args, **kwargs)
        # An interrupt before `commit` undoes the call. After `commit` the log
        # is empty, so `undo` changes nothing.
        log.commit()
        return result
      except BaseException:
        log.undo()
        raise

  return call


def _shorten(values: list[Any], count: int) -> None:
  del values[count:]


def _restore_items(
  values: list[Any], places: Sequence[int], before: list[Any]
) -> None:
  for place, value in zip(places, before, strict=True):
    values[place] = value


def _restore_key(mapping: dict[Any, Any], key: Any, before: Any) -> None:
  if before is _MISSING:
    mapping.pop(key, None)
  else:
    mapping[key] = before
