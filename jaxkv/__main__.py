"""`python -m jaxkv`: the commands."""

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

import jax

from jaxkv._src.commands import compilations
from jaxkv._src.commands import grpo
from jaxkv._src.commands import replay
from jaxkv._src.commands import results
from jaxkv._src.commands import rollout
from jaxkv._src.commands.errors import CommandError
from jaxkv._src.commands.errors import Terminated

_INTERRUPTED = 128 + signal.SIGINT
_TERMINATED = 128 + signal.SIGTERM


def main(arguments: list[str] | None = None) -> int:
  """Runs one command.

  Args:
    arguments: the command line; None for that of the process.

  Returns:
    The exit code: the command's; 2 for unusable input, for output that cannot
    be written and for too little memory; 130 after an interrupt and 143 after
    SIGTERM. Every code but the command's comes with one line on stderr.
  """
  args = _parser().parse_args(arguments)
  try:
    with _sigterm_raises(), compilations.kept():
      results.check_stdout()
      return args.run(args)
  except CommandError as error:
    return _reported(f"error: {error}", 2)
  except (MemoryError, jax.errors.JaxRuntimeError) as error:
    if not _is_out_of_memory(error):
      raise
    return _reported(
      "error: out of memory; lower --pages and the command's other sizes", 2
    )
  except KeyboardInterrupt:
    return _reported("error: interrupted; run it again", _INTERRUPTED)
  except Terminated:
    return _reported("error: terminated; run it again", _TERMINATED)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(prog="python -m jaxkv", description=__doc__)
  commands = parser.add_subparsers(required=True, metavar="COMMAND")
  for name, command, text in (
    ("rollout", rollout, "generate from prompts inside a jitted loop"),
    ("replay", replay, "run a request trace through the cache"),
    ("grpo", grpo, "train a small model on its own answers, in one program"),
  ):
    subparser = commands.add_parser(name, help=text, description=text)
    command.add_arguments(subparser)
    subparser.set_defaults(run=command.run)
  return parser


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
  """SIGTERM unwinds the command, so that it leaves no file behind.

  Only where it would end the process at once; a second one does.
  """
  if (
    threading.current_thread() is not threading.main_thread()
    or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
  ):
    yield
    return

  def stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated

  signal.signal(signal.SIGTERM, stop)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_out_of_memory(error: Exception) -> bool:
  return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def _reported(text: str, code: int) -> int:
  """Prints one line, whatever the text quotes, and returns the code."""
  line = "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
  # There may be nobody to tell.
  with contextlib.suppress(OSError):
    print(line, file=sys.stderr, flush=True)
  return code


def _drop_output() -> None:
  """Drops what could not be printed, or Python tells of it when it ends."""
  if sys.stdout is None:
    return
  try:
    sys.stdout.flush()
  except OSError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
  # None if closed, which a progress bar cannot be drawn on.
  sys.stderr = sys.stderr or open(os.devnull, "w")
  try:
    sys.exit(main())
  finally:
    _drop_output()
