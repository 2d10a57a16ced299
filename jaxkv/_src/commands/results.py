"""Standard output, where a command prints its result."""

import contextlib
import sys
from collections.abc import Iterator

from jaxkv._src.commands.errors import CommandError


def check_stdout() -> None:
  """Checks that a result can be printed, before there is one.

  Raises:
    CommandError: standard output is closed.
  """
  # Python has no such object if the descriptor was closed when it started.
  if sys.stdout is None or sys.stdout.closed:
    raise CommandError(
      "cannot print the result: standard output is closed; send it to a file, "
      "or to /dev/null"
    )


@contextlib.contextmanager
def printed() -> Iterator[None]:
  """For a block that prints; all of it has been written when the block ends.

  Raises:
    CommandError: standard output is full, has no reader any more, or cannot
      encode a character.
  """
  try:
    yield
    sys.stdout.flush()
  except OSError as error:
    raise CommandError(
      f"cannot print the result: {error.strerror}; send standard output to a "
      "file with room, or keep its reader"
    ) from error
  except UnicodeEncodeError as error:
    raise CommandError(
      f"cannot print the result in {error.encoding}; set PYTHONIOENCODING=utf-8"
    ) from error
