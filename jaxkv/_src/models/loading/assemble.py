"""Parameters made of stored tensors, each of which is used exactly once."""

import itertools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxkv._src.models.decoder import layout
from jaxkv._src.models.decoder import params as leaves
from jaxkv._src.models.loading.plans import Part
from jaxkv._src.models.loading.plans import Parts
from jaxkv._src.models.loading.plans import Plan
from jaxkv._src.models.loading.stored import Stored

_NAMED = 3


def check(plan: Plan, stored: Stored, where: str) -> None:
  """Checks names and shapes of all tensors, before any is read.

  Raises:
    ValueError: tensors are missing, are not known, or have other shapes.
  """
  wanted: dict[str, tuple[int, ...]] = {}
  missing: dict[str, None] = {}
  for part in parts_of(plan):
    wanted |= dict(part.tensors)
    missing |= {name: None for name, _ in part.tensors if name not in stored}
    # A damaged config.json may name billions.
    if len(missing) > 2 * _NAMED:
      break
  if missing:
    raise ValueError(
      f"{where} lacks tensors: {_few(list(missing))}; get it again."
    )
  unknown = [
    name
    for name in stored
    if name not in wanted and not plan.unused.fullmatch(name)
  ]
  if unknown:
    raise ValueError(
      f"{where} has tensors that are not known: {_few(unknown)}; its "
      "architecture is not the one that its config.json names."
    )
  for name, shape in wanted.items():
    found = stored[name]
    if found.shape != shape:
      raise ValueError(
        f"tensor {name} in {where} must have shape {list(shape)}, as its "
        f"config.json says, got {list(found.shape)}."
      )
    if not jax.numpy.issubdtype(found.dtype, jax.numpy.floating):
      raise ValueError(
        f"tensor {name} in {where} must hold floats, got {found.dtype.name}; "
        "such quantized weights are not supported."
      )


def assemble(
  plan: Plan, stored: Stored, tick: Callable[[], Any] = lambda: None
) -> leaves.Params:
  """Reads the tensors and makes the parameters.

  A stacked array is filled layer by layer in its own type, so that beside the
  parameters only one layer's tensor is in memory.

  Args:
    plan: which tensors, and what of them; checked.
    stored: the tensors.
    tick: called after each parameter of a layer.
  """
  dtype = plan.decoder.dtype

  def array(leaf: leaves.Leaf, parts: list[Part], stacks: bool) -> jax.Array:
    out = np.empty(leaf.shape, leaf.dtype or dtype)
    rows = out if stacks else out[None]
    for row, part in zip(rows, parts, strict=True):
      row[...] = part.make(*(stored[name].read() for name, _ in part.tensors))
      tick()
    return jax.device_put(out)

  tree = leaves.leaves_of(plan.decoder)
  made: leaves.Params = {
    name: array(tree[name], [part], False) for name, part in plan.top.items()
  }
  made["layers"] = tuple(
    tuple(
      {
        name: array(leaf, [parts[name] for parts in layers], True)
        for name, leaf in place.items()
      }
      for place, layers in zip(own, _layers(plan, stretch), strict=True)
    )
    for own, stretch in zip(
      tree["layers"], layout.stretches(plan.decoder), strict=True
    )
  )
  return made


def _layers(plan: Plan, stretch: layout.Stretch) -> Iterator[list[Parts]]:
  """For each layer of a pattern, the parts of its repetitions."""
  size = len(stretch.pattern)
  for place in range(size):
    yield [
      plan.layer(stretch.first + place + size * number)
      for number in range(stretch.repetitions)
    ]


def parts_of(plan: Plan) -> Iterator[Part]:
  layers = range(plan.decoder.num_layers)
  return itertools.chain(
    plan.top.values(),
    *(plan.layer(number).values() for number in layers),
  )


def num_parts(plan: Plan) -> int:
  """How often `assemble` calls `tick`."""
  return sum(1 for _ in parts_of(plan))


def _few(names: list[str]) -> str:
  more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
  return ", ".join(names[:_NAMED]) + more
