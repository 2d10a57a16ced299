"""Moves a cache together with its oracle, and compares both after each move."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
import jaxkv.results
from tests.cache.differences import differences
from tests.cache.moves import ARGUMENTS
from tests.cache.moves import WEIGHTS
from tests.cache.moves import Moves
from tests.cache.setups import Setup
from tests.model_of_the_cache.verbs import Oracle

DTYPES = {"salts": np.uint32, "mask": np.bool_}

VERBS = {
  name: getattr(jaxkv, name.removesuffix("_slots").removesuffix("_mask"))
  for name in ARGUMENTS
}
"""Public verbs; `free` is here twice because it has two kinds of input."""

QUERIES = ("match", "num_common_prefix_pages")
"""Verbs that return an answer and no state."""

invariants = jax.jit(jaxkv.check_invariants)


class Mismatch(AssertionError):
  """The cache differs from the oracle."""


class Pair:
  """A cache and its oracle.

  Attributes:
    setup: the setup of both.
    verbs: the verb to call for each move; tests of broken caches replace some.
    oracle, state: the oracle and the cache.
    codes: the codes of all answers so far.
  """

  def __init__(self, setup: Setup, verbs: dict[str, Callable] = VERBS):
    self.setup = setup
    self.verbs = verbs
    self.oracle = Oracle(setup.config)
    self.state = jaxkv.init(setup.config)
    self.codes: set[jaxkv.Status] = set()

  def move(self, verb: str, arguments: tuple) -> dict:
    """Makes a move on both sides; returns the oracle's answer."""
    self.oracle.pool.moves = []
    expected = getattr(self.oracle, verb)(*arguments)
    result = self.verbs[verb](self.state, **arrays(verb, arguments))
    if verb in QUERIES:
      out = result
    else:
      self.state, out = result
    if self.setup.config.offload_pages and verb not in QUERIES:
      errors = self._compare_moves(out)
    else:
      errors = []
    errors += _differing(expected, out) + differences(self.oracle, self.state)
    laws = jax.device_get(invariants(self.state))
    errors += [f"{name} is broken" for name, holds in laws.items() if not holds]
    if isinstance(expected, dict):
      self.codes.update(np.ravel(expected.get("code", [])).tolist())
    if errors:
      raise Mismatch(f"{verb}{arguments}:\n" + "\n".join(errors))
    return expected

  def _compare_moves(self, out) -> list[str]:
    """Returns the differences of the moves between device and host."""
    expected = self.oracle.pool.moves
    moves = getattr(out, "moves", None)
    if moves is None:
      return [f"no moves: oracle {expected}"] if expected else []
    count = int(moves.count)
    first_page = self.setup.config.total_pages + 1
    actual = [
      (
        int(page),
        *(
          None if offload == jaxkv.results.Moves.NONE else first_page + offload
          for offload in pair
        ),
      )
      for page, *pair in zip(
        moves.page[:count].tolist(),
        moves.saved_to[:count].tolist(),
        moves.restored_from[:count].tolist(),
        strict=True,
      )
    ]
    # The moves of different pools have no order.
    numbers = self.setup.config.numbers
    actual, expected = (
      sorted(moves, key=lambda move: int(numbers.pool_of(jnp.int32(move[0]))))
      for moves in (actual, expected)
    )
    return [] if actual == expected else [f"moves: oracle {expected}, {actual}"]

  def forgive(self) -> None:
    """Clears the sticky error of both sides."""
    self.oracle.error = jaxkv.Status.OK
    self.state = dataclasses.replace(self.state, error=jnp.int32(0))


def arrays(verb: str, arguments: tuple) -> dict:
  """Converts lists to arrays by name, of the dtypes of the verb's arguments."""
  return {
    name: np.asarray(argument, DTYPES.get(name, np.int32))
    for name, argument in zip(ARGUMENTS[verb], arguments, strict=True)
    if argument is not None
  }


def _differing(expected, result) -> list[str]:
  """Returns the fields of an output that differ from the expected ones."""
  if not isinstance(expected, dict):
    expected = {"answer": expected}
    result = {"answer": result}
  if not isinstance(result, dict):
    result = result._asdict() if hasattr(result, "_asdict") else vars(result)
  lines = []
  for name, value in expected.items():
    if isinstance(value, dict):
      lines += _differing(value, result[name])
    elif np.asarray(result[name]).tolist() != np.asarray(value).tolist():
      lines.append(f"{name}: oracle {value}, got {result[name]}")
  return lines


class Seeded:
  """Draws from a seeded generator."""

  def __init__(self, seed: int):
    self.generator = np.random.default_rng(seed)

  def integer(self, low: int, high: int) -> int:
    """Returns an integer from low to high, both included."""
    return int(self.generator.integers(low, high + 1))


def wander(
  pair: Pair, seed: int, steps: int, weights: dict[str, int] = WEIGHTS
) -> None:
  """Makes random moves, one in six of them with a bad argument."""
  draws = Seeded(seed)
  verbs = [verb for verb, weight in weights.items() for _ in range(weight)]
  while steps > 0:
    moves = Moves(draws, pair.oracle, pair.setup)
    verb = verbs[draws.integer(0, len(verbs) - 1)]
    arguments = moves.make(verb)
    if arguments is None:
      continue
    if draws.integer(0, 5) == 0:
      arguments = moves.spoiled(verb, arguments)
    pair.move(verb, arguments)
    if draws.integer(0, 3) == 0:
      pair.forgive()
    steps -= 1
