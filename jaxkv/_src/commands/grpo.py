"""`python -m jaxkv grpo`: a model learns a task, in one compiled program.

A small model with random weights learns to repeat its prompt. A round draws
answers, rewards them and updates the weights, all in one jitted program that
owns weights and cache. With `--numerics exact` the update has the very numbers
that the answers were drawn with; with `fast` they differ by rounding.
"""

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from jaxkv._src.commands import grpo_round
from jaxkv._src.commands import json_file
from jaxkv._src.commands import results
from jaxkv._src.commands.errors import CommandError
from jaxkv._src.commands.grpo_round import RoundFigures

_RANGES = {"rounds": (2, 100_000), "seed": (0, 2**32 - 1)}
_MEAN_OF = 10
"""Last rounds of which the reward is the mean, at most."""
_COMPILED = "/jax/core/compile/backend_compile_duration"


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the command's arguments to its parser."""
  add = parser.add_argument
  add("--rounds", metavar="N", type=int, default=120, help="(%(default)s)")
  add(
    "--numerics",
    choices=("exact", "fast"),
    default="exact",
    help="of the model (%(default)s)",
  )
  add(
    "--dtype",
    choices=("float32", "bfloat16"),
    default="float32",
    help="of weights and K/V (%(default)s)",
  )
  add("--seed", metavar="I", type=int, default=1, help="(%(default)s)")
  add("--json", metavar="FILE", help="also write figures of all rounds here")


def run(args: argparse.Namespace) -> int:
  """Trains, prints a table and writes JSON if asked to.

  Args:
    args: what `add_arguments` describes.

  Returns:
    The exit code, 0.

  Raises:
    CommandError: an argument cannot be used, FILE cannot be written, or the
      result cannot be printed.
  """
  for name, (least, most) in _RANGES.items():
    value = getattr(args, name)
    if not least <= value <= most:
      raise CommandError(f"--{name} must be {least} .. {most}, not {value}")
  with contextlib.ExitStack() as stack:
    write = None
    if args.json is not None:
      write = stack.enter_context(json_file.opened(args.json))
    result = _trained(args)
    if write is not None:
      write(result)
  with results.printed():
    _show(result)
  return 0


def _trained(args: argparse.Namespace) -> dict[str, Any]:
  """Runs all rounds; what the JSON file has."""
  model = grpo_round.decoder(args.numerics, jnp.dtype(args.dtype))
  program = jax.jit(
    functools.partial(grpo_round.grpo_round, model=model), donate_argnums=0
  )
  first, rest = jax.random.split(jax.random.key(args.seed))
  carry = grpo_round.begin(model, first)
  keys = list(jax.random.split(rest, args.rounds))
  print("compiling a round ...", file=sys.stderr, flush=True)
  begin = time.perf_counter()
  compiled = program.lower(carry, keys[0]).compile()
  rounds, seconds, later = [], [], 0
  ready = time.perf_counter()
  with (
    _compilations() as seen,
    tqdm.tqdm(total=args.rounds, desc="grpo", unit="round") as bar,
  ):
    for key in keys:
      start = time.perf_counter()
      carry, figures = jax.block_until_ready(compiled(carry, key))
      seconds.append(time.perf_counter() - start)
      rounds.append(jax.tree.map(np.asarray, figures))
      bar.set_postfix_str(f"reward {figures.reward:.2f}", refresh=False)
      bar.update()
    later = len(seen)
  figures = jax.tree.map(lambda *some: np.stack(some), *rounds)
  return _collected(args, figures) | {
    "compile_seconds": ready - begin,
    "compilations_of_rounds": later,
    "seconds_a_round": float(np.median(seconds)),
    "seconds": time.perf_counter() - begin,
  }


@contextlib.contextmanager
def _compilations() -> Iterator[list[float]]:
  """The seconds of each compilation in the block, in a list."""
  seen: list[float] = []

  def note(event: str, duration_secs: float, **_: Any) -> None:
    if event == _COMPILED:
      seen.append(duration_secs)

  jax.monitoring.register_event_duration_secs_listener(note)
  try:
    yield seen
  finally:
    jax.monitoring.unregister_event_duration_listener(note)


def _collected(
  args: argparse.Namespace, figures: RoundFigures
) -> dict[str, Any]:
  """Figures of all rounds, and what they come to."""
  prompts = args.rounds * grpo_round.PROMPTS
  answers = prompts * grpo_round.SAMPLES
  # The last token of a prompt, or of an answer before its end, is computed
  # when the next one is drawn, and counts there.
  beside_last = grpo_round.TOKENS - 1
  counters = figures.counters
  return {
    "rounds": args.rounds,
    "numerics": args.numerics,
    "dtype": args.dtype,
    "seed": args.seed,
    "answers": answers,
    "reward_before": float(figures.reward[0]),
    "reward_after": float(np.mean(figures.reward[-_MEAN_OF:])),
    "largest_mismatch": float(np.max(figures.mismatch)),
    "largest_off_ratio": float(np.max(figures.off_ratio)),
    "largest_kl": float(np.max(figures.kl)),
    "prefilled_tokens": int(np.sum(counters.prefilled)),
    "prompt_tokens": prompts * beside_last,
    "prompt_tokens_of_samples": answers * beside_last,
    "generated_tokens": int(np.sum(counters.generated)),
    "answer_tokens": answers * grpo_round.TOKENS,
    "computed_rows": int(np.sum(counters.rows)),
    "rewards": figures.reward.astype(np.float64).tolist(),
    "mismatches": figures.mismatch.astype(np.float64).tolist(),
  }


def _show(result: dict[str, Any]) -> None:
  useful = result["prefilled_tokens"] + result["generated_tokens"]
  rows = (
    (
      "reward",
      f"{result['reward_before']:.3f} in the first round, "
      f"{result['reward_after']:.3f} in the last "
      f"{min(_MEAN_OF, result['rounds'])}",
    ),
    (
      "mismatch",
      f"{result['largest_mismatch']:.3g} at most, of a token's log-prob when "
      "drawn and when trained",
    ),
    (
      "first update",
      f"ratio 1 within {result['largest_off_ratio']:.3g}, k3 at most "
      f"{result['largest_kl']:.3g}",
    ),
    (
      "prompt tokens",
      f"{result['prefilled_tokens']:,} computed; {result['prompt_tokens']:,} "
      f"if each prompt is once, {result['prompt_tokens_of_samples']:,} if each "
      "sample has its own",
    ),
    (
      "answer tokens",
      f"{result['generated_tokens']:,} computed of "
      f"{result['answer_tokens']:,} needed",
    ),
    (
      "rows computed",
      f"{result['computed_rows']:,}, {result['computed_rows'] / useful:.2f} "
      "for each of these tokens",
    ),
    (
      "seconds",
      f"{result['seconds_a_round']:.3f} a round, {result['seconds']:.1f} in "
      f"total for {result['rounds']:,} rounds",
    ),
    (
      "compilations",
      f"1 in {result['compile_seconds']:.1f} s; in the rounds "
      f"{result['compilations_of_rounds']}",
    ),
  )
  for name, value in rows:
    print(f"{name:14} {value}")
