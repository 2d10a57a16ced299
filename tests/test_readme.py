"""The README's programs run as they stand, and what it names exists."""

import inspect
import json
import pathlib
import re
import types
from typing import Any

import jax
import pytest

import jaxkv
from jaxkv import sharding

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_TEXT = (_ROOT / "README.md").read_text("utf-8")
*_PROGRAMS, _OF_ENGINE, _ON_DEVICES = re.findall(
  r"```python\n(.*?)```", _TEXT, re.S
)

_RESULTS = _ROOT / "benchmarks" / "results" / "peers_cpu_jax0.10.2.json"
_FIGURES = {
  ("decode_step", "full", 256): "decode step, 256 sequences",
  ("decode_step", "full", 1024): "decode step, 1,024 sequences",
  ("decode_step", "hybrid", 256): "decode step, 256 sequences, 6 groups",
  ("admit_4096", "hit", 256): "prompt of 4,096 tokens, cached",
  ("admit_4096", "miss", 256): "prompt of 4,096 tokens, not cached",
}


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
  """The names that all programs, in order, define."""
  names_defined: dict[str, Any] = {}
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    for program in _PROGRAMS:
      exec(compile(program, "README.md", "exec"), names_defined)
  return names_defined


def test_the_first_program_is_short():
  assert sum(bool(line) for line in _PROGRAMS[0].splitlines()) <= 20


@pytest.mark.slow
def test_the_engine_continues_texts(small_model):
  """With a small model in place of the one that would be downloaded."""
  loaded = types.SimpleNamespace(load=lambda _: small_model)
  program = _OF_ENGINE.replace("engine.generate", "out = engine.generate")
  program = program.replace("The capital of France is", "1 is")
  program = program.replace("models.load", "loaded.load")
  names: dict[str, Any] = {"loaded": loaded}
  exec(compile(program, "README.md", "exec"), names)
  ((text,),) = names["out"]
  assert isinstance(text, str) and text


def test_help_has_the_program_for_several_devices():
  """Tests of rollouts on devices run it there."""
  text = inspect.cleandoc(sharding.__doc__)
  lines = [line.strip() for line in text.splitlines()]
  program = [line.strip() for line in _ON_DEVICES.splitlines()]
  assert len(program) <= 12
  assert [line for line in program if line not in lines] == []


def test_the_loop_finds_its_own_pages(names):
  state = names["state"]
  num_cached = jaxkv.match(state, names["tokens"].T, [20, 20]).num_cached_tokens
  assert num_cached.tolist() == [16, 16]
  assert int(jaxkv.stats(state).published_pages) == 10
  assert names["tokens"][0].tolist() == [7, 8]
  jaxkv.check(state)


def test_the_old_state_stays_usable(names):
  free = [len(jaxkv.free_pages(names[name])) for name in ("state", "freed")]
  assert free == [53, 58]
  assert names["state"].length.tolist() == [20, 20]
  assert names["freed"].length.tolist() == [0, 20]


def test_the_loop_continues_from_any_state(names):
  """Once for a program that was compiled, and bit for bit the same."""
  carry = names["freed"], names["kv"], names["tokens"][-1]
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    (state, _, _), tokens = names["decode"](*carry)
    _, next_tokens = names["decode"](*carry)
  assert state.length.tolist() == [20, 32]
  assert (tokens == next_tokens).all()
  # Slot 1 is full: its row failed, said so and changed nothing else.
  assert jaxkv.Status(int(state.error)) == jaxkv.Status.SLOT_FULL


@pytest.mark.parametrize(
  "path",
  sorted(
    set(
      re.findall(r"(?:tests|notebooks|benchmarks)/[\w./]+\w|[A-Z]+\.md", _TEXT)
    )
  ),
)
def test_paths_exist(path):
  assert (_ROOT / path).is_file()


def test_text_and_picture_are_short():
  assert len(_TEXT.splitlines()) <= 162
  assert (_ROOT / "notebooks" / "pages.svg").stat().st_size < 60_000


@pytest.mark.parametrize("case", _FIGURES)
def test_figures_are_those_of_one_run(case):
  """Medians of `benchmarks/peers.py`, as kept with the benchmarks."""
  rows = json.loads(_RESULTS.read_text("utf-8"))["rows"]
  median = {
    row["side"]: row["us_median"]
    for row in rows
    if (row["op"], row["mode"], row["slots"]) == case
  }
  vllm = median["vllm"]
  ours = median["jaxkv"]
  row = f"| {_FIGURES[case]} | {vllm:,.0f} | {ours:,.0f} | {vllm / ours:.1f}x |"
  assert row in _TEXT
