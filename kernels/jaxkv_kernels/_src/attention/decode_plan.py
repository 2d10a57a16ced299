"""Cuts decode work into equal pieces, for kernels that give each core a piece.

A plan determines the cuts of contexts, never the keys that a row sees.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv_kernels._src import check
from jaxkv_kernels._src.attention.query_packing import row_of

_NO_END = np.iinfo(np.int32).max


class DecodePlan(NamedTuple):
  """Pieces of the rows' contexts, in row order. Made by `plan_decode`.

  Unit i has the keys `first[i] <= position < end[i]` of row `row[i]`. The units
  of row b are `begins[b] <= i < begins[b + 1]`. A row has at least one unit.
  Its units ascend from token 0, and the last has no end, so they hold each
  token once for any length and window. With other lengths than those of
  `plan_decode`, units are less even, and results are still correct. Units from
  `begins[B]` on are idle: row 0, no tokens.

  U, the number of units, is static. A unit begins at a multiple of `block`, an
  argument of `plan_decode`.

  Attributes:
    row: row of each unit.
    first: first position of each unit.
    end: one past its last position.
    begins: the first unit of each row.
    tokens: the maximum number of tokens in a unit, for the lengths and the
      window of `plan_decode`.
  """

  row: jax.Array  # int32[U]
  first: jax.Array  # int32[U]
  end: jax.Array  # int32[U]
  begins: jax.Array  # int32[B + 1]
  tokens: jax.Array  # int32[]


def plan_decode(
  lengths: jax.Array,
  *,
  workers: int,
  block: int = 64,
  window: jax.Array | int | None = None,
) -> DecodePlan:
  """Cuts the contexts of a decode step into equal pieces.

  Call it once a step and pass the plan to `paged_decode` in every layer. No
  piece is longer than a worker's fair share of all blocks, rounded up to a
  block. The pieces depend on all lengths, so with a plan the last bits of a
  row's result depend on the other rows. `decode_workers` returns the number of
  workers of a backend.

  Args:
    lengths: int32[B], tokens of each sequence, as for `paged_decode`.
    workers: the number of pieces to aim at: cores that work at once, divided by
      K if a core works on one K/V head.
    block: tokens; pieces begin at multiples of it. A multiple of the page
      size lets a kernel read whole pages.
    window: the window of the layers that use this plan, or None; the plan does
      not count tokens behind it. For layers with another window the pieces are
      less even.

  Returns:
    The plan.

  Raises:
    TypeError: an argument has a type or dtype that is not supported.
    ValueError: an argument has a shape or value that is not supported.

  Examples:
    >>> import jax.numpy as jnp
    >>> lengths = jnp.asarray([512, 0, 64], jnp.int32)
    >>> plan = plan_decode(lengths, workers=3)
    >>> int(plan.tokens), plan.begins.tolist()
    (192, [0, 3, 4, 5])
    >>> plan.row.tolist(), plan.first.tolist()
    ([0, 0, 0, 1, 2, 0], [0, 192, 384, 0, 0, 0])
    >>> plan.end.tolist()[:2]
    [192, 384]
  """
  check.integers("lengths", lengths)
  if lengths.ndim != 1 or lengths.size == 0:
    check.refuse(ValueError, "lengths", "int32[B] with B >= 1", lengths)
  check.count("workers", workers)
  check.count("block", block)
  check.window(window)
  return _plan(lengths, window, workers=workers, block=block)


@functools.partial(jax.jit, static_argnames=("workers", "block"), inline=True)
def _plan(
  lengths: jax.Array, window, *, workers: int, block: int
) -> DecodePlan:
  batch = lengths.size
  lengths = jnp.maximum(lengths, 0)
  num_skipped = jnp.zeros_like(lengths)
  if window is not None:
    num_skipped = jnp.maximum(lengths - window, 0) // block
  blocks = (lengths + block - 1) // block - num_skipped
  total = jnp.sum(blocks, dtype=jnp.int32)
  share = jnp.maximum((total + workers - 1) // workers, 1)
  pieces = jnp.maximum((blocks + share - 1) // share, 1)
  ends = jnp.cumsum(pieces, dtype=jnp.int32)
  begins = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
  # Always enough: rounding up wastes less than one piece for each row.
  unit = jnp.arange(batch + workers, dtype=jnp.int32)
  row = row_of(ends, unit)
  is_used = row < batch
  row = jnp.where(is_used, row, 0)
  begin = num_skipped[row] + (unit - begins[row]) * share
  # The outer units of a row are open, so that a plan for other lengths or
  # another window still covers every token.
  is_first, is_last = unit == begins[row], unit == begins[row + 1] - 1
  end = jnp.where(is_last, _NO_END, (begin + share) * block)
  return DecodePlan(
    row=row,
    first=jnp.where(is_used & ~is_first, begin * block, 0),
    end=jnp.where(is_used, end, 0),
    begins=begins,
    tokens=share * block,
  )
