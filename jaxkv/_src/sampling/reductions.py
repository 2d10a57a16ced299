"""Sums and maxima of rows, and of blocks of their tokens.

For one reduction of floats, XLA calls a library on a CPU, which writes what is
reduced to memory first and wakes other threads. That takes two to ten times as
long as a loop, which XLA makes of two reductions at once. So here a second one
goes along, of integers: with two of floats, neither is vectorized.

A block has about as many tokens as a row has blocks. Nothing is padded: on a
CPU that takes longer than what is done with the blocks.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax


class Block(NamedTuple):
  """One block of each row.

  Attributes:
    values: [R, Y]. The last block of a row may be short: tokens of the block
      before it are read then, too.
    columns: int32[R, Y], where they stand.
    valid: bool[R, Y], those that are in the block.
  """

  values: Array
  columns: Array
  valid: Array


def sums(values: Array) -> Array:
  """float32[...] of float32[..., X]."""

  def add(left: tuple[Array, ...], right: tuple[Array, ...]) -> tuple:
    return left[0] + right[0], left[1] + right[1]

  zeros = jnp.float32(0), jnp.int32(0)
  along = (values != 0).astype(jnp.int32)
  total, count = lax.reduce((values, along), zeros, add, (values.ndim - 1,))
  # XLA cannot tell that this always holds, and would drop the other one.
  return jnp.where(count >= 0, total, 0)


def maxima(values: Array) -> Array:
  """float32[...] of float32[..., X]; NaN if there is one."""

  def either(left: tuple[Array, ...], right: tuple[Array, ...]) -> tuple:
    return lax.max(left[0], right[0]), left[1] + right[1]

  lowest = jnp.int32(-(2**31)), jnp.int32(0)
  nans = jnp.isnan(values).astype(jnp.int32)
  highest, count = lax.reduce(
    (_turned(values), nans), lowest, either, (values.ndim - 1,)
  )
  highest = lax.bitcast_convert_type(_turned_bits(highest), jnp.float32)
  return jnp.where(count > 0, jnp.nan, highest)


def _turned(values: Array) -> Array:
  """Integers in the order of floats, of their bits."""
  return _turned_bits(lax.bitcast_convert_type(values, jnp.int32))


def _turned_bits(bits: Array) -> Array:
  """The bits of negative numbers the other way round, but for the sign."""
  return bits ^ ((bits >> 31) & jnp.int32(2**31 - 1))


def first_of(condition: Array) -> Array:
  """int32[R]: the first index at which bool[R, X] holds, 0 if none does."""
  # `argmax` takes ten times as long on a CPU.
  size = condition.shape[1]
  index = jnp.arange(size, dtype=jnp.int32)[None]
  first = jnp.min(jnp.where(condition, index, size), axis=1)
  return jnp.where(first < size, first, 0)


def width_of(size: int) -> int:
  """The tokens of a block, about the square root of all: a power of two."""
  return 1 << ((size - 1).bit_length() + 1) // 2


def by_block(reduce: Callable[[Array], Array], values: Array) -> Array:
  """[R, X]: what `sums` or `maxima` makes of each block of [R, V]."""
  rows, size = values.shape
  width = width_of(size)
  whole = size // width * width
  parts = []
  if whole:
    parts.append(reduce(values[:, :whole].reshape(rows, -1, width)))
  if whole < size:
    parts.append(reduce(values[:, whole:])[:, None])
  return jnp.concatenate(parts, axis=1)


def read_block(values: Array, block: Array) -> Block:
  """The block int32[R] of each row of [R, V]."""
  size = values.shape[1]
  width = min(width_of(size), size)
  begin = block * width_of(size)
  start = jnp.minimum(begin, size - width)

  def read(row: Array, at: Array) -> Array:
    return lax.dynamic_slice(row, (at,), (width,))

  columns = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
  return Block(
    values=jax.vmap(read)(values, start),
    columns=columns,
    valid=columns >= begin[:, None],
  )
