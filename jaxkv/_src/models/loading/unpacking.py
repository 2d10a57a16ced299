"""Weights that are stored in fewer bits, unpacked when they are read."""

import ml_dtypes
import numpy as np

from jaxkv._src.models.loading.stored import Stored
from jaxkv._src.models.loading.stored import StoredTensor

_FLOAT32 = np.dtype(np.float32)
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
# The values of 4 bits: sign, two bits of exponent, one of mantissa.
_E2M1 = np.array(
  [sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)],
  np.float32,
)


def fp8_blocks(stored: Stored, block: tuple[int, int]) -> Stored:
  """Unpacks each `X` in float8_e4m3fn with `X_scale_inv`, a scale for a block.

  Raises:
    ValueError: a tensor has no scales, or scales of another shape.
  """
  out = dict(stored)
  for name, tensor in stored.items():
    if tensor.dtype != _E4M3:
      continue
    scales = out.pop(f"{name}_scale_inv", None)
    wanted = tuple(
      -(-n // b) for n, b in zip(tensor.shape, block, strict=False)
    )
    if len(tensor.shape) != 2 or scales is None or scales.shape != wanted:
      found = "none" if scales is None else list(scales.shape)
      raise ValueError(
        f"tensor {name}_scale_inv must have shape {list(wanted)}, a scale for "
        f"each block of {list(block)}, got {found}."
      )
    out[name] = StoredTensor(
      tensor.shape, _FLOAT32, _fp8_reader(tensor, scales, block)
    )
  return out


def _fp8_reader(
  tensor: StoredTensor, scales: StoredTensor, block: tuple[int, int]
):
  def read() -> np.ndarray:
    wide = tensor.read().astype(np.float32)
    factors = scales.read().astype(np.float32)
    rows, columns = tensor.shape
    factors = np.repeat(factors, block[0], axis=0)[:rows]
    wide *= np.repeat(factors, block[1], axis=1)[:, :columns]
    return wide

  return read


def mxfp4(stored: Stored) -> Stored:
  """Unpacks each `X_blocks` [..., N, G, 16] with `X_scales` [..., N, G].

  `X` is [..., 32 G, N]: a block has 32 values along the inputs, which come
  before the outputs.

  Raises:
    ValueError: blocks have no scales, or scales of another shape.
  """
  out = {
    name: tensor
    for name, tensor in stored.items()
    if not name.endswith(("_blocks", "_scales"))
  }
  for name, blocks in stored.items():
    if not name.endswith("_blocks"):
      continue
    base = name.removesuffix("_blocks")
    scales = stored.get(f"{base}_scales")
    if scales is None or scales.shape != blocks.shape[:-1]:
      found = "none" if scales is None else list(scales.shape)
      raise ValueError(
        f"tensor {base}_scales must have shape {list(blocks.shape[:-1])}, a "
        f"scale for each block, got {found}."
      )
    *lead, outputs, groups, width = blocks.shape
    shape = (*lead, groups * width * 2, outputs)
    out[base] = StoredTensor(shape, _FLOAT32, _mxfp4_reader(blocks, scales))
  return out


def _mxfp4_reader(blocks: StoredTensor, scales: StoredTensor):
  def read() -> np.ndarray:
    packed = blocks.read().view(np.uint8)
    *lead, groups, width = packed.shape
    values = np.empty((*packed.shape, 2), np.float32)
    values[..., 0] = _E2M1[packed & 15]
    values[..., 1] = _E2M1[packed >> 4]
    exponents = scales.read().view(np.uint8).astype(np.int32) - 127
    values = values.reshape(*lead, groups, 2 * width)
    values = np.ldexp(values, exponents[..., None], out=values)
    return values.reshape(*lead, groups * width * 2).swapaxes(-1, -2)

  return read
