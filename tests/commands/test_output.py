"""Files of results: whole or not at all, and refused before the long work."""

import json
import os

import pytest

from jaxkv._src.commands import output
from jaxkv._src.commands.output import CommandError


def test_a_new_file_has_the_usual_mode(tmp_path):
  output.write_json(str(tmp_path / "new"), {"a": 1})
  (tmp_path / "usual").write_text("")
  assert json.loads((tmp_path / "new").read_text()) == {"a": 1}
  assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1
  assert sorted(os.listdir(tmp_path)) == ["new", "usual"]


def test_a_link_stays_a_link(tmp_path):
  (tmp_path / "folder").mkdir()
  link = tmp_path / "link"
  link.symlink_to("folder/file")
  output.write_json(str(link), 1)
  assert link.is_symlink() and json.loads(link.read_text()) == 1
  assert os.listdir(tmp_path / "folder") == ["file"]


@pytest.mark.parametrize("step", ["write", "replace"])
def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch, step):
  path = tmp_path / "file"
  path.write_text("old")

  def fail(*_, **__):
    raise OSError(28, "No space left on device")

  if step == "replace":
    monkeypatch.setattr(os, "replace", fail)
  else:
    monkeypatch.setattr(output.json, "dumps", fail)
  with pytest.raises(CommandError, match=r"cannot write .*file: No space left"):
    output.write_json(str(path), 1)
  assert path.read_text() == "old"
  assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
  ("name", "reason"),
  [
    ("", "it is not a regular file"),
    ("folder", "it is not a regular file"),
    ("/dev/null", "it is not a regular file"),
    ("none/file", "its folder is missing or read-only"),
    ("input", "the command reads it"),
    ("link", "the command reads it"),
  ],
)
def test_unwritable_files_are_refused(tmp_path, monkeypatch, name, reason):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "folder").mkdir()
  (tmp_path / "input").write_text("old")
  (tmp_path / "link").symlink_to("input")
  with pytest.raises(CommandError, match=reason):
    output.check_writable(name, None, "input")
  assert sorted(os.listdir(tmp_path)) == ["folder", "input", "link"]
