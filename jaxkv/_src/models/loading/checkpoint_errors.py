"""Converts errors of a damaged checkpoint to one line that names its file.

Code that reads a value checks it, and its error names the key. This module is
for all other errors that a damaged file can cause, here and in other packages.
"""

import contextlib
from collections.abc import Iterator

_MAX_CHARACTERS = 600


@contextlib.contextmanager
def one_line_errors(name: str) -> Iterator[None]:
  """Makes errors of a block name a file or folder, in one line.

  Raises:
    ImportError: a package is not installed.
    OSError: a file cannot be read.
    ValueError: any other failure.
  """
  try:
    yield
  # These errors are about the machine and not about the file, so they stay.
  except (ImportError, OSError, MemoryError):
    raise
  except ValueError as error:
    line = _line(str(error))
    raise ValueError(line if name in line else f"{name}: {line}") from error
  except BaseException as error:
    # A panic of a Rust package is a BaseException with a private class.
    kind = type(error).__name__
    if not isinstance(error, Exception) and kind != "PanicException":
      raise
    raise ValueError(
      f"{name} is damaged, or has something that is not supported ({kind}: "
      f"{_line(str(error))}); get it again."
    ) from error


def _line(text: str) -> str:
  line = " ".join(text.split())
  return (
    line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}..."
  )
