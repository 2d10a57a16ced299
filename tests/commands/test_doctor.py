"""`python -m jaxkv doctor`: what it reports, and where it must work."""

import os
import subprocess
import sys

import jax
import pytest

import jaxkv
from jaxkv import __main__ as command_line


def _run():
  """Runs the command in a new process, because a choice is logged once."""
  return subprocess.run(
    [sys.executable, "-m", "jaxkv", "doctor"],
    capture_output=True,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    text=True,
    timeout=120,
  )


@pytest.mark.slow
def test_reports_versions_devices_and_the_backend():
  done = _run()
  assert done.returncode == 0
  report = dict(line.split("  ", 1) for line in done.stdout.splitlines())
  assert report["jaxkv"].strip() == jaxkv.__version__
  assert f"jax {jax.__version__}" in report["packages"]
  assert report["devices"].split()[0] == "cpu,"
  assert "backend xla, the first choice" in report['backend "auto"']
  assert report["check"].strip() == "passed"
  for name in ("bytes_per_second", "tokens_per_second"):
    assert float(report[name].split()[0]) > 0


def test_a_failure_is_a_line_and_a_status(capsys, monkeypatch):
  def devices():
    raise RuntimeError("no driver\nfound")

  monkeypatch.setattr(jax, "devices", devices)
  assert command_line.main(["doctor"]) == 1
  line = capsys.readouterr().out.splitlines()[-1]
  assert line.split(maxsplit=1) == ["FAILED", "RuntimeError: no driver found"]
