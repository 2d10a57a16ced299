"""Reads a GGUF file with the package `gguf`: metadata, and lazy tensors."""

import functools
import pathlib
import struct
from typing import Any

import numpy as np

from jaxkv._src.extras import extra_package
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.stored import Stored
from jaxkv._src.models.loading.stored import StoredTensor

# Bounds the loops over the keys and tensors that a damaged file announces.
_MAX_COUNT = 1 << 16


def package() -> Any:
  """Imports `gguf`."""
  task = "To read a .gguf file"
  return extra_package("gguf", install="jaxkv[gguf]", task=task)


def read(path: pathlib.Path) -> tuple[ConfigFile, Stored]:
  """Reads the metadata, and the tensors by their names in the file.

  Tensors are dequantized to float32 when they are loaded, with the outermost
  axis first; the file must stay in place until then.
  """
  gguf = package()
  try:
    with path.open("rb") as file:
      magic, version, *counts = struct.unpack("<4sIQQ", file.read(24))
    if magic != b"GGUF" or version not in (2, 3) or max(counts) > _MAX_COUNT:
      raise ValueError(f"it starts with {magic}, {version}, {counts}")
    # numpy only warns of an integer that overflows or is divided by zero.
    with np.errstate(all="raise"):
      reader = _reader_class(gguf)(path)
    values = {key: field.contents() for key, field in reader.fields.items()}
  except (ValueError, LookupError, ArithmeticError, struct.error) as error:
    raise ValueError(
      f"`{path}` must be a whole GGUF file of version 2 or 3, little-endian, "
      f"got another ({error}); get it again."
    ) from error
  metadata = ConfigFile(values, str(path), num_tensors=len(reader.tensors))
  metadata.only("split.count", 0, 1)
  # Zero says that a model lacks a feature, and other prefixes say no sizes.
  prefix = f"{values.get('general.architecture')}."
  metadata.ignore(
    *(k for k, v in values.items() if not v or not k.startswith(prefix))
  )
  stored = {}
  for tensor in reader.tensors:
    shape = tuple(reversed(tensor.shape.tolist()))
    load = functools.partial(gguf.dequantize, tensor.data, tensor.tensor_type)
    stored[tensor.name] = StoredTensor(shape, np.dtype(np.float32), load)
  return metadata, stored


@functools.cache
def _reader_class(gguf: Any) -> Any:
  """Returns a `GGUFReader` that reads arrays fast and checks all bounds."""

  class Reader(gguf.GGUFReader):
    def _get(self, offset: int, dtype: Any, count: int = 1, **_: Any) -> Any:
      return np.frombuffer(self.data, dtype, int(count), int(offset))

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
      # The package makes several objects for each element of an array, which
      # takes seconds for the vocabulary of a large model.
      if raw_type != gguf.GGUFValueType.ARRAY:
        return super()._get_field_parts(orig_offs, raw_type)
      kind, count = struct.unpack_from("<IQ", self.data, orig_offs)
      kind, offset = gguf.GGUFValueType(kind), orig_offs + 12
      types = [gguf.GGUFValueType.ARRAY, kind]
      if kind != gguf.GGUFValueType.STRING:
        values = self._get(offset, self.gguf_scalar_to_np[kind], count)
        return 12 + values.nbytes, [values], [0], types
      strings = []
      for _ in range(count):
        strings.append(self._get_str(offset)[1])
        offset += 8 + len(strings[-1])
      return offset - orig_offs, strings, list(range(count)), types

  return Reader
