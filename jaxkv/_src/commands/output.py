"""Results of commands: files that appear whole or not at all, and lines."""

import argparse
import contextlib
import json
import os
import pathlib
import threading
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

from jaxkv._src.commands.errors import CommandError


def whole_number(lower: int, upper: int) -> Callable[[str], int]:
  """Returns a `type` for `add_argument`: an int in `lower` .. `upper`."""

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
  """Checks that a result can be written, before there is one.

  Args:
    path: the file; None for none.
    *inputs: files that the command reads.

  Raises:
    CommandError: the folder is missing or read-only, `path` is not a regular
      file, or it is one of the inputs.
  """
  if path is None:
    return
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
  """Returns the lines of a text.

  Raises:
    CommandError: the file cannot be read.
  """
  try:
    # Not `splitlines`, which also ends a line at a form feed.
    return pathlib.Path(path).read_text(encoding="utf-8").split("\n")
  except OSError as error:
    raise CommandError(f"cannot read {path}: {error.strerror}") from error
  except UnicodeDecodeError as error:
    raise CommandError(
      f"{path} is not UTF-8 text: {error.reason} at byte {error.start}; save "
      "it as UTF-8"
    ) from error


def write_json(path: str | None, value: Any) -> None:
  """Writes a value as JSON; a reader sees the old file or the new one.

  Raises:
    CommandError: the file cannot be written.
  """
  if path is None:
    return
  try:
    with replacing(path) as part:
      part.write_text(json.dumps(value, indent=1) + "\n", "utf-8")
  except OSError as error:
    raise CommandError(f"cannot write {path}: {error.strerror}") from error


@contextlib.contextmanager
def replacing(path: str | pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields the path of a new file, which replaces `path` when the block ends.

  If the block raises, the new file is removed.
  """
  target = pathlib.Path(os.path.realpath(path))
  name = f".jaxkv-{os.getpid()}-{threading.get_ident()}.part"
  part = target.with_name(name)
  try:
    yield part
    os.replace(part, target)
  finally:
    part.unlink(missing_ok=True)


def print_table(*rows: tuple[str, str], before: str = "") -> None:
  """Prints names and values in two columns, after another text."""
  width = max(len(name) for name, _ in rows)
  print(before, end="")
  for name, value in rows:
    print(f"{name:<{width}}  {value}")
