"""Counts the kernels and host waits of programs compiled for a GPU.

XLA's compiler for an absent GPU is in the extra `aot`. The programs are loops
of decode steps:

| program | one iteration                                                  |
|---------|----------------------------------------------------------------|
| cache   | `allocate`, `commit` and `free` of k tokens for each slot, in  |
|         | a pool of 65,536 pages                                         |
| rollout | a step of `jaxkv.rollout.generate` with 64 slots, k            |
|         | `decode_steps` and the model of `rollout.py`, a stub         |

The instructions in the compiled text of the largest loop are counted, those of
inner loops included, and divided by k. A loop around it is not counted. A
kernel is an instruction that the GPU's runtime launches, or a copy. A loop or
conditional whose predicate is computed on the device makes the host wait: a
loop once for each evaluation of its condition, a conditional once. There are
two cases:

| case        | loops whose trip count depends on data                       |
|-------------|--------------------------------------------------------------|
| upper bound | each runs once, and each conditional its larger branch       |
| common      | the same, but loops in a scope `rare/...` do not run, and    |
|             | conditionals there take the smaller branch                   |

In the common case all slots decode, some fill a page, one sequence ends and
nobody enters. Bodies with a trip count that the compiler knows are multiplied.

  python benchmarks/launches.py [--quick] [--json FILE] [--target TARGET]

`gpu_suite.py` calls `by_part` instead, which counts and times the cache on the
device at hand, also with CUDA graphs. The text does not show which kernels and
waits are in a graph, so they are counted as without graphs.
"""

import functools
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import command
import jax
import jax.numpy as jnp
import numpy as np
import rollout
import rows
import transition_ops as ops
from rows import Row

import jaxkv

# Instructions for which XLA launches nothing on a GPU.
_NO_LAUNCH = {
  "bitcast",
  "call",
  "conditional",
  "constant",
  "get-tuple-element",
  "parameter",
  "tuple",
  "while",
}

GRAPHS = {
  "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL,WHILE,CONDITIONAL",
  "xla_gpu_graph_min_graph_size": 1,
}
"""Compiler options for CUDA graphs of loops whose trip count depends on data.

On an H200, jax 0.11.2 compiled the cache's loop with them to a program that
gives wrong lengths. So jaxkv does not offer them.
"""

_PAGES, _PAGE, _COLUMNS = 65_536, 16, 256
# The token that ends a sequence.
_LAST = 7


class Launches(NamedTuple):
  """The launches of one iteration, or a bound of those of one token.

  Attributes:
    kernels: number of kernels and copies, inner loops included.
    waits: number of times that the host waits for a predicate.
  """

  kernels: float
  waits: float

  def times(self, count: int) -> "Launches":
    """Returns the launches of `count` iterations."""
    return Launches(self.kernels * count, self.waits * count)

  def plus(self, other: "Launches") -> "Launches":
    """Returns the sum of both."""
    return Launches(self.kernels + other.kernels, self.waits + other.waits)


def in_largest_loop(text: str, *, is_common: bool = False) -> Launches:
  """Counts the launches in one iteration of a program's largest loop.

  Args:
    text: the compiled program, as `compiled.as_text()` returns it.
    is_common: True for the common case, False for the upper bound.
  """
  program = _Program(text, is_common=False)
  launches = {
    body: program.launches(body)
    for body in re.findall(r"body=%?([\w.\-]+)", text)
  }
  if not launches:
    return Launches(0, 0)
  # A loop with little besides an inner loop runs once for many iterations of
  # the inner one, as the loop around the steps of a rollout does.
  least = 0.9 * max(launches.values()).kernels
  steps = [body for body in launches if launches[body].kernels >= least]
  body = min(steps, key=lambda body: launches[body])
  return _Program(text, is_common=is_common).launches(body)


class _Program:
  """The instructions of a compiled program by computation."""

  def __init__(self, text: str, *, is_common: bool):
    self._lines, self._is_common = _lines(text), is_common

  def launches(self, name: str) -> Launches:
    """Returns the launches of one run of a computation."""
    total = Launches(0, 0)
    for opcode, line in self._lines[name]:
      if opcode == "while":
        total = total.plus(self._loop(line))
      elif opcode == "conditional":
        total = total.plus(self._conditional(line))
      elif opcode not in _NO_LAUNCH:
        total = total.plus(Launches(1, 0))
    return total

  def _loop(self, line: str) -> Launches:
    body = self.launches(_computations(line, "body")[0])
    num_trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
    if num_trips:
      return body.times(int(num_trips[1]))
    # The host reads the condition before each iteration and after the last.
    condition = self.launches(_computations(line, "condition")[0])
    condition = condition.plus(Launches(0, 1))
    if self._is_rare(line):
      return condition
    return body.plus(condition.times(2))

  def _conditional(self, line: str) -> Launches:
    names = _computations(
      line, "branch_computations", "true_computation", "false_computation"
    )
    choose = min if self._is_rare(line) else max
    return choose(map(self.launches, names)).plus(Launches(0, 1))

  def _is_rare(self, line: str) -> bool:
    return self._is_common and "/rare/" in line


def _computations(line: str, *roles: str) -> list[str]:
  """Returns the names of the computations that an instruction calls."""
  names = re.findall(rf"(?:{'|'.join(roles)})=(\{{[^}}]*\}}|%?[\w.\-]+)", line)
  assert names, line
  return re.findall(r"[\w.\-]+", " ".join(names))


def _lines(text: str) -> dict[str, list[tuple[str, str]]]:
  """Returns opcode and line of each instruction, by computation."""
  lines, computation = {}, ""
  for line in text.splitlines():
    header = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
    if header:
      computation = header[1]
      lines[computation] = []
      continue
    match = re.match(r"\s+(?:ROOT )?%?\S+ = (?:\(.*?\)|\S+) ([\w-]+)\(", line)
    if match:
      lines[computation].append((match[1], line))
  return lines


def cache_loop(num_slots: int, num_tokens: int) -> tuple[Any, ...]:
  """Returns the jitted loop of the cache, and its arguments."""
  config = jaxkv.CacheConfig(
    num_pages=_PAGES,
    page_size=_PAGE,
    num_slots=num_slots,
    pages_per_slot=_COLUMNS,
  )
  counts = jnp.full((num_slots,), num_tokens, jnp.int32)

  def step(state: jaxkv.CacheState, tokens: jax.Array) -> Any:
    state, _ = jaxkv.allocate(state, counts)
    state, _ = jaxkv.commit(state, tokens, counts)
    state, _ = jaxkv.free(state, mask=tokens[:, 0] == _LAST)
    return state, None

  def loop(state: jaxkv.CacheState, tokens: jax.Array) -> Any:
    return jax.lax.scan(step, state, tokens)[0]

  state = jax.eval_shape(lambda: jaxkv.init(config, jaxkv.salt("")))
  tokens = jax.ShapeDtypeStruct((8, num_slots, num_tokens), jnp.int32)
  return jax.jit(loop, donate_argnums=0), state, tokens


def rollout_loop(decode_steps: int) -> tuple[Any, ...]:
  """Returns the jitted loop of a rollout, and its arguments."""
  sampling = jaxkv.rollout.Sampling(temperature=0.0)
  state = rollout.decoding_state(sampling, decode_steps)
  state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
  program = functools.partial(jaxkv.rollout.generate, model=rollout.stub)
  params = jax.ShapeDtypeStruct((rollout.SLOTS, 2), jnp.float32)
  return jax.jit(program, donate_argnums=1), params, state


def counted(target: str, quick: bool) -> Iterator[Row]:
  """Yields the rows of all programs; their bounds are for the common case."""
  sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
  from tests.tools.ahead_of_time import compile_for

  large = functools.partial(cache_loop, 256)
  small = functools.partial(cache_loop, 64)
  programs = [("cache, 256 slots", large, 1, Launches(80, 5))]
  if not quick:
    programs += [
      ("cache, 256 slots", large, 8, Launches(11, 0.7)),
      ("cache, 64 slots", small, 1, Launches(80, 5)),
      ("rollout, 64 slots", rollout_loop, 1, Launches(150, 10)),
      ("rollout, 64 slots", rollout_loop, 8, Launches(60, 1.5)),
    ]
  for name, make, k, bounds in programs:
    text = compile_for(target, *make(k)).text
    name = f"{name}, k = {k}"
    upper_bound = in_largest_loop(text)
    yield Row(name, "kernels a token, upper bound", upper_bound.kernels / k)
    yield Row(name, "waits a token, upper bound", upper_bound.waits / k)
    common = in_largest_loop(text, is_common=True)
    for metric, value, bound in zip(
      Launches._fields, common, bounds, strict=True
    ):
      yield rows.at_most(name, f"{metric} a token, common", value / k, bound)


def by_part(name: str, quick: bool) -> None:
  """Counts and times the cache on this device, and writes part by part."""
  # CUDA graphs come last, because a graph that fails ends the process.
  arms: dict[str, dict[str, Any] | None] = {"": None}
  if not quick and jax.default_backend() == "gpu":
    arms["graphs"] = GRAPHS
  parts = {
    f"k = {k} {arm}".strip(): functools.partial(timed, k, arm, options, quick)
    for arm, options in arms.items()
    for k in (1, 4, 8, 16)
  }
  rows.by_part(name, parts)


def timed(
  k: int, arm: str, options: dict[str, Any] | None, quick: bool
) -> Iterator[Row]:
  """Yields the launches and the time of a token in every slot."""
  slots, steps, rounds = (8, 4, 2) if quick else (256, 128, 9)
  program, state, _ = cache_loop(slots, k)
  rng = np.random.default_rng(0)
  # Lengths differ, so that 1/16 of the slots fill a page in a step if k is 1.
  lengths = np.arange(slots) % _PAGE
  state = jaxkv.init(state.config, jaxkv.salt(""))
  state = ops.fill_slots(state, ops.random_tokens(rng, (slots, _PAGE)), lengths)
  tokens = ops.random_tokens(rng, (steps, slots, k))
  # One sequence ends in each step.
  ending = np.arange(steps)
  tokens = tokens.at[ending, ending, 0].set(_LAST)
  compiled = program.lower(state, tokens).compile(compiler_options=options)
  name = f"cache, {slots} slots, k = {k} {arm}".strip()
  samples, results = rows.alternated({name: (compiled, state, tokens)}, rounds)
  state = results[name]
  is_wrong = np.asarray(state.length[steps:] != lengths[steps:] + steps * k)
  num_wrong = int(is_wrong.sum()) + (int(state.error) != 0)
  yield rows.at_most(name, "errors and wrong lengths", num_wrong, 0)
  launches = in_largest_loop(compiled.as_text() or "", is_common=True)
  yield Row(name, "kernels a token, common case", launches.kernels / k)
  yield Row(name, "waits a token, common case", launches.waits / k)
  us = samples[name][:, 0] * 1e6 / (steps * k)
  yield Row(name, "us a token, median", float(np.median(us)))
  yield Row(name, "us a token, minimum", float(us.min()))


def measured(quick: bool, rounds: int, target: str) -> dict[str, Any]:
  """Counts and prints all rows."""
  del rounds  # Nothing is timed.
  return {"target": target, **rows.report(counted(target, quick))}


def main() -> None:
  # The compiler of an absent GPU needs no device, and must not look for one.
  jax.config.update("jax_platforms", "cpu")
  command.run(
    __doc__,
    measured,
    rounds=1,
    quick_rounds=1,
    not_measured="time, and what a launch costs",
    arguments={
      "--target": {"default": "h200", "choices": ["h200", "a100", "l40"]}
    },
  )


if __name__ == "__main__":
  main()
