"""A JSON file that is written completely or not at all."""

import contextlib
import json
import os
import pathlib
import secrets
import stat
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import TextIO

from jaxkv._src.commands.errors import CommandError


@contextlib.contextmanager
def opened(
  path: str | os.PathLike[str], *, flag: str = "--json", lines: bool = False
) -> Iterator[Callable[[Any], None]]:
  """Checks that a JSON file can be written, before there is a value to write.

  The yielded function takes the value; it is written when the block ends. If
  the block raises, or never calls the function, nothing is written.

  A regular file is replaced in one step and keeps its mode. A link stays a
  link: its target is replaced. A device or a pipe is opened here, which waits
  for the reader of a named pipe, and receives the text at the end.

  Args:
    path: the file.
    flag: the argument that named it.
    lines: whether the value is a list that is written one element a line.

  Yields:
    A function that takes the value to write.

  Raises:
    CommandError: the file cannot be written.
  """
  with _errors_named(path, flag):
    mode = _mode(path)
    stream = _stream(path, mode)
    if stream is None:
      _check_replaceable(path, mode)
  values: list[Any] = []
  try:
    yield values.append
    if values:
      text = _text(values[-1], lines)
      with _errors_named(path, flag):
        _write(path, mode, stream, text)
  finally:
    if stream is not None:
      # What could not be written has been reported.
      with contextlib.suppress(OSError):
        stream.close()


def _text(value: Any, lines: bool) -> str:
  if lines:
    return "".join(json.dumps(one) + "\n" for one in value)
  return json.dumps(value, indent=1) + "\n"


@contextlib.contextmanager
def _errors_named(path: str | os.PathLike[str], flag: str) -> Iterator[None]:
  try:
    yield
  except OSError as error:
    reason = error.strerror or str(error)
    raise CommandError(
      f"cannot write {os.fspath(path)}: {reason}; name another file for {flag}"
    ) from error


def _mode(path: str | os.PathLike[str]) -> int | None:
  """The `st_mode` of a path, links followed; None if nothing is there."""
  try:
    return os.stat(path).st_mode
  except FileNotFoundError:
    return None


def _stream(path: str | os.PathLike[str], mode: int | None) -> TextIO | None:
  """Opens a device or a pipe; None for a file, which is replaced instead."""
  if mode is None or stat.S_ISREG(mode):
    return None
  if stat.S_ISDIR(mode):
    raise IsADirectoryError(None, "it is a folder")
  # Without O_CREAT: no regular file can appear where a device has gone.
  return os.fdopen(os.open(path, os.O_WRONLY | os.O_NOCTTY), "w")


def _check_replaceable(path: str | os.PathLike[str], mode: int | None) -> None:
  """Raises OSError unless a file can be made in the folder and put there."""
  if not os.path.basename(path):
    raise IsADirectoryError(None, "it is the name of a folder")
  if mode is not None:
    os.close(os.open(path, os.O_WRONLY))
    _check_not_printed_to(path)
  part, handle = _part_beside(_target(path))
  os.close(handle)
  part.unlink()


def _check_not_printed_to(path: str | os.PathLike[str]) -> None:
  """Raises OSError for a file that would be replaced under a stream."""
  file = os.stat(path)
  for number, name in ((1, "output"), (2, "error")):
    try:
      same = os.path.samestat(file, os.fstat(number))
    except OSError:
      continue  # The descriptor is closed.
    if same:
      raise FileExistsError(None, f"standard {name} goes there")


def _write(
  path: str | os.PathLike[str],
  mode: int | None,
  stream: TextIO | None,
  text: str,
) -> None:
  if stream is not None:
    stream.write(text)
    stream.flush()
    return
  target = _target(path)
  part, handle = _part_beside(target)
  try:
    with os.fdopen(handle, "w", encoding="utf-8") as file:
      file.write(text)
    if mode is not None:
      part.chmod(stat.S_IMODE(mode))
    os.replace(part, target)
  except BaseException:
    part.unlink(missing_ok=True)
    raise


def _target(path: str | os.PathLike[str]) -> pathlib.Path:
  """The file itself, behind links; it need not exist."""
  return pathlib.Path(os.path.realpath(path))


def _part_beside(target: pathlib.Path) -> tuple[pathlib.Path, int]:
  """A new hidden file in the same folder, open for writing."""
  part = target.parent / f".jaxkv-{secrets.token_hex(8)}.part"
  # Not by `tempfile`, whose files are for their owner only.
  return part, os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
