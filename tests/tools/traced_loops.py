"""What a traced program does, in its loops or at all, before it is compiled.

A compiler for CPUs takes out of a loop what is the same in all its trips;
those for GPUs and TPUs do not.
"""

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import jax

_LOOPS = ("scan", "while")


def equations(function: Callable[..., Any], *arguments: Any) -> list[Any]:
  """Of a function and of all that it calls."""
  traced = jax.make_jaxpr(function)(*arguments)
  return [equation for equation, _ in _walk(traced.jaxpr, False)]


def in_loops(function: Callable[..., Any], *arguments: Any) -> list[Any]:
  """Those that run more than once."""
  traced = jax.make_jaxpr(function)(*arguments)
  return [equation for equation, inside in _walk(traced.jaxpr, False) if inside]


def _walk(jaxpr: Any, inside: bool) -> Iterator[tuple[Any, bool]]:
  for equation in jaxpr.eqns:
    yield equation, inside
    within = inside or equation.primitive.name in _LOOPS
    for inner in _inner(equation.params):
      yield from _walk(inner, within)


def _inner(params: dict[str, Any]) -> Iterator[Any]:
  """The jaxprs that an equation runs."""
  for value in params.values():
    for part in value if isinstance(value, (tuple, list)) else (value,):
      part = getattr(part, "jaxpr", part)
      if hasattr(part, "eqns"):
        yield part
