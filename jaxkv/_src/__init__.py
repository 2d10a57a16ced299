"""The private parts of jaxkv; `jaxkv` and its public modules export them."""

import itertools
import signal
import sys

# `python -m jaxkv` imports jax before `__main__` runs. During this import,
# Python could raise KeyboardInterrupt in a callback that discards exceptions,
# so that Ctrl-C has no effect. With SIG_DFL, Ctrl-C ends the process at once.
# sys.argv[0] is "-m" until Python has found the module to run.
_IS_COMMAND = sys.argv[:1] == ["-m"] and ("-m", "jaxkv") in itertools.pairwise(
  sys.orig_argv
)
if _IS_COMMAND and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.SIG_DFL)
