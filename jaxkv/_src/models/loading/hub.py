"""Downloads checkpoints from the Hugging Face hub with `huggingface_hub`."""

import pathlib
import re

from jaxkv._src.extras import extra_package

_ID = re.compile(r"[\w.-]+/[\w.-]+")
# The files that `load` reads. Other files, such as pickles, are not downloaded.
_FILES = ["*.json", "*.safetensors", "*.jinja"]
# A * also matches a slash, and subfolders can have copies of the weights.
_SUBFOLDERS = ["*/*"]


def is_id(source: str) -> bool:
  """Returns True if a name has the form of a hub model id: owner/name.

  Examples:
    >>> is_id("Qwen/Qwen3-0.6B"), is_id("./folder/inner"), is_id("name")
    (True, False, False)
  """
  return _ID.fullmatch(source) is not None and not source.startswith(".")


def download(source: str, *, local_files_only: bool = False) -> pathlib.Path:
  """Downloads a model unless it is cached, and returns its local folder."""
  task = f"There is no folder {source}; to get a model of that name"
  hub = extra_package("huggingface_hub", install="jaxkv[hub]", task=task)
  try:
    folder = hub.snapshot_download(
      source,
      allow_patterns=_FILES,
      ignore_patterns=_SUBFOLDERS,
      local_files_only=local_files_only,
    )
  # The package passes on errors of HTTP and file libraries.
  except Exception as error:
    reason = str(error).strip().splitlines() or [type(error).__name__]
    raise ValueError(
      f"cannot get {source} from the hub: {reason[0]}; name a folder instead."
    ) from error
  return pathlib.Path(folder)
