"""The logic of the benchmarks that no figure shows."""

import contextlib
import functools
import importlib
import json
import pathlib
import re
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_FOLDER = _ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch):
  monkeypatch.syspath_prepend(str(_FOLDER))


@pytest.mark.parametrize("name", ["attention", "gpu_suite"])
def test_help_explains_the_rows(name, monkeypatch, capsys):
  module = importlib.import_module(name)
  monkeypatch.setattr(sys, "argv", [name, "--help"])
  with pytest.raises(SystemExit):
    module.main()
  assert module.__doc__.strip() in capsys.readouterr().out


def test_tables_share_no_page():
  import attention_cases

  case = attention_cases.Case("tiny", 4, 2, 32, 3, 100, ragged=True)
  arrays = attention_cases.arrays(case, 5 * case.bytes_read())
  needed = -(-case.lengths() // case.page_size)
  used = [
    page
    for table in np.asarray(arrays.tables)
    for row, count in zip(table, needed, strict=True)
    for page in row[:count]
  ]
  assert len(arrays.tables) == 5
  assert sorted(used) == list(range(len(arrays.k_pages)))


def test_rows_of_a_group_begin_with_the_same_pages():
  import attention_cases

  case = attention_cases.Case(
    "tiny", 4, 2, 32, 6, 100, page_size=8, samples=3, prefix=64
  )
  arrays = attention_cases.arrays(case, 2 * case.bytes_read())
  groups = np.asarray(arrays.tables).reshape(2, 2, 3, 13)
  assert (groups[..., :8] == groups[:, :, :1, :8]).all()
  used = [*groups[:, :, 0, :8].ravel(), *groups[..., 8:].ravel()]
  assert sorted(used) == list(range(len(arrays.k_pages)))
  token = 2 * 2 * 32 * 2
  assert case.bytes_read() == (2 * 64 + 6 * 36) * token


def test_every_case_has_a_name_of_its_own():
  import attention_cases

  names = [case.name for case in attention_cases.all_cases()]
  assert len(set(names)) == len(names)


class TestAttention:
  def test_a_second_run_goes_on_where_the_first_ended(
    self, tmp_path, monkeypatch, capsys
  ):
    import attention
    import attention_cases

    cases = attention_cases.quick_cases()
    monkeypatch.setattr(
      attention_cases, "quick_cases", lambda: [cases[0], cases[-1]]
    )
    path = tmp_path / "attention.json"
    first = attention.measure(path, quick=True, minutes=0)
    assert first["cases"] == {}
    assert attention.earlier(path, quick=True) == first
    second = attention.measure(path, quick=True, minutes=5)
    assert attention.failures(second) == []
    assert second["begun"] == {}
    for row in second["cases"].values():
      assert row["bytes"] > 0
      assert row["sides"]["xla"]["error"] == 0
      assert all(side["error"] < 0.02 for side in row["sides"].values())
    third = attention.measure(path, quick=True, minutes=0)
    assert third["cases"] == second["cases"]
    assert "run it again" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="name a new file"):
      attention.earlier(path, quick=False)

  def test_a_wrong_result_is_a_failure(self):
    import attention

    rows = {
      "refused": {"not timed": {"xla": "NotImplementedError: page size"}},
      "another's": {"not timed": {"cudnn dense": "RuntimeError: no"}},
      "raised": {"not timed": {"triton shared": "ValueError: no"}},
      "racing": {"sides": {"mosaic_gpu planned": {"error": 0.3}}},
      "not finite": {"sides": {"xla": {"error": None}}},
      "right": {"sides": {"xla": {"error": 2e-3}, "xla dense": {"error": 1.0}}},
    }
    cases = {
      n: {"sides": {}, "not timed": {}, **row} for n, row in rows.items()
    }
    assert attention.failures({"cases": cases}) == [
      "raised, triton shared: ValueError: no",
      "racing, mosaic_gpu planned: error 0.3",
      "not finite, xla: error None",
    ]

  def test_errors_are_numbers_or_none(self, tmp_path):
    import attention
    import command

    right, bad = np.ones(4), np.array([1.0, 1.0, np.nan, 1.0])
    assert attention.distance([right, 2 * right], right) == 1
    assert attention.distance([right, bad], right) is None
    with pytest.raises(ValueError, match="JSON"):
      command.write(tmp_path / "x.json", {"error": np.nan})

  def test_a_side_that_twice_ends_the_run_is_passed_over(self, monkeypatch):
    import attention

    begun, reasons = {}, {}

    def lost(_):
      raise RuntimeError("the device is lost")

    monkeypatch.setattr(attention.jax, "block_until_ready", lost)
    for _ in range(2):
      assert attention.gone(begun) == {}
      with (
        pytest.raises(RuntimeError, match="the device"),
        attention.watched(lambda: None, begun, reasons, "triton"),
      ):
        raise ValueError("illegal address")
    with attention.watched(lambda: None, begun, reasons, "triton"):
      pass  # Its start may succeed, and its rounds hang.
    reason = "twice ended the run: ValueError: illegal address"
    assert attention.gone(begun) == {"triton": reason}


class TestSuite:
  @pytest.fixture
  def gpu_suite(self):
    import gpu_suite

    return gpu_suite

  @pytest.fixture
  def pytest_says(self, gpu_suite, monkeypatch):
    """Tests are not run: (output, exit code) in turn; gives the commands."""
    commands, answers = [], []

    def run(command, seconds, output, **environment):
      commands.append(command)
      text, code = answers.pop(0)
      output.write(text)
      return code

    monkeypatch.setattr(gpu_suite, "_run", run)
    return commands, answers

  def test_output_of_pytest_is_read(self, gpu_suite):
    text = """
tests/test_a.py::TestX::test_y[1-two words]
[gw0] [  5%] PASSED tests/test_a.py::TestX::test_y[1-two words]
[gw11] [100%] FAILED tests/test_a.py::test_z
[gw1] [ 50%] SKIPPED tests/test_a.py::test_s
tests/test_b.py::test_u[a] PASSED                     [ 50%]
tests/test_b.py::test_v SKIPPED (PASSED over)         [100%]
"""
    assert gpu_suite.results(text, "PASSED") == [
      "tests/test_a.py::TestX::test_y[1-two words]",
      "tests/test_b.py::test_u[a]",
    ]
    assert len(gpu_suite.results(text, "SKIPPED")) == 2

  def test_parts_are_there(self, gpu_suite, monkeypatch):
    device = types.SimpleNamespace(compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    parts = gpu_suite.parts(quick=False)
    assert "mosaic_gpu" in parts
    for part in parts.values():
      assert all((_ROOT / file).exists() for file in part.files)
    text = (_ROOT / "tests" / "kernels" / "test_mosaic.py").read_text("utf-8")
    assert f"class {parts['mosaic'].required}:" in text
    device.compute_capability = "8.0"
    assert "mosaic_gpu" not in gpu_suite.parts(quick=False)

  def test_a_backend_that_only_skips_is_seen(self, gpu_suite, pytest_says):
    _, answers = pytest_says
    answers += [
      ("tests/a.py::test_x[triton] SKIPPED\ntests/a.py::test_y PASSED", 0),
      ("tests/a.py::test_x[5-triton] PASSED", 0),
      ("tests/a.py::test_x[5-triton] PASSED", 1),
      ("", 5),
    ]
    part = gpu_suite.Part(("tests/a.py",), "", "triton")
    ended = [gpu_suite.run_part(part, {}, 9, quick=True) for _ in range(4)]
    assert [e["complete"] for e in ended] == [False, True, False, False]
    assert "1 skipped; none of triton" in ended[0]["result"]
    assert "exit code 5" in ended[3]["result"]

  def test_what_failed_once_has_failed(self, gpu_suite, pytest_says):
    _, answers = pytest_says
    answers += [("tests/a.py::test_x FAILED", None), ("", 0)]
    part = gpu_suite.Part(("tests/a.py",))
    first = gpu_suite.run_part(part, {}, 9, quick=True)
    second = gpu_suite.run_part(part, first, 9, quick=True)
    assert (first["ended"], second["ended"]) == (False, True)
    assert second["failed"] == ["tests/a.py::test_x"]
    assert not second["complete"]

  def test_tests_that_passed_are_kept(
    self, gpu_suite, tmp_path, monkeypatch, pytest_says
  ):
    parts = {n: gpu_suite.Part((f"tests/{n}.py",)) for n in "abc"}
    monkeypatch.setattr(gpu_suite, "parts", lambda quick: parts)
    commands, answers = pytest_says
    path = tmp_path / "numerics.json"
    stopped = "tests/a.py::test_x[1] PASSED\ntests/a.py::test_x PASSED\n"
    answers += [(stopped, None), ("tests/b.py::test_x PASSED", 0), ("", 2)]
    assert not gpu_suite.numerics(path, 400, quick=True)
    answers += [("", 5), ("", 0)]
    assert gpu_suite.numerics(path, 400, quick=True)
    assert gpu_suite.numerics(path, 400, quick=True)
    files = [c for command in commands for c in command if c[:6] == "tests/"]
    again = ["tests/a.py", "tests/a.py::test_x[1]", "tests/c.py"]
    assert files == ["tests/a.py", "tests/b.py", "tests/c.py", *again]

  def test_what_hangs_is_stopped(self, gpu_suite, capsys):
    hangs = "import time; time.sleep(60)"
    assert gpu_suite._run([sys.executable, "-c", hangs], 0.1) is None
    assert "stopped after 0 s" in capsys.readouterr().out

  def test_an_exception_does_not_end_the_suite(
    self, gpu_suite, tmp_path, monkeypatch, capsys
  ):
    ran = []
    stages = {"one": lambda *_: 1 // 0, "two": lambda *_: not ran.append(1)}
    monkeypatch.setattr(gpu_suite, "STAGES", stages)
    assert not gpu_suite.run(tmp_path, 1, quick=True)
    assert ran == [1]
    assert "ZeroDivisionError" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="name a new folder"):
      gpu_suite.run(tmp_path, 1, quick=False)

  @pytest.mark.parametrize("stage", ["launches", "transitions", "rollout"])
  def test_complete_files_are_kept(
    self, gpu_suite, tmp_path, monkeypatch, stage
  ):
    programs = []

    def run(command, seconds):
      programs.append(command[2])
      return 0

    monkeypatch.setattr(gpu_suite, "_run", run)
    path = tmp_path / f"{stage}.json"
    assert gpu_suite.STAGES[stage](path, 590, quick=False)
    path.write_text('{"complete": true}', "utf-8")
    assert gpu_suite.STAGES[stage](path, 590, quick=False)
    (program,) = programs
    module, function = re.search(r"; (\w+)\.(\w+)\(", program).groups()
    assert callable(getattr(importlib.import_module(module), function))

  def test_a_bare_checkout_is_enough(self, gpu_suite):
    program = f"""
import importlib.util, runpy
runpy.run_path({str(_FOLDER / "gpu_suite.py")!r})
for name in ("jaxkv", "jaxkv_kernels", "transitions", "rollout_device"):
  origin = importlib.util.find_spec(name).origin
  assert origin.startswith({str(_ROOT)!r}), origin
"""
    subprocess.run([sys.executable, "-I", "-c", program], check=True)


def test_parts_are_written_one_by_one(tmp_path):
  import rows

  runs = []

  def part(name, *, fails=False):
    runs.append(name)
    if fails:
      raise KeyboardInterrupt
    yield rows.Row("work", name, len(runs))

  path = tmp_path / "parts.json"
  parts = {name: functools.partial(part, name) for name in "ab"}
  stopped = {**parts, "b": functools.partial(part, "b", fails=True)}
  with pytest.raises(KeyboardInterrupt):
    rows.by_part(str(path), stopped)
  assert not json.loads(path.read_text("utf-8"))["complete"]
  values = [row["value"] for row in rows.by_part(str(path), parts)]
  assert (runs, values) == (["a", "b", "b"], [1, 3])
  rows.by_part(str(path), parts)
  assert len(runs) == 3
  assert json.loads(path.read_text("utf-8"))["complete"]


def test_transitions_are_written_row_by_row(tmp_path, monkeypatch):
  import transitions

  timed = []

  class Fake:
    def __init__(self, op, pages):
      self.op = types.SimpleNamespace(name=op, mode="")
      self.pages = pages

    def round(self, *, record):
      if (self.op.name, self.pages, len(timed)) == ("free_16", 65536, 1):
        raise KeyboardInterrupt

    def row(self):
      timed.append((self.op.name, self.pages))
      number = dict.fromkeys(("slots", "page_size", "us_min", "us_median"), 1)
      row = {"op": self.op.name, "mode": "", "pages": self.pages}
      return {**number, **row}

  monkeypatch.setattr(
    transitions,
    "sides_of",
    lambda slots, pages: [Fake(op, pages) for op in ("decode_step", "free_16")],
  )
  path = tmp_path / "transitions.json"
  with contextlib.suppress(KeyboardInterrupt):
    transitions.by_row(str(path))
  assert "complete" not in path.read_text("utf-8")
  timed.append(None)
  transitions.by_row(str(path))
  assert '"complete": true' in path.read_text("utf-8")
  assert timed == [
    ("decode_step", 65536),
    None,
    ("free_16", 65536),
    ("decode_step", 4096),
    ("decode_step", 262144),
  ]


@pytest.mark.deep
def test_a_quick_run_of_the_rollout_benchmark(monkeypatch, tmp_path):
  import rollout

  path = tmp_path / "rollout.json"
  monkeypatch.setattr(sys, "argv", ["", "--quick", "--json", str(path)])
  rollout.main()
  rows = json.loads(path.read_text("utf-8"))["rows"]
  fields = {"workload", "metric", "value", "bound", "side", "met"}
  assert all(set(row) == fields for row in rows)
  names = [(row["workload"], row["metric"]) for row in rows]
  assert len(set(names)) == len(names)
  # Times depend on the machine; counts do not.
  for row in rows:
    counted = row["workload"].startswith(("same_batch", "stall"))
    assert not counted or row["met"] is not False, row
  found = {name: row["value"] for name, row in zip(names, rows, strict=True)}
  assert found["same_batch", "prompt tokens"] == 176


def test_launches_of_a_loop_are_counted():
  from launches import in_largest_loop

  text = """
%inner.1 (q: s32[]) -> s32[] {
  %q = s32[] parameter(0)
  ROOT %n = s32[] fusion(%q), kind=kLoop, calls=%fused
}

%cond.1 (c: s32[]) -> pred[] {
  %c = s32[] parameter(0)
  ROOT %l = pred[] fusion(%c), kind=kLoop, calls=%fused
}

%body.1 (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %y = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  %z = f32[8]{0} custom-call(%y), custom_call_target="kernel"
  %o = s32[] while(%y), condition=%cond.1, body=%inner.1, \
metadata={op_name="jit(f)/rare/sweep/while"}
  %c = s32[] conditional(%o, %o, %o), branch_computations={%inner.1, %cond.1}
  %i = s32[] while(%o), condition=%cond.1, body=%inner.1, \
backend_config={"known_trip_count":{"n":"5"}}
  ROOT %t = (s32[], f32[8]) tuple(%i, %z)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%a), condition=%cond.1, body=%body.1
  ROOT %r = f32[8]{0} fusion(%w), kind=kLoop, calls=%fused
}
"""
  # Two of its own; one trip and two conditions; one branch; five trips.
  assert in_largest_loop(text) == (2 + 1 + 2 + 1 + 5, 2 + 1)
  # One condition, and no trip.
  assert in_largest_loop(text, is_common=True) == (2 + 1 + 1 + 5, 1 + 1)


@pytest.mark.slow
def test_two_memories_keep_what_one_forgets():
  import two_memories

  found = {
    row.workload: row.value
    for row in two_memories.rows_of(quick=True, rounds=1)
    if row.metric == "of the hits of unlimited"
  }
  assert found["two memories"] == 1
  assert found["one memory"] < 0.5
