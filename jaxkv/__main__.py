"""The commands of jaxkv."""

import argparse
import signal
import sys

import jax

import jaxkv
from jaxkv._src.commands import doctor
from jaxkv._src.commands import rollout
from jaxkv._src.commands.output import CommandError

_EPILOG = (
  "JAX_COMPILATION_CACHE_DIR=FOLDER saves compiled programs for later runs."
)


def main(arguments: list[str] | None = None) -> int:
  """Runs one command.

  Args:
    arguments: the command line; None for `sys.argv[1:]`.

  Returns:
    The exit status of the command. It is 2, with one line on stderr, if the
    input is unusable, a file cannot be written or the memory is too small.
  """
  args = _parser().parse_args(arguments)
  try:
    return args.run(args)
  except CommandError as error:
    return _report(f"error: {error}")
  except (MemoryError, jax.errors.JaxRuntimeError) as error:
    if not _is_out_of_memory(error):
      raise
    return _report(
      "error: out of memory; lower --pages and other sizes, or use a device "
      "with more memory"
    )


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m jaxkv", description=__doc__, epilog=_EPILOG
  )
  commands = parser.add_subparsers(required=True, metavar="COMMAND")
  for name, command, text in (
    ("rollout", rollout, "generate from prompts inside a jitted loop"),
    ("doctor", doctor, "print versions, devices and speeds, and run a check"),
  ):
    subparser = commands.add_parser(name, help=text, description=text)
    command.add_arguments(subparser)
    subparser.set_defaults(run=command.run)
  return parser


def _is_out_of_memory(error: Exception) -> bool:
  return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def _report(text: str) -> int:
  """Prints a text to stderr as one line, and returns the exit status 2."""
  line = "".join(
    character if character.isprintable() else repr(character)[1:-1]
    for character in text
  )
  print(line, file=sys.stderr, flush=True)
  return 2


if __name__ == "__main__":
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # With the default handler of the system, Ctrl-C ends the process at once.
    # Python's handler would wait for the end of a compilation.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
  jaxkv.enable_compilation_cache()
  sys.exit(main())
