"""Dequantizes weights of Hugging Face checkpoints when they are read."""

import ml_dtypes
import numpy as np

from jaxkv._src.models.loading.lazy_tensor import LazyTensor
from jaxkv._src.models.loading.lazy_tensor import Tensors

_FLOAT32 = np.dtype(np.float32)
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
# The 16 values of float4 E2M1, which has a sign bit, two exponent bits and one
# mantissa bit.
_E2M1 = np.array(
  [sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)],
  np.float32,
)


def fp8_blocks(tensors: Tensors, block: tuple[int, int]) -> Tensors:
  """Dequantizes each float8_e4m3fn tensor `X` with its scales `X_scale_inv`.

  `block` has the numbers of rows and columns of `X` that share a scale.
  """
  out = dict(tensors)
  for name, tensor in tensors.items():
    if tensor.dtype != _E4M3:
      continue
    scales = out.pop(f"{name}_scale_inv", None)
    # The last block of an axis may be incomplete.
    expected = tuple(
      -(-n // b) for n, b in zip(tensor.shape, block, strict=False)
    )
    if len(tensor.shape) != 2 or scales is None or scales.shape != expected:
      shape = "none" if scales is None else list(scales.shape)
      raise ValueError(
        f"tensor {name}_scale_inv must have shape {list(expected)}, a scale "
        f"for each block of {list(block)}, got {shape}."
      )
    out[name] = LazyTensor(
      tensor.shape, _FLOAT32, _fp8_reader(tensor, scales, block)
    )
  return out


def _fp8_reader(tensor: LazyTensor, scales: LazyTensor, block: tuple[int, int]):
  def read() -> np.ndarray:
    wide = tensor.read().astype(np.float32)
    factors = scales.read().astype(np.float32)
    rows, columns = tensor.shape
    factors = np.repeat(factors, block[0], axis=0)[:rows]
    wide *= np.repeat(factors, block[1], axis=1)[:, :columns]
    return wide

  return read


def mxfp4(tensors: Tensors) -> Tensors:
  """Dequantizes each `X_blocks` [..., N, G, 16] with `X_scales` [..., N, G].

  N is the number of outputs. Each output has G blocks of 32 values along the
  input axis, and each byte stores two values. The result `X` is [..., 32 G, N].
  """
  out = {
    name: tensor
    for name, tensor in tensors.items()
    if not name.endswith(("_blocks", "_scales"))
  }
  for name, blocks in tensors.items():
    if not name.endswith("_blocks"):
      continue
    base = name.removesuffix("_blocks")
    scales = tensors.get(f"{base}_scales")
    if scales is None or scales.shape != blocks.shape[:-1]:
      shape = "none" if scales is None else list(scales.shape)
      raise ValueError(
        f"tensor {base}_scales must have shape {list(blocks.shape[:-1])}, a "
        f"scale for each block, got {shape}."
      )
    *lead, outputs, groups, width = blocks.shape
    shape = (*lead, groups * width * 2, outputs)
    out[base] = LazyTensor(shape, _FLOAT32, _mxfp4_reader(blocks, scales))
  return out


def _mxfp4_reader(blocks: LazyTensor, scales: LazyTensor):
  def read() -> np.ndarray:
    packed = blocks.read().view(np.uint8)
    *lead, groups, width = packed.shape
    values = np.empty((*packed.shape, 2), np.float32)
    # The low nibble of a byte is the first of its two values.
    values[..., 0] = _E2M1[packed & 15]
    values[..., 1] = _E2M1[packed >> 4]
    # Scales are float8 E8M0: a byte is an exponent of two with a bias of 127.
    exponents = scales.read().view(np.uint8).astype(np.int32) - 127
    values = values.reshape(*lead, groups, 2 * width)
    values = np.ldexp(values, exponents[..., None], out=values)
    return values.reshape(*lead, groups * width * 2).swapaxes(-1, -2)

  return read
