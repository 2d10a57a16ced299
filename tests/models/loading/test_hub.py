"""Models of the hub: the real package, and a hub on this machine."""

import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading

import pytest

from jaxkv._src.models.loading import hub

_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_ID = "somebody/small"
# The package reads its settings when it is imported.
_LOAD = f"""
import sys
from jaxkv import models
try:
  model = models.load({_ID!r}, local_files_only="local" in sys.argv)
except ValueError as error:
  sys.exit(f"refused: {{error}}")
print(model.config.num_layers, model.config.dtype)
"""


class _Hub(http.server.ThreadingHTTPServer):
  """Gives the files of a folder, as the hub does."""

  def __init__(self, files: pathlib.Path):
    super().__init__(("127.0.0.1", 0), _Answers)
    self.files = {path.name: path.read_bytes() for path in files.iterdir()}
    self.given = []


class _Answers(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"

  def do_HEAD(self):
    self._answer(body=False)

  def do_GET(self):
    self._answer(body=True)

  def _answer(self, body):
    files, path = self.server.files, self.path.partition("?")[0]
    kind, content = "application/octet-stream", None
    if path.startswith(f"/api/models/{_ID}"):
      kind, content = "application/json", self._listing(path)
    elif path.startswith(f"/{_ID}/resolve/"):
      content = files.get(path.rpartition("/")[2])
    content = b"" if (missing := content is None) else content
    self.send_response(404 if missing else 200)
    self.send_header("Content-Length", str(len(content)))
    self.send_header("Content-Type", kind)
    self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
    self.send_header("X-Repo-Commit", _COMMIT)
    self.end_headers()
    if body:
      self.wfile.write(content)
      self.server.given.append(path)

  def _listing(self, path):
    names = sorted(self.server.files)
    if "/tree/" in path:
      rows = [
        {
          "type": "file",
          "path": name,
          "oid": "0" * 40,
          "size": len(self.server.files[name]),
        }
        for name in names
      ]
      return json.dumps(rows).encode()
    facts = {
      "id": _ID,
      "modelId": _ID,
      "sha": _COMMIT,
      "siblings": [{"rfilename": name} for name in names],
    }
    return json.dumps(facts).encode()

  def log_message(self, format, *args):
    """Prints nothing."""


@pytest.fixture
def served(folder):
  (folder / "pytorch_model.bin").write_bytes(b"not wanted")
  with _Hub(folder) as server:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()


def _loaded(server, home, *words):
  root = pathlib.Path(hub.__file__).resolve().parents[4]
  return subprocess.run(
    [sys.executable, "-c", _LOAD, *words],
    env=os.environ
    | {
      "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
      "HF_HOME": str(home),
      "HF_HUB_DISABLE_PROGRESS_BARS": "1",
      "HF_HUB_OFFLINE": "0",
      "PYTHONPATH": os.pathsep.join(map(str, (root, root / "kernels"))),
    },
    capture_output=True,
    text=True,
    timeout=120,
  )


def test_a_model_is_downloaded_once(served, tmp_path):
  pytest.importorskip("huggingface_hub", reason="it downloads")
  home = tmp_path / "home"
  refused = _loaded(served, home, "local")
  assert refused.stderr.startswith(f"refused: cannot get {_ID} from the hub")
  assert served.given == []
  done = _loaded(served, home)
  assert done.stdout == "2 bfloat16\n", done.stderr
  given = [name for name in served.given if "/resolve/" in name]
  wanted = ("config.json", "model.safetensors")
  assert sorted(name.rpartition("/")[2] for name in given) == sorted(wanted)
  served.given.clear()
  assert _loaded(served, home, "local").stdout == "2 bfloat16\n"
  assert served.given == []


def test_a_model_that_is_not_there_is_refused(served, tmp_path):
  pytest.importorskip("huggingface_hub", reason="it downloads")
  served.files.clear()
  done = _loaded(served, tmp_path / "home")
  assert done.stdout == "" and done.stderr.startswith("refused: ")
  assert done.stderr.count("\n") == 1
