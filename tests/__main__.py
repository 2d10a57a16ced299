"""The test command: `python -m tests [--only-pytest] [--all] [other options]`.

Runs format, lint and types, which take seconds, then pytest with doctests,
layering, notebooks and tests. The first stage that fails ends the run with its
exit code.
"""

import pathlib
import subprocess
import sys

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_ONLY_PYTEST = "--only-pytest"
# A later -n wins: `python -m tests -n 0` is one process.
_PYTEST = ("pytest", "-n", "2", "--dist", "worksteal", "-rfEs")
# A test that never ends, as a loop on the device can, fails after 20 minutes:
# its process ends, and another one continues.
_PYTEST += ("-o", "faulthandler_timeout=1200")
_PYTEST += ("-o", "faulthandler_exit_on_timeout=true")
_STAGES = {
  "format": ("ruff", "format", "--check", "."),
  "lint": ("ruff", "check", "."),
  "types": ("pyright", "--pythonpath", sys.executable),
  "tests": _PYTEST,
}


def main(arguments: list[str]) -> int:
  """Runs the stages in order; returns the first exit code that is not 0."""
  only_pytest = _ONLY_PYTEST in arguments
  extra = [word for word in arguments if word != _ONLY_PYTEST]
  for stage, command in _STAGES.items():
    if stage == "tests":
      command = (*command, *extra)
    elif only_pytest:
      continue
    print(f"[{stage}] {' '.join(command)}", flush=True)
    done = subprocess.run([sys.executable, "-m", *command], cwd=_ROOT)
    if done.returncode:
      # The summary of pytest stays the last line.
      if stage != "tests":
        print(f"stopped: [{stage}] failed", flush=True)
      return done.returncode
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
