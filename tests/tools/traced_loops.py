"""Lists the equations of a traced program, before it is compiled.

Tests look at jaxprs because XLA hoists loop-invariant operations out of a loop
on a CPU, but not on GPUs and TPUs.
"""

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import jax

_LOOPS = ("scan", "while")


def equations(function: Callable[..., Any], *arguments: Any) -> list[Any]:
  """Returns the equations of a function and of all that it calls."""
  traced = jax.make_jaxpr(function)(*arguments)
  return [equation for equation, _ in _walk(traced.jaxpr, False)]


def in_loops(function: Callable[..., Any], *arguments: Any) -> list[Any]:
  """Returns the equations inside of loops."""
  traced = jax.make_jaxpr(function)(*arguments)
  return [equation for equation, inside in _walk(traced.jaxpr, False) if inside]


def _walk(jaxpr: Any, inside: bool) -> Iterator[tuple[Any, bool]]:
  for equation in jaxpr.eqns:
    yield equation, inside
    inside_loop = inside or equation.primitive.name in _LOOPS
    for inner in _inner(equation.params):
      yield from _walk(inner, inside_loop)


def _inner(params: dict[str, Any]) -> Iterator[Any]:
  """Yields the jaxprs that an equation runs."""
  for value in params.values():
    for part in value if isinstance(value, (tuple, list)) else (value,):
      part = getattr(part, "jaxpr", part)
      if hasattr(part, "eqns"):
        yield part
