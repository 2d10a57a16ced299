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
# A process of its own, as the package reads its settings when it is imported.
# It loads once for each line that it reads.
_LOAD = f"""
import sys
from jaxkv import models
for line in sys.stdin:
  try:
    model = models.load({_ID!r}, local_files_only=line == "local\\n")
    print(model.config.num_layers, model.config.dtype, flush=True)
  except ValueError as error:
    print(f"refused: {{error}}", flush=True)
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
    files = self.server.files
    path = self.path.partition("?")[0]
    content_type, content = "application/octet-stream", None
    if path.startswith(f"/api/models/{_ID}"):
      content_type, content = "application/json", self._listing(path)
    elif path.startswith(f"/{_ID}/resolve/"):
      # The path is /owner/name/resolve/revision/file.
      content = files.get(path.split("/", 5)[5])
    content = b"" if (missing := content is None) else content
    self.send_response(404 if missing else 200)
    self.send_header("Content-Length", str(len(content)))
    self.send_header("Content-Type", content_type)
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
def hub_server(folder):
  (folder / "pytorch_model.bin").write_bytes(b"not wanted")
  with _Hub(folder) as server:
    server.files["original/model.safetensors"] = b"not wanted"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()


@pytest.fixture
def load(hub_server, tmp_path):
  """Returns a function that loads in another process and returns its line."""
  root = pathlib.Path(hub.__file__).resolve().parents[4]
  process = subprocess.Popen(
    [sys.executable, "-c", _LOAD],
    env=os.environ
    | {
      "HF_ENDPOINT": f"http://127.0.0.1:{hub_server.server_port}",
      "HF_HOME": str(tmp_path / "home"),
      "HF_HUB_DISABLE_PROGRESS_BARS": "1",
      "HF_HUB_OFFLINE": "0",
      "PYTHONPATH": os.pathsep.join(map(str, (root, root / "kernels"))),
    },
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )

  def answer(word="hub"):
    process.stdin.write(word + "\n")
    process.stdin.flush()
    return process.stdout.readline()

  with process:
    yield answer
    # No line but the answers.
    assert process.communicate(timeout=120) == ("", "")


def test_a_model_is_downloaded_once(hub_server, load):
  pytest.importorskip("huggingface_hub", reason="it downloads")
  assert load("local").startswith(f"refused: cannot get {_ID} from the hub")
  assert hub_server.given == []
  assert load() == "2 bfloat16\n"
  paths = [name for name in hub_server.given if "/resolve/" in name]
  names = ("config.json", "model.safetensors")
  assert sorted(name.split("/", 5)[5] for name in paths) == sorted(names)
  hub_server.given.clear()
  assert load("local") == "2 bfloat16\n"
  assert hub_server.given == []


def test_a_missing_model_is_refused(hub_server, load):
  pytest.importorskip("huggingface_hub", reason="it downloads")
  hub_server.files.clear()
  assert load().startswith("refused: ")
