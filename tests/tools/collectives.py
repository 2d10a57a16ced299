"""What the devices of a compiled program say to each other."""

import re

from tests.tools.compiled_loops import Instruction
from tests.tools.compiled_loops import parse

_OPCODES = re.compile(
  "all-gather|all-reduce|.*all-to-all|collective-.*|reduce-scatter"
)


def collectives(text: str) -> dict[str, list[Instruction]]:
  """Operations over several devices, by the computation that they are in.

  One that is started and waited for is listed once, by its start.
  """
  found = {
    name: [line for line in lines if _communicates(line)]
    for name, lines in parse(text).items()
  }
  return {name: lines for name, lines in found.items() if lines}


def _communicates(line: Instruction) -> bool:
  if line.opcode.endswith("-done"):
    return False
  return bool(_OPCODES.fullmatch(line.opcode.removesuffix("-start")))


def assert_two_all_reduces_a_layer(
  text: str, *, layers: int, pool: int
) -> None:
  """Of a program that is tensor parallel, whose layers are bodies of loops.

  Args:
    text: of the program.
    layers: loops over layers in the program.
    pool: elements of a device's part of the pages.
  """
  found = collectives(text)
  assert len(found) == layers, found
  for lines in found.values():
    assert len(lines) <= 2, lines
    for line in lines:
      assert line.opcode.startswith("all-reduce"), line.text
      # Those of an operation that is started are in its text alone.
      sizes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", line.text)
      assert sizes
      for size in sizes:
        elements = 1
        for number in size.split(","):
          elements *= int(number)
        assert elements < pool // 4, line.text
