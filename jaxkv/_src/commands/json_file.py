"""A JSON file that is written completely or not at all."""

import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

from jaxkv._src.commands.errors import CommandError


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Callable[[Any], None]]:
  """Checks that a JSON file can be written, before there is a value to write.

  The yielded function takes the value; it is written when the block ends. If
  the block raises, or never calls the function, the file is unchanged.

  Args:
    path: the file; an existing one is replaced.

  Yields:
    A function that takes the value to write.

  Raises:
    CommandError: the file cannot be written.
  """
  target = pathlib.Path(path)
  if target.is_dir():
    raise CommandError(f"cannot write {target}: it is a folder")
  if target.exists() and not os.access(target, os.W_OK):
    raise CommandError(f"cannot write {target}: permission denied")
  try:
    handle, name = tempfile.mkstemp(
      dir=target.parent, prefix=f".{target.name}.", suffix=".part"
    )
  except OSError as error:
    raise CommandError(f"cannot write {target}: {error.strerror}") from error
  os.close(handle)
  part = pathlib.Path(name)
  values: list[Any] = []
  try:
    yield values.append
    if values:
      _replace(target, part, json.dumps(values[-1], indent=1) + "\n")
  finally:
    part.unlink(missing_ok=True)


def _replace(target: pathlib.Path, part: pathlib.Path, text: str) -> None:
  # mkstemp makes files that only their owner can read.
  mask = os.umask(0)
  os.umask(mask)
  try:
    part.write_text(text, encoding="utf-8")
    part.chmod(0o666 & ~mask)
    os.replace(part, target)
  except OSError as error:
    raise CommandError(f"cannot write {target}: {error.strerror}") from error
