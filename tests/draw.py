"""Which of the many costly tests run at this commit.

All mutants take a quarter of an hour, and so do all setups of the state
machine: too long for every commit. A fixed few would leave the rest to whoever
thinks of `--deep`. So commits take turns: a test marked
`drawn("name", names, every=N)` runs at one commit of N for each `name`, and so
does a whole file, or a test of it, that is marked `drawn(every=N)`. The mark
that is nearest to a test counts.

Turns are counted, not hashed: commit number t of the history runs the names
whose rank is t modulo N, so that N commits in a row run every name exactly
once. A hash alone would leave out a third of them in N commits. Ranks are
hashed, so that names that stand side by side, which are about the same code,
run at different commits. Where git does not know the history (no checkout, a
shallow clone) the turn comes from the hash after all.
"""

import hashlib
import pathlib
import subprocess
from collections.abc import Collection

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_WITHOUT_GIT = "0"
_TURN_DIGITS = 6
"""A longer number is taken for a hash, of which few are without letters."""


def turn_of(draw: str | None) -> int:
  """The turn of a commit.

  Args:
    draw: a commit, or the number of a turn; None for the commit checked out.
  """
  draw = draw or _git("rev-parse", "HEAD") or _WITHOUT_GIT
  if draw.isdecimal() and len(draw) <= _TURN_DIGITS:
    return int(draw)
  if _git("rev-parse", "--is-shallow-repository") == "false":
    count = _git("rev-list", "--count", f"{draw}^{{commit}}", "--")
    if count is not None:
      return int(count)
  return _number(draw) % 10**_TURN_DIGITS


def drawn(names: Collection[str], every: int, turn: int) -> set[str]:
  """The names whose turn it is."""
  return set(sorted(names, key=_number)[turn % every :: every])


def has_turn(name: str, every: int, turn: int) -> bool:
  """Whether it is the turn of a whole file."""
  return (turn + _number(name)) % every == 0


def _number(text: str) -> int:
  return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def _git(*arguments: str) -> str | None:
  """What git prints; None where there is no git or it fails."""
  try:
    done = subprocess.run(
      ["git", *arguments],
      cwd=_ROOT,
      capture_output=True,
      text=True,
      check=False,
    )
  except OSError:
    return None
  return None if done.returncode else done.stdout.strip()
