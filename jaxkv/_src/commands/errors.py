"""The exception that a command reports in one line, without a traceback."""


class CommandError(Exception):
  """An error that the user can correct; one line without a final period.

  `python -m jaxkv` prints the line after `error: ` and exits with status 2.
  """
