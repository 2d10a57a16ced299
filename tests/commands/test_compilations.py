"""Compiled programs are kept between two starts of a command."""

import json
import os
import subprocess
import sys

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxkv import __main__ as command_line
from jaxkv._src.commands import compilations
from jaxkv._src.commands import replay as command

_SETTINGS = (
  "jax_enable_compilation_cache",
  "jax_compilation_cache_dir",
  "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """Where programs are kept, with jax's cache on, as users have it."""
  before = {name: getattr(jax.config, name) for name in _SETTINGS}
  for name, value in zip(_SETTINGS, (True, None, 0), strict=True):
    jax.config.update(name, value)
  compilation_cache.reset_cache()
  monkeypatch.setenv("JAXKV_CACHE", str(tmp_path / "cache"))
  yield tmp_path / "cache" / "compilations"
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


def _compile() -> None:
  """Compiles a new function; each call lowers to the same program."""
  jax.jit(lambda x: x + 3).lower(1.0).compile()


def _entries(folder) -> list[str]:
  return sorted(path.name for path in folder.glob("*-cache"))


def test_a_command_keeps_what_it_compiles(folder, monkeypatch):
  monkeypatch.setattr(command, "run", lambda _: _compile() or 0)
  assert command_line.main(["replay", "trace", "--pages", "1"]) == 0
  kept = _entries(folder)
  assert len(kept) == 1
  # Only the user can write there: whoever can, can run code.
  assert folder.stat().st_mode & 0o077 == 0
  assert jax.config.jax_compilation_cache_dir is None
  # What is compiled later, by whom ever, is not kept.
  jax.jit(lambda x: x + 4).lower(1.0).compile()
  assert _entries(folder) == kept


def test_what_is_kept_is_found(folder):
  found = []

  def note(event, **_):
    if event == "/jax/compilation_cache/cache_hits":
      found.append(event)

  jax.monitoring.register_event_listener(note)
  try:
    for hits in (0, 1):
      with compilations.kept():
        _compile()
      assert len(found) == hits
  finally:
    jax.monitoring.unregister_event_listener(note)


@pytest.mark.parametrize("named", ["", "elsewhere"])
def test_a_folder_of_the_users_own(folder, tmp_path, named):
  """Or none: an empty name switches jax's cache off."""
  own = named and str(tmp_path / named)
  jax.config.update("jax_compilation_cache_dir", own)
  with compilations.kept():
    _compile()
  assert not folder.exists()
  assert jax.config.jax_compilation_cache_dir == own
  assert not named or len(_entries(tmp_path / named)) == 1


def test_jax_keeps_nothing(folder):
  jax.config.update("jax_enable_compilation_cache", False)
  with compilations.kept():
    _compile()
  assert not folder.exists()


def test_an_older_jax_is_noisy_on_a_cpu(folder, monkeypatch):
  monkeypatch.setattr(jax, "__version_info__", (0, 10, 1))
  monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
  with compilations.kept():
    assert jax.config.jax_compilation_cache_dir is None
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  with compilations.kept():
    assert jax.config.jax_compilation_cache_dir == str(folder)


@pytest.mark.parametrize("fault", ["a file", "a file above it", "others write"])
def test_a_folder_that_cannot_be_used(folder, fault):
  """Nothing is kept and nothing is said; pytest makes warnings errors."""
  if fault == "a file above it":
    folder.parent.write_text("")
  elif fault == "a file":
    folder.parent.mkdir()
    folder.write_text("")
  else:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
  with compilations.kept():
    assert jax.config.jax_compilation_cache_dir is None
    _compile()
  assert _entries(folder) == []


def test_two_starts(tmp_path):
  """As users start a command, with nothing on stderr but its progress."""
  trace = tmp_path / "trace"
  line = {"timestamp": 0, "input_length": 600, "output_length": 1}
  trace.write_text(json.dumps(line | {"hash_ids": [1, 2]}))
  environment = os.environ | {
    "JAXKV_CACHE": str(tmp_path),
    "JAX_ENABLE_COMPILATION_CACHE": "true",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "PYTHONPATH": os.pathsep.join(sys.path),
  }
  kept = []
  for _ in range(2):
    done = subprocess.run(
      [sys.executable, "-m", "jaxkv", "replay", str(trace), "--pages", "3"],
      env=environment,
      capture_output=True,
      text=True,
      check=True,
    )
    assert "hit rate" in done.stdout
    told = done.stderr.splitlines()
    assert [text for text in told if text and "replay: " not in text] == []
    kept.append(_entries(tmp_path / "compilations"))
  assert kept[0] == kept[1] != []
