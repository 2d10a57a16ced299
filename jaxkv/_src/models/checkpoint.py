"""Weights in one .npz file; a damaged file or other weights are refused.

A file holds every leaf under its path in the tree, and a JSON record: the
facts that the weights depend on, and a sha256 over all leaves.
"""

import errno
import hashlib
import json
import os
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_RECORD = "record"


class UnusableFileError(Exception):
  """A weights file is damaged, or is not the one asked for."""


def save(path: pathlib.Path, facts: dict[str, Any], params: Any) -> None:
  """Writes weights atomically: a reader sees the old file or the new one.

  Args:
    path: the file; its folder is created if it does not exist.
    facts: what the weights depend on, JSON values only.
    params: a tree of arrays with dtypes of NumPy itself.
  """
  leaves = {name: np.asarray(leaf) for name, leaf in _named(params)}
  record = {"facts": facts, "leaves_sha256": _sha256(leaves)}
  handle, temporary = _temporary(path)
  try:
    with os.fdopen(handle, "wb") as file:
      arrays: dict[str, Any] = {_RECORD: np.array(json.dumps(record)), **leaves}
      np.savez(file, **arrays)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except BaseException:
    pathlib.Path(temporary).unlink(missing_ok=True)
    raise


def check_writable(path: pathlib.Path) -> None:
  """Raises OSError if `save` could not write the file; makes its folder."""
  if path.is_dir():
    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
  handle, temporary = _temporary(path)
  os.close(handle)
  os.unlink(temporary)


def load(path: pathlib.Path, facts: dict[str, Any], like: Any) -> Any:
  """Reads weights, and refuses those that differ from the request.

  Args:
    path: the file.
    facts: what the weights must depend on.
    like: a tree of arrays or `ShapeDtypeStruct`s, the structure of the result.

  Returns:
    A tree like `like`, of jax arrays.

  Raises:
    UnusableFileError: the file cannot be read, its digest does not match, or
      it holds other facts, names, shapes or types; the message says which.
  """
  record, leaves = _read(path)
  if record.get("facts") != facts:
    raise UnusableFileError("it was made from another text or recipe")
  if record.get("leaves_sha256") != _sha256(leaves):
    raise UnusableFileError("its checksum does not match its contents")
  wanted = {name: (leaf.shape, leaf.dtype) for name, leaf in _named(like)}
  held = {name: (leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
  if wanted != held:
    raise UnusableFileError("it holds arrays of other names, shapes or types")
  ordered = [jnp.asarray(leaves[name]) for name, _ in _named(like)]
  return jax.tree.unflatten(jax.tree.structure(like), ordered)


def _temporary(path: pathlib.Path) -> tuple[int, str]:
  """A new file in the folder of `path`, open for writing."""
  path.parent.mkdir(parents=True, exist_ok=True)
  return tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")


def _read(
  path: pathlib.Path,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  try:
    with open(path, "rb") as file, np.load(file) as arrays:
      leaves = {name: arrays[name] for name in arrays.files}
    record = json.loads(str(leaves.pop(_RECORD)))
  # Damage can raise in any layer: zip, header, JSON, ...
  except Exception as error:
    raise UnusableFileError(f"it cannot be read: {error}") from error
  if not isinstance(record, dict):
    raise UnusableFileError("its record is not a JSON object")
  return record, leaves


def _named(params: Any) -> list[tuple[str, Any]]:
  """(path, leaf) for every leaf, such as ("layers.query", ...)."""
  return [
    (jax.tree_util.keystr(path, simple=True, separator="."), leaf)
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
  ]


def _sha256(leaves: dict[str, np.ndarray]) -> str:
  digest = hashlib.sha256()
  for name in sorted(leaves):
    leaf = leaves[name]
    digest.update(f"{name}:{leaf.dtype.str}:{leaf.shape};".encode())
    digest.update(np.ascontiguousarray(leaf).tobytes())
  return digest.hexdigest()
