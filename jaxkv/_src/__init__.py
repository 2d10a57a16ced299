"""The private parts of jaxkv; `jaxkv` and its public modules export them."""

import itertools
import signal
import sys

# `python -m jaxkv` imports jax before `__main__` runs. In the meantime, Python
# could raise KeyboardInterrupt in a callback that drops exceptions, and Ctrl-C
# would be lost. With SIG_DFL, Ctrl-C ends the process at once. While Python
# looks for the module to run, sys.argv[0] is "-m".
_IS_COMMAND = sys.argv[:1] == ["-m"] and ("-m", "jaxkv") in itertools.pairwise(
  sys.orig_argv
)
if _IS_COMMAND and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.SIG_DFL)
