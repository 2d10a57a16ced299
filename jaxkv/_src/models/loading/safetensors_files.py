"""Reads safetensors files through memory maps.

A file consists of the header's length in 8 bytes, the header in JSON, and the
bytes of all tensors. The package `safetensors` is not used, because its NumPy
interface supports neither bfloat16 nor float8.
"""

import functools
import itertools
import json
import math
import pathlib
import struct
from typing import Any

import ml_dtypes
import numpy as np

from jaxkv._src.models.loading.lazy_tensor import LazyTensor
from jaxkv._src.models.loading.lazy_tensor import Tensors

_DTYPES: dict[str, Any] = {
  "F64": np.float64,
  "F32": np.float32,
  "F16": np.float16,
  "BF16": ml_dtypes.bfloat16,
  "F8_E4M3": ml_dtypes.float8_e4m3fn,
  "F8_E5M2": ml_dtypes.float8_e5m2,
  "F8_E8M0": ml_dtypes.float8_e8m0fnu,
  "I64": np.int64,
  "I32": np.int32,
  "I16": np.int16,
  "I8": np.int8,
  "U8": np.uint8,
  "BOOL": np.bool_,
}
# The longest header that the format allows, in bytes.
_MAX_HEADER = 100_000_000
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def open_folder(folder: pathlib.Path) -> Tensors:
  """Opens all tensors of a folder in Hugging Face's format."""
  if (folder / _INDEX).exists():
    return _indexed(folder)
  if (folder / _SINGLE).exists():
    return open_file(folder / _SINGLE)
  pickles = [*folder.glob("*.bin"), *folder.glob("*.pth")]
  if pickles:
    raise ValueError(
      f"{folder} has no safetensors file, only {pickles[0].name}, and such a "
      "file can run code when it is read; convert it to safetensors."
    )
  raise ValueError(
    f"{folder} has neither {_SINGLE} nor {_INDEX}; name a folder with a "
    "checkpoint."
  )


def _indexed(folder: pathlib.Path) -> Tensors:
  file_of_tensor = json_object(folder / _INDEX).get("weight_map")
  if not isinstance(file_of_tensor, dict) or not all(
    isinstance(file, str) for file in file_of_tensor.values()
  ):
    raise ValueError(
      f"`weight_map` in {folder / _INDEX} must map each tensor to its file; "
      "download the index again."
    )
  files: dict[str, Tensors] = {}
  for name in sorted(set(file_of_tensor.values())):
    path = folder / name
    # A name with a "/" is refused, because an index must not name files outside
    # its folder.
    if path.name != name or not path.exists():
      raise ValueError(
        f"{folder} lacks the shard {name}, which {_INDEX} names; download the "
        "shard again."
      )
    files[name] = open_file(path)
  # Tensors that are in a file but not in the index are kept, so that
  # `assemble.check` refuses them.
  stored = {
    tensor: file for file, tensors in files.items() for tensor in tensors
  }
  for tensor, file in file_of_tensor.items():
    if stored.get(tensor) != file:
      raise ValueError(
        f"{folder / file} lacks the tensor {tensor}, which {_INDEX} names; "
        "download the file again."
      )
  return {tensor: files[file][tensor] for tensor, file in stored.items()}


def open_file(path: pathlib.Path) -> Tensors:
  """Opens the tensors of one file."""
  file_size = path.stat().st_size
  with open(path, "rb") as file:
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else file_size
    if length > min(file_size - 8, _MAX_HEADER):
      raise ValueError(
        f"{path} is truncated or no safetensors file: {file_size} bytes cannot "
        "hold its header; get it again."
      )
    text = file.read(length)
  # A damaged header can be any JSON value, so every access to it can fail.
  try:
    header = json.loads(text)
    header.pop("__metadata__", None)
    entries = {
      name: (entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
      for name, entry in header.items()
    }
    for _, shape, start, end_byte in entries.values():
      if not all(type(n) is int and n >= 0 for n in (*shape, start, end_byte)):
        raise ValueError("sizes and offsets must be ints of at least 0")
  except (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
  ) as error:
    raise ValueError(
      f"{path} has a damaged header ({error!r}); get it again."
    ) from error
  _check_disjoint(path, entries)
  return {
    name: _tensor(path, file_size, 8 + length, name, entry)
    for name, entry in entries.items()
  }


def _check_disjoint(path: pathlib.Path, entries: dict[str, Any]) -> None:
  """Raises ValueError if two tensors share bytes."""
  spans = sorted(
    (start, end_byte, name) for name, (_, _, start, end_byte) in entries.items()
  )
  for (_, end_byte, name), (start, _, next_name) in itertools.pairwise(spans):
    if start < end_byte:
      raise ValueError(
        f"{path} has a damaged header: {name} and {next_name} overlap; get it "
        "again."
      )


def _tensor(
  path: pathlib.Path,
  file_size: int,
  base: int,
  name: str,
  entry: tuple[str, tuple[int, ...], int, int],
) -> LazyTensor:
  dtype_name, shape, start, end_byte = entry
  if dtype_name not in _DTYPES:
    raise ValueError(
      f"{path} has {name} in {dtype_name}, which is not supported; convert it "
      f"to one of {', '.join(_DTYPES)}."
    )
  dtype = np.dtype(_DTYPES[dtype_name])
  start = base + start
  end_byte = base + end_byte
  if end_byte > file_size:
    raise ValueError(
      f"{path} is truncated: it has {file_size} bytes, and {name} ends at "
      f"{end_byte}; get it again."
    )
  num_bytes = end_byte - start
  if num_bytes != math.prod(shape) * dtype.itemsize or start < base:
    raise ValueError(
      f"{path} has a damaged header: {name}, {dtype} of shape {list(shape)}, "
      f"cannot have {num_bytes} bytes; download the file again."
    )
  read = functools.partial(_memory_map, path, start, shape, dtype)
  return LazyTensor(shape, dtype, read)


def _memory_map(
  path: pathlib.Path, start: int, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
  # An empty array is not mapped, because systems cannot map zero bytes.
  if 0 in shape:
    return np.zeros(shape, dtype)
  raw = np.memmap(
    path, np.uint8, "r", start, (math.prod(shape) * dtype.itemsize,)
  )
  return raw.view(dtype).reshape(shape)


def json_object(path: pathlib.Path) -> dict[str, Any]:
  """Reads the JSON object in a file."""
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except OSError as error:
    raise ValueError(
      f"cannot read {path}: {error.strerror}; name a folder with a checkpoint."
    ) from error
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} is not JSON ({error}); get it again.") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path} has no JSON object; get it again.")
  return value
