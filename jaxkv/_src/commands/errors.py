"""The exception that a command reports in one line, without a traceback."""


class CommandError(Exception):
  """A mistake that the user can correct, in one line of text without a period.

  `python -m jaxkv` prints it after `error: ` and exits with status 2.
  """
