"""Finds the large operations in the loops of a compiled program's text."""

import dataclasses
import math
import re

# These forward, index, or update their operands in place.
_NO_WORK = {
  "bitcast",
  "call",
  "conditional",
  "dynamic-update-slice",
  "fusion",
  # Of an asynchronous fusion. Its operations are in the computation it calls.
  "fusion-done",
  "get-tuple-element",
  "parameter",
  "scatter",
  "tuple",
  "while",
}


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation.

  Attributes:
    opcode: the operation.
    elements: the number of elements of its result; 0 for a tuple.
    calls: the computations that it runs.
    text: the line.
  """

  opcode: str
  elements: int
  calls: tuple[str, ...]
  text: str


def parse(text: str) -> dict[str, list[Instruction]]:
  """Parses the instructions of each computation."""
  computations: dict[str, list[Instruction]] = {}
  lines: list[Instruction] = []
  for line in text.splitlines():
    header = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
    if header:
      lines = computations[header[1]] = []
      continue
    match = re.match(r"\s+(?:ROOT )?%?\S+ = (\(.*?\)|\S+) ([\w-]+)\(", line)
    if match:
      lines.append(_instruction(match[1], match[2], line.strip()))
  return computations


def _instruction(shape: str, opcode: str, line: str) -> Instruction:
  dims = re.match(r"\w+\[([\d,]*)\]", shape)
  elements = 0
  if dims:
    elements = math.prod(int(n) for n in dims[1].split(",") if n)
  calls = re.findall(r"(?:calls|body|condition|to_apply)=%?([\w.\-]+)", line)
  for branches in re.findall(r"branch_computations=\{([^}]*)\}", line):
    calls += [name.strip().lstrip("%") for name in branches.split(",")]
  calls += re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line)
  return Instruction(opcode, elements, tuple(calls), line)


def work_in_loops(text: str, elements: int) -> dict[str, list[str]]:
  """Returns instructions in loops with at least `elements`, by loop body.

  The list of a body includes its fusions, but not its inner loops, which are
  bodies themselves.
  """
  computations = parse(text)
  by_body = {}
  for body in _bodies(computations):
    large = [
      instruction.text
      for name in _reached(computations, body)
      for instruction in computations[name]
      if instruction.opcode not in _NO_WORK and instruction.elements >= elements
    ]
    if large:
      by_body[body] = large
  return by_body


def _bodies(computations) -> set[str]:
  return {
    name
    for lines in computations.values()
    for instruction in lines
    if instruction.opcode == "while"
    for name in instruction.calls
  }


def _reached(computations, start: str) -> set[str]:
  """Returns the computations of one iteration, without inner loops."""
  reached, stack = set(), [start]
  while stack:
    name = stack.pop()
    if name in reached or name not in computations:
      continue
    reached.add(name)
    for instruction in computations[name]:
      if instruction.opcode != "while":
        stack += instruction.calls
  return reached
