"""Checks a function of rows under jax's transformations."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec

TRANSFORMS = ("no jit", "jit", "64 bits", "vmap", "shard_map")
"""The names that `check_under` takes."""


def check_under(
  transform: str,
  check: Callable[[Callable[..., Any]], None],
  function: Callable[..., Any],
  *,
  shared: int = 0,
) -> None:
  """Runs a check with a function under one of `TRANSFORMS`.

  `check` calls its argument and asserts the result. The function takes arrays
  of at least two rows, except its first `shared` arguments.
  """
  if transform == "no jit":
    check(function)
  elif transform == "jit":
    check(jax.jit(function))
  elif transform == "64 bits":
    with jax.enable_x64(True):
      check(jax.jit(function))
  elif transform == "vmap":
    check(jax.jit(_row_by_row(function, shared)))
  else:
    check(_sharded(function, shared))


def _row_by_row(function, shared):
  def call(*arguments):
    def row(*arrays):
      arrays = jax.tree.map(lambda leaf: leaf[None], arrays)
      out = function(*arguments[:shared], *arrays)
      return jax.tree.map(lambda leaf: leaf[0], out)

    return jax.vmap(row)(*arguments[shared:])

  return call


def _sharded(function, shared):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
  rows = PartitionSpec("data")

  def call(*arguments):
    specs = [PartitionSpec()] * shared + [rows] * (len(arguments) - shared)
    split = jax.shard_map(
      function, mesh=mesh, in_specs=tuple(specs), out_specs=rows
    )
    return jax.jit(split)(*arguments)

  return call


def on_devices(function: Any, calls: Sequence[Any]) -> tuple[str, list[Any]]:
  """Returns the compiled text and the results of calls, one on each device.

  A call is (state, keywords).
  """
  mesh = jax.make_mesh((len(calls),), ("data",), axis_types=(AxisType.Auto,))
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *calls)

  def local(call):
    state, keywords = jax.tree.map(lambda leaf: leaf[0], call)
    out = function(state, **keywords)
    return jax.tree.map(lambda leaf: leaf[None], out)

  spec = PartitionSpec("data")
  sharded = jax.jit(
    jax.shard_map(local, mesh=mesh, in_specs=(spec,), out_specs=spec)
  )
  # Placed first: what is not read would have no other sharding.
  placed = jax.device_put(stacked, jax.NamedSharding(mesh, spec))
  compiled = sharded.lower(placed).compile()
  # Fetched first: to index what is sharded would itself be a collective.
  out = jax.device_get(compiled(placed))
  results = [
    jax.tree.map(lambda leaf, i=i: leaf[i], out) for i in range(len(calls))
  ]
  return compiled.as_text() or "", results
