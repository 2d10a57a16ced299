"""The private parts of jaxkv; `jaxkv` and its public modules export them."""

import itertools
import signal
import sys

# `python -m jaxkv` imports jax before `__main__` runs. There, an exception that
# SIGINT raises in a callback would be dropped, and the signal lost; so it ends
# the process at once, until `__main__` installs its own handlers. While Python
# looks for the module to run, sys.argv[0] is "-m".
_IS_COMMAND = sys.argv[:1] == ["-m"] and ("-m", "jaxkv") in itertools.pairwise(
  sys.orig_argv
)
if _IS_COMMAND and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.SIG_DFL)
