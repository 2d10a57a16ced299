"""Finds the collective operations of a compiled program."""

import re

from tests.tools.compiled_loops import Instruction
from tests.tools.compiled_loops import parse

_OPCODES = re.compile(
  "all-gather|all-reduce|.*all-to-all|collective-.*|reduce-scatter"
)
_OUTSIDE = re.compile(r'/sample/|jit\(forward\)/gather"')


def collectives(text: str) -> dict[str, list[Instruction]]:
  """Returns the collective operations of each computation.

  An asynchronous operation is listed once, by its start.
  """
  by_computation = {
    name: [line for line in lines if _communicates(line)]
    for name, lines in parse(text).items()
  }
  return {name: lines for name, lines in by_computation.items() if lines}


def _communicates(line: Instruction) -> bool:
  if line.opcode.endswith("-done"):
    return False
  return bool(_OPCODES.fullmatch(line.opcode.removesuffix("-start")))


def assert_two_all_reduces_a_layer(
  text: str, *, loops: int, pool: int, layers: int = 1
) -> None:
  """Checks a tensor-parallel program with `loops` loops over layers.

  `pool` is the number of elements of a device's shard of the pages. An
  iteration of a loop runs `layers` layers. Sampling and the lookup of tied
  embeddings are outside of these loops, and not counted.
  """
  by_computation = {
    name: [line for line in lines if not _OUTSIDE.search(line.text)]
    for name, lines in collectives(text).items()
  }
  by_computation = {name: x for name, x in by_computation.items() if x}
  assert len(by_computation) == loops, by_computation
  for lines in by_computation.values():
    assert len(lines) <= 2 * layers, lines
    for line in lines:
      assert line.opcode.startswith("all-reduce"), line.text
      # An asynchronous start has a tuple shape; its sizes are in the text.
      shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", line.text)
      assert shapes
      for shape in shapes:
        elements = 1
        for dim in shape.split(","):
          elements *= int(dim)
        assert elements < pool // 4, line.text


def largest_dimension(text: str) -> int:
  """Returns the largest dimension of the arrays of collective operations."""
  return max(
    int(dim)
    for lines in collectives(text).values()
    for line in lines
    for shape in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", line.text)
    for dim in shape.split(",")
  )
