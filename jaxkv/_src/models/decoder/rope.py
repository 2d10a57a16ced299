"""Rotary positions (Su et al., 2021), and how their range is stretched.

The angle of pair i at position p is p * f[i]. A `Rope` says which elements of a
head are turned, in which pairs, and what f is. It is computed on the host, in
float64, and is a constant of the program.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
  """All angles divided by a factor.

  Attributes:
    factor: at least 1.
  """

  factor: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
  """Llama 3: slow angles divided by a factor, fast ones kept.

  Attributes:
    factor: by which the slowest are divided.
    low_frequency_factor: turns in `original_length` below which an angle is
      slow.
    high_frequency_factor: turns above which it is fast.
    original_length: tokens of the context before it was stretched.
  """

  factor: float
  low_frequency_factor: float
  high_frequency_factor: float
  original_length: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
  """YaRN (Peng et al., 2023): a ramp between slow and fast pairs.

  Attributes:
    factor: by which the slowest are divided.
    original_length: tokens of the context before it was stretched.
    beta_fast: turns in `original_length` above which an angle is kept.
    beta_slow: turns below which it is divided.
    truncate: whether the ramp begins and ends at whole pairs.
    attention_factor: factor of cosines and sines.
  """

  factor: float
  original_length: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  truncate: bool = True
  attention_factor: float = 1.0


Scaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
  """Rotary positions of a layer.

  Attributes:
    base: the wavelength base.
    dim: the leading elements of a head that are turned; None for all.
    interleaved: whether a pair is elements 2 i and 2 i + 1. Otherwise it is i
      and i + dim / 2.
    scaling: how the range is stretched; None for not at all.

  Raises:
    ValueError: `base` is not a positive number.
  """

  base: float = 10_000.0
  dim: int | None = None
  interleaved: bool = False
  scaling: Scaling | None = None

  def __post_init__(self) -> None:
    number = isinstance(self.base, int | float | np.number)
    if isinstance(self.base, bool) or not number or not self.base > 0:
      raise ValueError(
        f"`rope_base` must be a positive number, got {self.base!r}."
      )


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
  """float32[dim / 2]: the angle of each pair at position 1.

  Examples:
    >>> frequencies(Rope(base=100.0), 4).tolist()
    [1.0, 0.10000000149011612]
  """
  dim = head_dim if rope.dim is None else rope.dim
  exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
  plain = rope.base**-exponents
  scaling = rope.scaling
  if isinstance(scaling, LinearScaling):
    plain = plain / scaling.factor
  elif isinstance(scaling, Llama3Scaling):
    plain = _llama3(plain, scaling)
  elif isinstance(scaling, YarnScaling):
    plain = _yarn(plain, rope.base, dim, scaling)
  return plain.astype(np.float32)


def _llama3(plain: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
  turns = scaling.original_length * plain / (2 * math.pi)
  low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
  kept = np.clip((turns - low) / (high - low), 0, 1)
  return plain * (kept + (1 - kept) / scaling.factor)


def _yarn(
  plain: np.ndarray, base: float, dim: int, scaling: YarnScaling
) -> np.ndarray:
  def pair_of(turns: float) -> float:
    """The pair that makes so many turns in the original context."""
    wavelength = scaling.original_length / (turns * 2 * math.pi)
    return dim * math.log(wavelength) / (2 * math.log(base))

  begin, end = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
  if scaling.truncate:
    begin, end = math.floor(begin), math.ceil(end)
  begin, end = max(begin, 0), min(end, dim - 1)
  end = end + 0.001 if begin == end else end
  divided = np.clip((np.arange(dim // 2) - begin) / (end - begin), 0, 1)
  return plain * (1 - divided + divided / scaling.factor)


def rotation(
  rope: Rope, head_dim: int, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Cosines and sines of each pair's angle, float32[B, T, 1, dim / 2].

  Args:
    rope: which angles.
    head_dim: D.
    positions: int32[B, T].
  """
  turns = jnp.asarray(frequencies(rope, head_dim))[None, None, None]
  angles = positions.astype(jnp.float32)[:, :, None, None] * turns
  factor = 1.0
  if isinstance(rope.scaling, YarnScaling):
    factor = rope.scaling.attention_factor
  if factor == 1.0:
    return jnp.cos(angles), jnp.sin(angles)
  return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
  x: jax.Array, turned: tuple[jax.Array, jax.Array], rope: Rope
) -> jax.Array:
  """Turns the pairs of the leading elements of [B, T, H, D].

  Args:
    x: queries or keys.
    turned: from `rotation`.
    rope: how elements are paired.
  """
  cos, sin = turned
  dim = 2 * cos.shape[-1]
  wide = x[..., :dim].astype(jnp.float32)
  if rope.interleaved:
    low, high = wide[..., 0::2], wide[..., 1::2]
  else:
    low, high = jnp.split(wide, 2, axis=-1)
  pairs = (low * cos - high * sin, high * cos + low * sin)
  if rope.interleaved:
    out = jnp.stack(pairs, axis=-1).reshape(wide.shape)
  else:
    out = jnp.concatenate(pairs, axis=-1)
  out = out.astype(x.dtype)
  return out if dim == x.shape[-1] else jnp.concatenate([out, x[..., dim:]], -1)
