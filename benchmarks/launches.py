"""Counts what a compiled program launches on a GPU, in the program's text."""

import re
from typing import NamedTuple

# Instructions of XLA for a GPU that launch nothing themselves.
_FREE = {
  "bitcast",
  "call",
  "conditional",
  "constant",
  "get-tuple-element",
  "parameter",
  "tuple",
  "while",
}


class Launches(NamedTuple):
  """What one run launches.

  Attributes:
    kernels: kernels and copies, including those of inner loops; a loop whose
      trip count depends on data counts with one trip.
    questions: how often the host waits for the condition of such a loop.
  """

  kernels: int
  questions: int


def in_largest_loop(text: str) -> Launches:
  """Launches in one trip of the largest loop of a compiled program."""
  lines = _lines(text)
  bodies = re.findall(r"body=%?([\w.\-]+)", text)
  return max((_launches(lines, body) for body in bodies), default=_NONE)


_NONE = Launches(0, 0)


def _launches(lines: dict[str, list[tuple[str, str]]], name: str) -> Launches:
  kernels = questions = 0
  for opcode, line in lines[name]:
    kernels += opcode not in _FREE
    if opcode != "while":
      continue
    body = _launches(lines, _computation(line, "body"))
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
    trips = int(known[1]) if known else 1
    kernels += trips * body.kernels
    questions += trips * body.questions
    if not known:
      condition = _launches(lines, _computation(line, "condition"))
      kernels += 2 * condition.kernels
      questions += 2
  return Launches(kernels, questions)


def _computation(line: str, role: str) -> str:
  found = re.search(rf"{role}=%?([\w.\-]+)", line)
  assert found, line
  return found[1]


def _lines(text: str) -> dict[str, list[tuple[str, str]]]:
  """Opcode and line of the instructions of each computation."""
  lines, inside = {}, ""
  for line in text.splitlines():
    header = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
    if header:
      inside = header[1]
      lines[inside] = []
      continue
    found = re.match(r"\s+(?:ROOT )?%?\S+ = (?:\(.*?\)|\S+) ([\w-]+)\(", line)
    if found:
      lines[inside].append((found[1], line))
  return lines
