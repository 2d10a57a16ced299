"""What a command tells its user instead of a traceback."""


class CommandError(Exception):
  """Something the user can put right; its text is one line, without a stop.

  `python -m jaxkv` prints it after `error: ` and ends with exit code 2.
  """
