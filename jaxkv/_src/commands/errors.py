"""The exceptions that a command reports in one line, without a traceback."""


class CommandError(Exception):
  """A mistake that the user can correct; one line of text without a period.

  `python -m jaxkv` prints it after `error: ` and exits with code 2.
  """


class Terminated(BaseException):
  """The signal SIGTERM; everything that is half-done is cleaned up."""
