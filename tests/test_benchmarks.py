"""A quick run of the benchmarks, and the counts that tests read from texts."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_FOLDER = _ROOT / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [
    "host_manager",
    pytest.param("transitions", marks=pytest.mark.deep),
    pytest.param("attention", marks=pytest.mark.deep),
    pytest.param("peers", marks=pytest.mark.deep),
    pytest.param("rollout", marks=pytest.mark.deep),
    pytest.param("two_memories", marks=pytest.mark.deep),
  ],
)
def test_quick_run_writes_a_report(name, tmp_path):
  report = tmp_path / "report.json"
  command = [
    sys.executable, _FOLDER / f"{name}.py", "--quick", "--json", report
  ]  # fmt: skip
  paths = [str(_ROOT), str(_ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
  subprocess.run(command, env=environment, check=True, cwd=tmp_path)
  tables = json.loads(report.read_text("utf-8"))
  rows = [table for table in tables.values() if isinstance(table, list | dict)]
  assert any(rows)


def test_launches_of_a_loop_are_counted(monkeypatch):
  monkeypatch.syspath_prepend(str(_FOLDER))
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
