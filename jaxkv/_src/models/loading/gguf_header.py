"""What a GGUF file says of itself: its facts, and where its tensors are.

A file is a magic number, a version, two counts, the facts (a name, a type and
a value each), the tensors' descriptions, and the tensors' bytes. Numbers are
little-endian.
"""

import dataclasses
import math
import mmap
import os
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32

_STRING = 8
_ARRAY = 9
_SCALARS = {
  0: "<u1",
  1: "<i1",
  2: "<u2",
  3: "<i2",
  4: "<u4",
  5: "<i4",
  6: "<f4",
  7: "?",
  10: "<u8",
  11: "<i8",
  12: "<f8",
}

# Of each number that a file may have for a tensor's type: its name, and how
# many bytes hold how many weights.
_TYPES = {
  0: ("F32", 4, 1),
  1: ("F16", 2, 1),
  2: ("Q4_0", 18, 32),
  3: ("Q4_1", 20, 32),
  6: ("Q5_0", 22, 32),
  8: ("Q8_0", 34, 32),
  12: ("Q4_K", 144, 256),
  14: ("Q6_K", 210, 256),
  30: ("BF16", 2, 1),
}
# Those that are refused by name.
_OTHERS = {
  7: "Q5_1",
  9: "Q8_1",
  10: "Q2_K",
  11: "Q3_K",
  13: "Q5_K",
  15: "Q8_K",
  16: "IQ2_XXS",
  17: "IQ2_XS",
  18: "IQ3_XXS",
  19: "IQ1_S",
  20: "IQ4_NL",
  21: "IQ3_S",
  22: "IQ2_S",
  23: "IQ4_XS",
  24: "I8",
  25: "I16",
  26: "I32",
  27: "I64",
  28: "F64",
  29: "IQ1_M",
  34: "TQ1_0",
  35: "TQ2_0",
  39: "MXFP4",
  40: "NVFP4",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufTensor:
  """Where one tensor is, and how it is stored.

  Attributes:
    shape: its sizes, the outermost first.
    type: the name of its type, such as "Q4_K".
    offset: the place of its first byte in the file.
    num_blocks: how many blocks of weights it has.
    block_bytes: how many bytes a block takes.
  """

  shape: tuple[int, ...]
  type: str
  offset: int
  num_blocks: int
  block_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufHeader:
  """The facts in a GGUF file, and its tensors.

  Attributes:
    path: the file.
    facts: the value of each fact; a list of strings, or an array of numbers,
      where the file has an array.
    tensors: where each tensor is, by the name that the file has for it.
  """

  path: str
  facts: Mapping[str, Any]
  tensors: Mapping[str, GgufTensor]


def read_gguf_header(path: str | os.PathLike[str]) -> GgufHeader:
  """Reads everything of a GGUF file except the weights.

  Args:
    path: the file.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is no GGUF file of version 2 or 3, it ends too early, it is
      a part of several, or a tensor has a type that is not read here; one line
      that names the file.

  Examples:
    >>> header = read_gguf_header("model.gguf")  # doctest: +SKIP
    >>> header.facts["general.architecture"]  # doctest: +SKIP
    'llama'
  """
  name = os.fspath(path)
  with open(name, "rb") as file:
    start = file.read(8)
    if start[:4] != _MAGIC:
      raise ValueError(
        f"`{name}` must be a GGUF file, got one that starts with "
        f"{start[:4]!r}; name a file that ends in .gguf."
      )
    version = int.from_bytes(start[4:], "little")
    if version not in _VERSIONS:
      raise ValueError(
        f"`{name}` must be a little-endian GGUF file of version 2 or 3, got "
        f"version {version}; convert it again."
      )
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
      try:
        return _header(name, data)
      except (struct.error, _EarlyEndError):
        raise ValueError(
          f"`{name}` must be a whole GGUF file, got one that ends after "
          f"{len(data)} bytes, too early; fetch it again."
        ) from None
      except (UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise ValueError(
          f"`{name}` must be an undamaged GGUF file, got {error}; fetch it "
          "again."
        ) from None


class _EarlyEndError(Exception):
  """A file ends before what it announces."""


def _header(name: str, data: mmap.mmap) -> GgufHeader:
  reader = _Reader(name, data, offset=8)
  num_tensors, num_facts = reader.number("<Q"), reader.number("<Q")
  facts = {}
  for _ in range(num_facts):
    key = reader.string()
    facts[key] = reader.value(reader.number("<I"))
  if int(facts.get("split.count", 1)) > 1:
    raise ValueError(
      f"`{name}` must hold a whole model, got one of "
      f"{facts['split.count']} parts; merge them with gguf-split."
    )
  described = [_description(reader) for _ in range(num_tensors)]
  alignment = int(facts.get("general.alignment", _ALIGNMENT))
  if alignment < 1:
    raise reader.damaged(f"an alignment of {alignment}")
  base = -(-reader.offset // alignment) * alignment
  tensors = {}
  for key, shape, number, offset in described:
    if key in tensors:
      raise reader.damaged(f"two tensors of the name {key!r}")
    tensors[key] = _placed(reader, key, shape, number, base + offset)
  return GgufHeader(path=name, facts=facts, tensors=tensors)


def _description(reader: "_Reader") -> tuple[str, tuple[int, ...], int, int]:
  """Name, shape, number of the type, and offset behind the header."""
  name = reader.string()
  rank = reader.number("<I")
  if rank > 8:
    raise reader.damaged(f"a tensor of rank {rank}")
  innermost_first = [reader.number("<Q") for _ in range(rank)]
  return (
    name,
    tuple(reversed(innermost_first)),
    reader.number("<I"),
    reader.number("<Q"),
  )


def _placed(
  reader: "_Reader",
  name: str,
  shape: tuple[int, ...],
  number: int,
  offset: int,
) -> GgufTensor:
  if number not in _TYPES:
    known = ", ".join(name for name, _, _ in _TYPES.values())
    raise ValueError(
      f"`{reader.name}` must have tensors of the types {known}, got "
      f"{_OTHERS.get(number, f'type {number}')} for {name!r}; convert it with "
      "another quantisation."
    )
  type_name, size, weights = _TYPES[number]
  if shape and shape[-1] % weights:
    raise reader.damaged(f"{type_name} rows of {shape[-1]} for {name!r}")
  num_blocks = math.prod(shape) // weights
  if offset + num_blocks * size > len(reader.data):
    raise _EarlyEndError
  return GgufTensor(
    shape=shape,
    type=type_name,
    offset=offset,
    num_blocks=num_blocks,
    block_bytes=size,
  )


class _Reader:
  """Reads one value after the other; nothing beyond the end."""

  def __init__(self, name: str, data: mmap.mmap, offset: int):
    self.name = name
    self.data = data
    self.offset = offset

  def number(self, format: str) -> int:
    found = struct.unpack_from(format, self.data, self.offset)[0]
    self.offset += struct.calcsize(format)
    return found

  def take(self, num_bytes: int) -> bytes:
    end = self.offset + num_bytes
    if end > len(self.data):
      raise _EarlyEndError
    found = self.data[self.offset : end]
    self.offset = end
    return found

  def string(self) -> str:
    return self.take(self.number("<Q")).decode()

  def value(self, kind: int) -> Any:
    if kind == _STRING:
      return self.string()
    if kind == _ARRAY:
      return self.array()
    return self.scalars(kind, 1)[0].item()

  def array(self) -> Any:
    kind, count = self.number("<I"), self.number("<Q")
    if kind in (_STRING, _ARRAY):
      if count > len(self.data):
        raise _EarlyEndError
      return [self.value(kind) for _ in range(count)]
    return self.scalars(kind, count)

  def scalars(self, kind: int, count: int) -> np.ndarray:
    if kind not in _SCALARS:
      raise self.damaged(f"a fact of type {kind}")
    dtype = np.dtype(_SCALARS[kind])
    return np.frombuffer(self.take(count * dtype.itemsize), dtype)

  def damaged(self, what: str) -> ValueError:
    return ValueError(
      f"`{self.name}` must be an undamaged GGUF file, got {what}; fetch it "
      "again."
    )
