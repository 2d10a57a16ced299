"""Turns every failure to read a checkpoint into one line that names its file.

The values of a file are checked where they are read, and such an error names
the key. This is for everything else that a damaged file can cause, in this
package and in those that it calls.
"""

import contextlib
from collections.abc import Iterator

_MOST = 600


@contextlib.contextmanager
def reported(name: str) -> Iterator[None]:
  """Lets a block raise nothing but errors that name a file, in one line.

  Args:
    name: of the file or folder.

  Raises:
    ImportError: a package is not installed.
    OSError: a file cannot be read.
    ValueError: anything else.
  """
  try:
    yield
  except (ImportError, OSError, MemoryError):
    raise
  except ValueError as error:
    line = _line(str(error))
    raise ValueError(line if name in line else f"{name}: {line}") from error
  except BaseException as error:
    # A panic of a package in Rust is a BaseException, and its class is private.
    kind = type(error).__name__
    if not isinstance(error, Exception) and kind != "PanicException":
      raise
    raise ValueError(
      f"{name} is damaged, or has something that is not supported ({kind}: "
      f"{_line(str(error))}); get it again."
    ) from error


def _line(text: str) -> str:
  line = " ".join(text.split())
  return line if len(line) <= _MOST else f"{line[:_MOST]}..."
