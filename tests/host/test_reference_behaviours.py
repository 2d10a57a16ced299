"""Every test of the reference systems has an answer, and every answer holds."""

import ast
import collections
import functools
import pathlib

import pytest

from tests.host.fuzz_setups import SETUPS
from tests.host.reference_behaviours import VLLM
from tests.host.reference_behaviours_scheduling import ESURGE
from tests.host.reference_reasons import REASONS

_HERE = pathlib.Path(__file__).parent
_FILES = {**VLLM, **ESURGE}


@functools.cache
def names_of(file: str) -> frozenset[str]:
  """Names of a file's tests, those of classes as "Class::test"."""
  found = set()
  for node in ast.parse((_HERE / file).read_text("utf-8")).body:
    inner = node.body if isinstance(node, ast.ClassDef) else [node]
    prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
    found |= {
      prefix + function.name
      for function in inner
      if isinstance(function, ast.FunctionDef)
      and function.name.startswith("test_")
    }
  return frozenset(found)


def exists(place: str) -> bool:
  """Whether there is such a test, or such a configuration."""
  if place.startswith("fuzz:"):
    return place.removeprefix("fuzz:") in SETUPS
  file, _, name = place.partition("::")
  return (_HERE / file).is_file() and name in names_of(file)


@pytest.mark.parametrize("file", VLLM)
def test_every_name_has_one_answer(file):
  count, answers = VLLM[file]
  names = [name for text in answers.values() for name in text.split()]
  twice = [name for name, n in collections.Counter(names).items() if n > 1]
  assert (len(names), twice) == (count, [])
  assert all(name.startswith("test_") for name in names)


def test_counts():
  assert sum(count for count, _ in VLLM.values()) == 424
  assert sum(count for count, _ in ESURGE.values()) == 46


@pytest.mark.parametrize("file", _FILES)
def test_an_answer_is_a_reason_or_a_place(file):
  _, answers = _FILES[file]
  for answer in answers.keys() - REASONS:
    places = answer.split()
    assert places
    assert [place for place in places if not exists(place)] == []


def test_what_does_not_exist_is_seen():
  own = pathlib.Path(__file__).name
  assert exists(f"{own}::test_counts")
  assert exists("test_events.py::TestStored::test_the_root_tells_salts_apart")
  assert exists("fuzz:full")
  for place in (f"{own}::test_no", "test_no.py::test", "fuzz:none", "word"):
    assert not exists(place)


def test_every_reason_is_given():
  assert {answer for _, answers in _FILES.values() for answer in answers} >= (
    REASONS
  )
