"""A rollout in spans of steps, with a progress bar between them."""

import functools
import sys
import time
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import tqdm

from jaxkv import rollout
from jaxkv.rollout import RolloutState


class Timed(NamedTuple):
  """A result, and how long it took.

  Attributes:
    value: the result.
    seconds: without compilation.
    compile_seconds: the compilation.
  """

  value: Any
  seconds: float
  compile_seconds: float


def generate(
  params: Any,
  state: RolloutState,
  *,
  model: Callable[..., Any],
  steps: int,
) -> Timed:
  """Runs a rollout to its end.

  Args:
    params: the model's.
    state: the rollout; it is donated.
    model: see `jaxkv.rollout.Model`.
    steps: of a span; 0 for one span.

  Returns:
    The end of the rollout.
  """
  program = functools.partial(rollout.generate, model=model)
  span = rollout.Until(steps=jnp.int32(steps))
  print("compiling the loop ...", file=sys.stderr, flush=True)
  begin = time.perf_counter()
  compiled = (
    jax.jit(program, donate_argnums=1).lower(params, state, span).compile()
  )
  ready = time.perf_counter()
  total = int(state.sequences.length.shape[0])
  with tqdm.tqdm(total=total, desc="rollout", unit="seq") as bar:
    while True:
      state = compiled(params, state, span)
      done = int(jnp.sum(state.sequences.status >= rollout.DONE))
      bar.update(done - bar.n)
      if done == total:
        break
  return Timed(state, time.perf_counter() - ready, ready - begin)
