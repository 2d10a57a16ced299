"""Converts errors of a damaged checkpoint to one line that names the file.

The code that reads a checkpoint checks most values itself. This module handles
other errors that a damaged file can cause, such as errors in other packages.
"""

import contextlib
from collections.abc import Iterator

_MAX_CHARACTERS = 600


@contextlib.contextmanager
def one_line_errors(name: str) -> Iterator[None]:
  """Converts errors in a `with` block to one line that contains `name`.

  Raises:
    ImportError, OSError, MemoryError: the block raised this error.
    ValueError: the block raised another `Exception`, or a package in Rust
      panicked.
  """
  try:
    yield
  # These errors are about the machine and not the file, so they stay unchanged.
  except (ImportError, OSError, MemoryError):
    raise
  except ValueError as error:
    line = _line(str(error))
    raise ValueError(line if name in line else f"{name}: {line}") from error
  except BaseException as error:
    # A panic of a Rust package is a BaseException. Its class is private, so
    # only the name of the class identifies it.
    class_name = type(error).__name__
    if not isinstance(error, Exception) and class_name != "PanicException":
      raise
    raise ValueError(
      f"{name} is damaged, or has something that is not supported "
      f"({class_name}: {_line(str(error))}); get it again."
    ) from error


def _line(text: str) -> str:
  line = " ".join(text.split())
  return (
    line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}..."
  )
