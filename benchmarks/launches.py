"""Counts the launches of a GPU program in its compiled text."""

import re
from typing import NamedTuple

# Instructions for which XLA launches nothing on a GPU.
_NO_LAUNCH = {
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
  """The launches of one run.

  Attributes:
    kernels: number of kernels and copies, inner loops included. A loop whose
      trip count depends on data counts as one iteration.
    questions: the number of times that the host waits for the condition of a
      loop whose trip count depends on data.
  """

  kernels: int
  questions: int


def in_largest_loop(text: str) -> Launches:
  """Counts the launches in one iteration of a program's largest loop."""
  lines = _lines(text)
  bodies = re.findall(r"body=%?([\w.\-]+)", text)
  return max((_launches(lines, body) for body in bodies), default=_NO_LOOP)


_NO_LOOP = Launches(0, 0)


def _launches(lines: dict[str, list[tuple[str, str]]], name: str) -> Launches:
  kernels = questions = 0
  for opcode, line in lines[name]:
    kernels += opcode not in _NO_LAUNCH
    if opcode != "while":
      continue
    body = _launches(lines, _computation(line, "body"))
    trip_count = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
    trips = int(trip_count[1]) if trip_count else 1
    kernels += trips * body.kernels
    questions += trips * body.questions
    # A loop of one iteration evaluates its condition twice, and the host reads
    # both results.
    if not trip_count:
      condition = _launches(lines, _computation(line, "condition"))
      kernels += 2 * condition.kernels
      questions += 2
  return Launches(kernels, questions)


def _computation(line: str, role: str) -> str:
  match = re.search(rf"{role}=%?([\w.\-]+)", line)
  assert match, line
  return match[1]


def _lines(text: str) -> dict[str, list[tuple[str, str]]]:
  """Returns opcode and line of each instruction, by computation."""
  lines, computation = {}, ""
  for line in text.splitlines():
    header = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
    if header:
      computation = header[1]
      lines[computation] = []
      continue
    match = re.match(r"\s+(?:ROOT )?%?\S+ = (?:\(.*?\)|\S+) ([\w-]+)\(", line)
    if match:
      lines[computation].append((match[1], line))
  return lines
