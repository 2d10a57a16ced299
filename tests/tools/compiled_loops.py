"""Reads a compiled program's text: what is done in its loops, and how much."""

import dataclasses
import math
import re

# These pass on, index, or update in place what they are given.
_FREE = {
  "bitcast",
  "call",
  "conditional",
  "dynamic-update-slice",
  "fusion",
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
    opcode: what it does.
    elements: how many elements it makes; 0 for a tuple.
    calls: computations that it runs.
    text: the line.
  """

  opcode: str
  elements: int
  calls: tuple[str, ...]
  text: str


def parse(text: str) -> dict[str, list[Instruction]]:
  """Computations by name."""
  computations: dict[str, list[Instruction]] = {}
  lines: list[Instruction] = []
  for line in text.splitlines():
    header = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
    if header:
      lines = computations[header[1]] = []
      continue
    found = re.match(r"\s+(?:ROOT )?%?\S+ = (\(.*?\)|\S+) ([\w-]+)\(", line)
    if found:
      lines.append(_instruction(found[1], found[2], line.strip()))
  return computations


def _instruction(shape: str, opcode: str, line: str) -> Instruction:
  sizes = re.match(r"\w+\[([\d,]*)\]", shape)
  elements = 0
  if sizes:
    elements = math.prod(int(n) for n in sizes[1].split(",") if n)
  calls = re.findall(r"(?:calls|body|condition|to_apply)=%?([\w.\-]+)", line)
  for branches in re.findall(r"branch_computations=\{([^}]*)\}", line):
    calls += [name.strip().lstrip("%") for name in branches.split(",")]
  calls += re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line)
  return Instruction(opcode, elements, tuple(calls), line)


def work_in_loops(text: str, elements: int) -> dict[str, list[str]]:
  """Instructions in loops that make at least so many elements, by loop body.

  A body's own list holds what its fusions do, but not what the loops inside of
  it do: those are bodies themselves.
  """
  computations = parse(text)
  found = {}
  for body in _bodies(computations):
    large = [
      instruction.text
      for name in _reached(computations, body)
      for instruction in computations[name]
      if instruction.opcode not in _FREE and instruction.elements >= elements
    ]
    if large:
      found[body] = large
  return found


def _bodies(computations) -> set[str]:
  return {
    name
    for lines in computations.values()
    for instruction in lines
    if instruction.opcode == "while"
    for name in instruction.calls
  }


def _reached(computations, start: str) -> set[str]:
  """Computations that run in one trip, inner loops left out."""
  reached, waiting = set(), [start]
  while waiting:
    name = waiting.pop()
    if name in reached or name not in computations:
      continue
    reached.add(name)
    for instruction in computations[name]:
      if instruction.opcode != "while":
        waiting += instruction.calls
  return reached
