"""Checks random calls against a shadow memory of each page's content.

`python -m tests.shadow_fuzz --calls N --seed I` makes N random calls of all
verbs, divided among the caches of `tests.cache.shadow_setups`, or all in that
of `--config NAME`. After each call, a page of a hit or of a sequence must hold
the K/V of exactly its tokens, and must not be written to. The first violation
is printed and ends the run with exit code 1.
"""

import argparse
import collections
import sys
import time

import jax

from tests.cache.shadow_memory import FalseContent
from tests.cache.shadow_setups import SHADOWED
from tests.cache.shadow_user import User
from tests.cache.shadow_user import stroll

_CALLS_OF_A_CACHE = 2_000
"""The calls of a cache before the next begins, which bounds the sequences."""


def run(name: str, seed: int, calls: int) -> collections.Counter[str]:
  """Makes random calls in caches of a setup of `SHADOWED`; returns counts.

  Raises FalseContent if a page holds other content than a reader relies on.
  """
  setup, counts = SHADOWED[name], collections.Counter()
  with setup.patched():
    for first_call in range(0, calls, _CALLS_OF_A_CACHE):
      user = User(setup)
      cache_seed = seed * 1_000_003 + first_call
      try:
        stroll(user, cache_seed, min(_CALLS_OF_A_CACHE, calls - first_call))
      except FalseContent as error:
        error.add_note(f"in {name}, seed {cache_seed}")
        raise
      counts += user.counts
      counts["page writes"] += user.memory.num_writes
  return counts


def main(arguments: list[str]) -> int:
  """Runs the command; returns its exit code."""
  parser = argparse.ArgumentParser(prog="python -m tests.shadow_fuzz")
  parser.add_argument(
    "--calls", type=int, default=50_000, help="in all configurations"
  )
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--config", choices=sorted(SHADOWED))
  options = parser.parse_args(arguments)
  names = [options.config] if options.config else list(SHADOWED)
  share = -(-options.calls // len(names))
  totals = collections.Counter()
  for name in names:
    start_time = time.perf_counter()
    try:
      counts = run(name, options.seed, share)
    except FalseContent as error:
      print("\n".join([f"FALSE CONTENT: {error}", *error.__notes__]))
      return 1
    # Compiled programs of all configurations do not fit into memory.
    jax.clear_caches()
    totals += counts
    rate = share / (time.perf_counter() - start_time)
    print(f"{name}: {counts['hits']} hits, {rate:,.0f} calls/s", flush=True)
  print(", ".join(f"{key} {count:,}" for key, count in sorted(totals.items())))
  print(
    f"0 pages of false content in {share * len(names):,} calls, "
    f"{len(names)} configurations, seed {options.seed}"
  )
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
