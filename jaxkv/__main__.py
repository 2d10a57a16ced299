"""`python -m jaxkv`: the commands."""

import argparse
import sys

from jaxkv._src.commands import replay
from jaxkv._src.commands import rollout
from jaxkv._src.commands.errors import CommandError


def main(arguments: list[str] | None = None) -> int:
  """Runs one command.

  Args:
    arguments: the command line; None for that of the process.

  Returns:
    The exit code of the command, or 2 for unusable input.
  """
  parser = argparse.ArgumentParser(prog="python -m jaxkv", description=__doc__)
  commands = parser.add_subparsers(required=True, metavar="COMMAND")
  for name, command, text in (
    ("rollout", rollout, "generate from prompts inside a jitted loop"),
    ("replay", replay, "run a request trace through the cache"),
  ):
    subparser = commands.add_parser(name, help=text, description=text)
    command.add_arguments(subparser)
    subparser.set_defaults(run=command.run)
  args = parser.parse_args(arguments)
  try:
    return args.run(args)
  except CommandError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
  sys.exit(main())
