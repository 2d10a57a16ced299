"""Inputs, results and errors of commands; results are written atomically."""

import argparse
import contextlib
import json
import os
import pathlib
import threading
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any


class CommandError(Exception):
  """An error that the user can correct.

  `python -m jaxkv` prints the message after `error: ` and exits with status 2.
  The message is one line without a final period.
  """


def whole_number(lower: int, upper: int) -> Callable[[str], int]:
  """Returns a parser of integers in `lower` .. `upper`, for `add_argument`."""

  def parse(text: str) -> int:
    try:
      value = int(text)
    except ValueError:
      value = None
    if value is None or not lower <= value <= upper:
      raise argparse.ArgumentTypeError(
        f"must be a whole number in {lower} .. {upper}, not {text}"
      )
    return value

  return parse


def check_writable(path: str | None, *inputs: str | None) -> None:
  """Checks that a result can be written to `path`, before the work starts.

  Raises:
    CommandError: the folder is missing or read-only, or `path` is one of the
      `inputs`, or it exists and is not a regular file.
  """
  if path is None:
    return
  # A link is followed, because `write_json` replaces the file it points to.
  target = pathlib.Path(os.path.realpath(path))
  reason = None
  if not os.access(target.parent, os.W_OK):
    reason = "its folder is missing or read-only"
  elif target.exists() and not target.is_file():
    reason = "it is not a regular file"
  elif str(target) in (os.path.realpath(name) for name in inputs if name):
    reason = "the command reads it"
  if reason is not None:
    raise CommandError(f"cannot write {path}: {reason}; name another file")


def read_lines(path: str) -> list[str]:
  """Returns the lines of a text file."""
  try:
    # Not `splitlines`, which also splits at form feeds and other separators.
    return pathlib.Path(path).read_text(encoding="utf-8").split("\n")
  except OSError as error:
    raise CommandError(f"cannot read {path}: {error.strerror}") from error
  except UnicodeDecodeError as error:
    raise CommandError(
      f"{path} is not UTF-8 text: {error.reason} at byte {error.start}; save "
      "it as UTF-8"
    ) from error


def write_json(path: str | None, value: Any) -> None:
  """Writes a value as JSON, atomically; does nothing if `path` is None."""
  if path is None:
    return
  try:
    with replacing(path) as part:
      part.write_text(json.dumps(value, indent=1) + "\n", "utf-8")
  except OSError as error:
    raise CommandError(f"cannot write {path}: {error.strerror}") from error


@contextlib.contextmanager
def replacing(path: str | pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields a new path for the block to write; the file then replaces `path`.

  If the block raises, the new file is removed and `path` does not change.
  """
  # The new file is in the folder of the target, because `os.replace` is atomic
  # only within a file system. Its name is unique to the process and thread.
  target = pathlib.Path(os.path.realpath(path))
  name = f".jaxkv-{os.getpid()}-{threading.get_ident()}.part"
  part = target.with_name(name)
  try:
    yield part
    os.replace(part, target)
  finally:
    # `missing_ok`, because `os.replace` has moved the file if all went well.
    part.unlink(missing_ok=True)


def print_table(*rows: tuple[str, str], text: str = "") -> None:
  """Prints a text, then names and values in two columns."""
  width = max(len(name) for name, _ in rows)
  print(text, end="")
  for name, value in rows:
    print(f"{name:<{width}}  {value}")
