"""The file of `--json`: whole or not at all, and never in place of a device."""

import json
import os
import stat
import threading

import pytest

from jaxkv._src.commands import json_file
from jaxkv._src.commands.errors import CommandError


@pytest.fixture
def nothing_is_replaced(monkeypatch):
  """For devices: the machine needs them, should the code ever be wrong."""

  def refuse(*_, **__):
    raise AssertionError("a file was put in place of a device or a pipe")

  monkeypatch.setattr(os, "replace", refuse)


def write(path, value=1):
  with json_file.opened(path) as take:
    take(value)


class TestRegularFiles:
  def test_a_new_file_has_the_usual_mode(self, tmp_path):
    write(tmp_path / "new", {"a": 1})
    (tmp_path / "usual").write_text("")
    assert json.loads((tmp_path / "new").read_text()) == {"a": 1}
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1
    assert sorted(os.listdir(tmp_path)) == ["new", "usual"]

  def test_an_old_file_keeps_its_mode(self, tmp_path):
    path = tmp_path / "old"
    path.write_text("old")
    path.chmod(0o604)
    write(path)
    assert path.read_text() == "1\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o604

  @pytest.mark.parametrize("there", [True, False])
  def test_a_link_stays_a_link(self, tmp_path, there):
    (tmp_path / "folder").mkdir()
    target = tmp_path / "folder" / "file"
    if there:
      target.write_text("old")
    link = tmp_path / "link"
    link.symlink_to("folder/file")
    write(link)
    assert link.is_symlink() and target.read_text() == "1\n"
    assert os.listdir(tmp_path / "folder") == ["file"]

  def test_nothing_is_there_until_the_end(self, tmp_path):
    """Not even a process that is killed leaves anything."""
    with json_file.opened(tmp_path / "file") as take:
      take(1)
      assert os.listdir(tmp_path) == []

  def test_a_failure_while_writing(self, tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(*_):
      raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(CommandError, match="No space left"):
      write(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]

  def test_the_longest_name(self, tmp_path):
    write(tmp_path / ("a" * 255))
    with pytest.raises(CommandError, match="name too long"):
      write(tmp_path / ("a" * 256))


class TestStreams:
  def test_a_device(self, nothing_is_replaced):
    before = os.stat(os.devnull)
    write(os.devnull)
    after = os.stat(os.devnull)
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)

  @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
  def test_a_full_device(self, tmp_path, nothing_is_replaced):
    link = tmp_path / "link"
    link.symlink_to("/dev/full")
    with pytest.raises(CommandError, match="No space left"):
      write(link)
    assert link.is_symlink()
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)

  def test_a_named_pipe(self, tmp_path, nothing_is_replaced):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(
      target=lambda: read.append(pipe.read_text()), daemon=True
    )
    reader.start()
    write(pipe, [1])
    reader.join(60)
    assert pipe.is_fifo()
    assert read == ["[\n 1\n]\n"]

  def test_a_reader_that_leaves(self, tmp_path, nothing_is_replaced):
    reader, writer = os.pipe()
    link = tmp_path / "link"
    link.symlink_to(f"/dev/fd/{writer}")
    try:
      with pytest.raises(CommandError, match="Broken pipe"):
        with json_file.opened(link) as take:
          take(1)
          os.close(reader)
    finally:
      os.close(writer)


class TestRefusals:
  """Told before the long work, so before the block."""

  @pytest.mark.parametrize(
    ("name", "reason"),
    [
      ("", "folder"),
      ("folder", "it is a folder"),
      ("folder/", "it is a folder"),
      ("none/", "folder"),
      ("none/file", "No such file or directory"),
      ("file/inside", "Not a directory"),
      ("loop", "symbolic links"),
    ],
  )
  def test_paths(self, tmp_path, monkeypatch, name, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("old")
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(CommandError, match=reason):
      with json_file.opened(name):
        raise AssertionError("the work began")
    assert sorted(os.listdir(tmp_path)) == before

  @pytest.mark.parametrize("number", [1, 2])
  def test_a_file_that_a_stream_goes_to(self, tmp_path, monkeypatch, number):
    path = tmp_path / "file"
    path.write_text("")
    monkeypatch.setattr(
      os,
      "fstat",
      lambda descriptor: os.stat(path if descriptor == number else tmp_path),
    )
    with pytest.raises(CommandError, match=r"standard .* goes there"):
      write(path)
    assert path.read_text() == ""
