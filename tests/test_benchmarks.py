"""The logic of the benchmarks that no figure shows."""

import pathlib
import subprocess

import numpy as np
import pytest

_FOLDER = pathlib.Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch):
  monkeypatch.syspath_prepend(str(_FOLDER))


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


def test_a_second_run_goes_on_where_the_first_ended(tmp_path, capsys):
  import attention

  path = tmp_path / "attention.json"
  first = attention.measure(path, quick=True, minutes=0, with_torch=False)
  assert first["cases"] == {}
  second = attention.measure(path, quick=True, minutes=5, with_torch=False)
  assert attention.failures(second) == []
  for row in second["cases"].values():
    assert row["sides"]["xla"]["error"] == 0
    assert all(side["error"] < 0.02 for side in row["sides"].values())
  third = attention.measure(path, quick=True, minutes=0, with_torch=False)
  assert third["cases"] == second["cases"]
  assert "run it again" in capsys.readouterr().out


def test_a_backend_that_fails_is_told_from_one_that_refuses():
  import attention

  rows = {
    "refused": {"xla": "NotImplementedError: page size"},
    "another's": {"cudnn dense": "RuntimeError: no"},
    "failed": {"xla": "ValueError: no"},
  }
  cases = {name: {"not timed": reasons} for name, reasons in rows.items()}
  assert attention.failures({"cases": cases}) == ["failed, xla: ValueError: no"]


def test_a_backend_that_only_skips_is_seen():
  import gpu_suite

  text = """<testsuites><testsuite>
    <testcase name="test_tree[7-triton-everything]"/>
    <testcase name="test_tree[5-triton-everything]"><failure/></testcase>
    <testcase name="test_extreme_logits[xla]"/>
    <testcase name="test_extreme_logits[mosaic_gpu]"><skipped/></testcase>
    <testcase name="test_a_copy"/>
  </testsuite></testsuites>"""
  counts = gpu_suite.passed_of_backends(text)
  assert counts == {"triton": 1, "xla": 1, "mosaic_gpu": 0}
  assert gpu_suite.passed_of_backends("") == {}


def test_a_matrix_that_hangs_is_stopped(tmp_path, monkeypatch, capsys):
  import gpu_suite

  def run(command, *, timeout, **options):
    raise subprocess.TimeoutExpired(command, timeout)

  monkeypatch.setattr(gpu_suite.subprocess, "run", run)
  assert not gpu_suite.matrix(tmp_path / "matrix.json", 400, quick=False)
  assert "stopped after 250 s" in capsys.readouterr().out


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
  %o = s32[] while(%y), condition=%cond.1, body=%inner.1
  %i = s32[] while(%o), condition=%cond.1, body=%inner.1, \
backend_config={"known_trip_count":{"n":"5"}}
  ROOT %t = (s32[], f32[8]) tuple(%i, %z)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%a), condition=%cond.1, body=%body.1
  ROOT %r = f32[8]{0} fusion(%w), kind=kLoop, calls=%fused
}
"""
  # Two of its own; one trip and two questions; five trips without any.
  assert in_largest_loop(text) == (2 + 1 + 2 + 5, 2)
