"""Rotary positions (Su et al., 2021) and their scaling to longer contexts.

Elements of a head are rotated in pairs. At position p, pair i is rotated by the
angle p * f[i]. A `Rope` defines the pairs and their frequencies f.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
  """Divides all frequencies by a factor.

  Attributes:
    factor: the divisor, at least 1.
  """

  factor: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
  """Divides low frequencies by a factor, as in Llama 3.

  Attributes:
    factor: divisor of the low frequencies.
    low_frequency_factor: a pair with fewer turns than this in `original_length`
      tokens has a low frequency.
    high_frequency_factor: a pair with more turns than this in `original_length`
      tokens has a high frequency. Frequencies in between are interpolated.
    original_length: context length before scaling, in tokens.
  """

  factor: float
  low_frequency_factor: float
  high_frequency_factor: float
  original_length: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
  """Divides low frequencies by a factor, as in YaRN (Peng et al., 2023).

  Attributes:
    factor: divisor of the low frequencies.
    original_length: context length before scaling, in tokens.
    beta_fast: a pair with more turns than this in `original_length` tokens
      keeps its frequency.
    beta_slow: a pair with fewer turns than this in `original_length` tokens has
      a low frequency. Frequencies in between are interpolated.
    truncate: True to round the interpolated range outwards to whole pairs.
    attention_factor: factor of all cosines and sines.
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
    base: pair i has the frequency base ** (-2 i / dim) before scaling.
    dim: number of a head's leading elements that are rotated; None for all.
    interleaved: True if pair i has the elements 2 i and 2 i + 1, False if it
      has the elements i and i + dim / 2.
    scaling: scaling of the frequencies; None for no scaling.

  Raises:
    ValueError: `base` is not a positive number.
  """

  base: float = 10_000.0
  dim: int | None = None
  interleaved: bool = False
  scaling: Scaling | None = None

  def __post_init__(self) -> None:
    is_number = isinstance(self.base, int | float | np.number)
    if isinstance(self.base, bool) or not is_number or not self.base > 0:
      raise ValueError(
        f"`rope_base` must be a positive number, got {self.base!r}."
      )


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
  """Returns the angle of each pair at position 1, float32[dim / 2].

  Examples:
    >>> frequencies(Rope(base=100.0), 4).tolist()
    [1.0, 0.10000000149011612]
  """
  dim = head_dim if rope.dim is None else rope.dim
  # A position multiplies the error of a frequency. So the host computes
  # frequencies in float64 and rounds them once.
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
  low = scaling.low_frequency_factor
  share = np.clip((turns - low) / (scaling.high_frequency_factor - low), 0, 1)
  return plain * (share + (1 - share) / scaling.factor)


def _yarn(
  plain: np.ndarray, base: float, dim: int, scaling: YarnScaling
) -> np.ndarray:
  def pair_of(turns: float) -> float:
    """Returns the pair with this number of turns in `original_length`."""
    wavelength = scaling.original_length / (turns * 2 * math.pi)
    return dim * math.log(wavelength) / (2 * math.log(base))

  first_pair = max(pair_of(scaling.beta_fast), 0)
  last_pair = min(pair_of(scaling.beta_slow), dim - 1)
  if scaling.truncate:
    first_pair = math.floor(first_pair)
    last_pair = math.ceil(last_pair)
  # Avoids a division by zero below, as in the reference code.
  last_pair = last_pair + 0.001 if first_pair == last_pair else last_pair
  span = last_pair - first_pair
  divided = np.clip((np.arange(dim // 2) - first_pair) / span, 0, 1)
  return plain * (1 - divided + divided / scaling.factor)


def rotation(
  rope: Rope, head_dim: int, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns cosines and sines float32[B, T, 1, dim / 2] for positions."""
  frequency = jnp.asarray(frequencies(rope, head_dim))[None, None, None]
  angles = positions.astype(jnp.float32)[:, :, None, None] * frequency
  # Only YaRN has a factor. A factor of 1 adds no multiplication to the program.
  factor = 1.0
  if isinstance(rope.scaling, YarnScaling):
    factor = rope.scaling.attention_factor
  if factor == 1.0:
    return jnp.cos(angles), jnp.sin(angles)
  return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
  x: jax.Array, angles: tuple[jax.Array, jax.Array], rope: Rope
) -> jax.Array:
  """Rotates queries or keys [B, T, H, D] by the angles of `rotation`."""
  cos, sin = angles
  dim = 2 * cos.shape[-1]
  wide = x[..., :dim].astype(jnp.float32)
  if rope.interleaved:
    low = wide[..., 0::2]
    high = wide[..., 1::2]
  else:
    low, high = jnp.split(wide, 2, axis=-1)
  pairs = (low * cos - high * sin, high * cos + low * sin)
  if rope.interleaved:
    out = jnp.stack(pairs, axis=-1).reshape(wide.shape)
  else:
    out = jnp.concatenate(pairs, axis=-1)
  out = out.astype(x.dtype)
  return out if dim == x.shape[-1] else jnp.concatenate([out, x[..., dim:]], -1)
