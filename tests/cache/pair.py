"""A cache and its oracle, moved together and compared after every move."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
import jaxkv.telemetry
from tests.cache.differences import differences
from tests.cache.mirror import Mirror
from tests.cache.moves import ARGUMENTS
from tests.cache.moves import WEIGHTS
from tests.cache.moves import Moves
from tests.cache.setups import Setup
from tests.model_of_the_cache.verbs import Oracle

_BETWEEN_READINGS = 3
"""Moves whose events are read together, where the cache keeps any."""

DTYPES = {"salts": np.uint32, "mask": np.bool_}

VERBS = {
  name: getattr(jaxkv, name.removesuffix("_slots").removesuffix("_mask"))
  for name in ARGUMENTS
}
"""Public verbs; `free` stands here twice because it has two kinds of input."""

QUERIES = ("match", "num_common_prefix_pages")
"""Verbs that return an answer and no state."""

invariants = jax.jit(jaxkv.check_invariants)


class Mismatch(AssertionError):
  """The cache does not do what the oracle says."""


class Pair:
  """A cache and its oracle.

  Attributes:
    setup: sizes of both.
    verbs: what to call for each move; tests of broken caches replace some.
    oracle, state: the two.
    codes: every code that a move was answered with.
    mirror: what is cached, as told by events.
    moves: how many were made.
  """

  def __init__(self, setup: Setup, verbs: dict[str, Callable] = VERBS):
    self.setup = setup
    self.verbs = verbs
    self.oracle = Oracle(setup.config)
    self.state = jaxkv.init(setup.config)
    self.codes: set[jaxkv.Status] = set()
    self.mirror, self.moves = Mirror(), 0

  def move(self, verb: str, arguments: tuple) -> dict:
    """Makes one move with both; raises `Mismatch`, else the oracle's answer."""
    wanted = getattr(self.oracle, verb)(*arguments)
    got = self.verbs[verb](self.state, **arrays(verb, arguments))
    if verb in QUERIES:
      out = got
    else:
      self.state, out = got
    found = _differing(wanted, out) + differences(self.oracle, self.state)
    laws = jax.device_get(invariants(self.state))
    found += [f"{name} is broken" for name, holds in laws.items() if not holds]
    self.moves += 1
    if self.setup.config.event_log and self.moves % _BETWEEN_READINGS == 0:
      found += self._told()
    if isinstance(wanted, dict):
      self.codes.update(np.ravel(wanted.get("code", [])).tolist())
    if found:
      raise Mismatch(f"{verb}{arguments}:\n" + "\n".join(found))
    return wanted

  def _told(self) -> list[str]:
    """In what events differ from the oracle."""
    self.state, drained = jaxkv.telemetry.drain_events(self.state)
    found = self.mirror.follow(drained)
    pool, config = self.oracle.pool, self.setup.config
    return found + self.mirror.differences(pool, config)

  def forgive(self) -> None:
    """Forgets the sticky error of both."""
    self.oracle.error = jaxkv.Status.OK
    self.state = dataclasses.replace(self.state, error=jnp.int32(0))


def arrays(verb: str, arguments: tuple) -> dict:
  """Lists by name, as arrays of the dtypes that the verb wants."""
  return {
    name: np.asarray(argument, DTYPES.get(name, np.int32))
    for name, argument in zip(ARGUMENTS[verb], arguments, strict=True)
    if argument is not None
  }


def _differing(wanted, got) -> list[str]:
  """Which fields of an output are not what they should be."""
  if not isinstance(wanted, dict):
    wanted, got = {"answer": wanted}, {"answer": got}
  if not isinstance(got, dict):
    got = got._asdict() if hasattr(got, "_asdict") else vars(got)
  found = []
  for name, value in wanted.items():
    if isinstance(value, dict):
      found += _differing(value, got[name])
    elif np.asarray(got[name]).tolist() != np.asarray(value).tolist():
      found.append(f"{name}: oracle {value}, got {got[name]}")
  return found


class Seeded:
  """Draws from a seeded generator."""

  def __init__(self, seed: int):
    self.generator = np.random.default_rng(seed)

  def integer(self, low: int, high: int) -> int:
    """An integer from low to high, both included."""
    return int(self.generator.integers(low, high + 1))


def wander(
  pair: Pair, seed: int, steps: int, weights: dict[str, int] = WEIGHTS
) -> None:
  """Makes random moves, one in six of them spoiled."""
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
