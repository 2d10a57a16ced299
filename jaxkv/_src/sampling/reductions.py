"""Sums and maxima of rows, and of the blocks into which a row is divided.

On a CPU, XLA compiles a single float reduction to a library call, which first
writes the operand to memory and wakes other threads. It compiles a variadic
reduction to a loop that is two to ten times faster. So `sums` and `maxima` add
a second reduction, over integers, because XLA would not vectorize two float
reductions.

A row of V tokens is divided into blocks of about sqrt(V) tokens. Rows are not
padded to whole blocks: on a CPU, padding takes longer than the reduction.

Under tensor parallelism, rows are split by vocabulary over `parts` devices. XLA
partitions sums, maxima and reads of single tokens, for which devices exchange a
few numbers for each row. It would gather whole rows for slices, and for blocks
that span two devices. So if `parts` > 1, functions avoid both.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing


class Block(NamedTuple):
  """One block of each row.

  Attributes:
    values: [R, Y]. If the last block of a row is short, `values` begins with
      values of the block before it, which are not valid.
    columns: int32[R, Y], the column of each value in its row.
    valid: bool[R, Y], True for values that belong to the block.
  """

  values: Array
  columns: Array
  valid: Array


def sums(values: Array) -> Array:
  """Sums the last axis of float32[..., X]."""

  def add(left: tuple[Array, ...], right: tuple[Array, ...]) -> tuple:
    return left[0] + right[0], left[1] + right[1]

  zeros = jnp.float32(0), jnp.int32(0)
  nonzero = (values != 0).astype(jnp.int32)
  result, count = lax.reduce((values, nonzero), zeros, add, (values.ndim - 1,))
  # The condition is always true, but XLA cannot infer this. If `count` were not
  # used, XLA would drop the integer reduction and call the slow library.
  return jnp.where(count >= 0, result, 0)


def maxima(values: Array) -> Array:
  """Returns the maxima over the last axis of float32[..., X].

  A row with a NaN gives NaN.
  """

  def combine(left: tuple[Array, ...], right: tuple[Array, ...]) -> tuple:
    return lax.max(left[0], right[0]), left[1] + right[1]

  # A maximum of integers would lose NaN, so the second reduction counts NaNs.
  lowest = jnp.int32(-(2**31)), jnp.int32(0)
  nans = jnp.isnan(values).astype(jnp.int32)
  ordered = _ordered_bits(lax.bitcast_convert_type(values, jnp.int32))
  highest, count = lax.reduce(
    (ordered, nans), lowest, combine, (values.ndim - 1,)
  )
  highest = lax.bitcast_convert_type(_ordered_bits(highest), jnp.float32)
  return jnp.where(count > 0, jnp.nan, highest)


def _ordered_bits(bits: Array) -> Array:
  """Converts the bits of floats to integers of the same order, and back."""
  # Negative floats sort in reverse of their bits, so all bits but the sign are
  # flipped. The map is its own inverse.
  return bits ^ ((bits >> 31) & jnp.int32(2**31 - 1))


def first_of(condition: Array) -> Array:
  """Returns the index of each row's first True in bool[R, X]; 0 for none."""
  # Computes a minimum, because `argmax` takes ten times as long on a CPU.
  width = condition.shape[1]
  index = jnp.arange(width, dtype=jnp.int32)[None]
  index_of_first = jnp.min(jnp.where(condition, index, width), axis=1)
  return jnp.where(index_of_first < width, index_of_first, 0)


def width_of(vocab_size: int) -> int:
  """Returns the number of tokens of a block, a power of 2 near sqrt(V)."""
  return 1 << ((vocab_size - 1).bit_length() + 1) // 2


def by_block(reduce: Callable[[Array], Array], values: Array) -> Array:
  """Applies `sums` or `maxima` to each block of [R, V], and returns [R, X]."""
  rows, vocab_size = values.shape
  width = width_of(vocab_size)
  whole = vocab_size // width * width
  parts = []
  if whole:
    parts.append(reduce(values[:, :whole].reshape(rows, -1, width)))
  if whole < vocab_size:
    parts.append(reduce(values[:, whole:])[:, None])
  return jnp.concatenate(parts, axis=1)


def block_sums(values: Array, parts: int = 1) -> Array:
  """Sums each block of float32[R, V], and returns [R, X].

  `parts` must divide V. The blocks, and so the samples, do not depend on it.
  """
  if parts == 1:
    return by_block(sums, values)
  rows, vocab_size = values.shape
  part_size = vocab_size // parts
  width = width_of(vocab_size)
  count = -(-part_size // width)
  padding = (0, 0), (0, 0), (0, count * width - part_size)
  runs = jnp.pad(values.reshape(rows, parts, part_size), padding)
  runs = runs.reshape(rows, parts, count, width)
  # A part can begin within a block. Then each run of `width` tokens of the part
  # has tokens of two blocks, with the border at the same place in each run.
  starts = np.arange(parts, dtype=np.int32)[:, None] * part_size
  is_first = np.arange(width, dtype=np.int32) < width - starts % width
  of_block = np.stack([is_first, ~is_first])[None, :, :, None]
  # Because of the reshape, devices exchange these sums, not the indices below.
  pieces = sums(jnp.where(of_block, runs[:, None], 0)).reshape(rows, -1)
  block = starts // width + np.arange(count, dtype=np.int32)
  block = jnp.stack([block, block + 1]).reshape(1, -1)
  row = jnp.arange(rows, dtype=jnp.int32)[:, None]
  masses = jnp.zeros((rows, -(-vocab_size // width)), jnp.float32)
  return indexing.add(masses, row, block, values=pieces)


def read_block(values: Array, block: Array, parts: int = 1) -> Block:
  """Reads one block of each row of [R, V]; `block` is int32[R]."""
  # A slice must not pass the end of a row. So the slice for a short last block
  # begins before the block, and `valid` marks the columns of the block.
  vocab_size = values.shape[1]
  width = min(width_of(vocab_size), vocab_size)
  first_column = block * width_of(vocab_size)
  start = jnp.minimum(first_column, vocab_size - width)

  def read(row: Array, start_of_row: Array) -> Array:
    return lax.dynamic_slice(row, (start_of_row,), (width,))

  columns = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
  if parts == 1:
    values = jax.vmap(read)(values, start)
  else:
    # XLA would gather whole rows for slices.
    values = jnp.take_along_axis(values, columns, axis=1)
  return Block(
    values=values, columns=columns, valid=columns >= first_column[:, None]
  )
