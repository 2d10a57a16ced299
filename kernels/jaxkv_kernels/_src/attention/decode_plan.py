"""Cuts decode work into equal pieces, for kernels that give each core a piece.

A plan decides where contexts are cut, never which keys a row sees.
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
  """U units of work, each a piece of one row's context; from `plan_decode`.

  Unit i has the keys `first[i] <= position < end[i]` of row `row[i]`. Row b has
  at least one unit, and its units are `begins[b] <= i < begins[b + 1]`. A row's
  first unit begins at token 0, and the end of its last unit is the largest
  int32. So the units of a row cover each token once, for any length and window.
  If lengths differ from those passed to `plan_decode`, results are correct, but
  the work is less balanced. Units from `begins[B]` on are idle: row 0, no keys.

  U is B + `workers`. Units begin at multiples of the `block` of `plan_decode`.

  Attributes:
    row: the row of each unit.
    first: the first position of each unit.
    end: one past the last position of each unit.
    begins: the first unit of each row, then the first idle unit.
    tokens: an upper bound of the tokens that a unit reads, for the lengths and
      the window of `plan_decode`.
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
  piece has more blocks than the number of all blocks divided by `workers`,
  rounded up. The pieces depend on all lengths, so with a plan the last bits of
  a row's result depend on the other rows.

  Args:
    lengths: int32[B], tokens of each sequence, as for `paged_decode`.
    workers: the number of pieces to aim at; `decode_workers` returns it for a
      backend. If a core processes one K/V head at a time, this is the number of
      cores divided by K, the number of K/V heads.
    block: pieces begin at multiples of this number of tokens. If it is a
      multiple of the page size, a kernel can read whole pages.
    window: the window of the layers that use this plan, or None. Whole blocks
      before the window do not count as work. In layers with another window, the
      work is less balanced.

  Returns:
    The plan.

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
    window = jnp.asarray(window, jnp.int32)
    num_skipped = jnp.maximum(lengths - window, 0) // block
  blocks = (lengths + block - 1) // block - num_skipped
  num_blocks = jnp.sum(blocks, dtype=jnp.int32)
  share = jnp.maximum((num_blocks + workers - 1) // workers, 1)
  pieces = jnp.maximum((blocks + share - 1) // share, 1)
  ends = jnp.cumsum(pieces, dtype=jnp.int32)
  first_units = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
  # B + workers units are enough: `num_blocks / share` is at most `workers`, and
  # each row adds at most one unit, because its number of units is rounded up.
  unit = jnp.arange(batch + workers, dtype=jnp.int32)
  row = row_of(ends, unit)
  is_used = row < batch
  row = jnp.where(is_used, row, 0)
  first_block = num_skipped[row] + (unit - first_units[row]) * share
  # The first unit of a row begins at 0 and the last unit has no end, so that a
  # plan covers every token, even for other lengths or another window.
  is_first = unit == first_units[row]
  is_last = unit == first_units[row + 1] - 1
  end_key = jnp.where(is_last, _NO_END, (first_block + share) * block)
  return DecodePlan(
    row=row,
    first=jnp.where(is_used & ~is_first, first_block * block, 0),
    end=jnp.where(is_used, end_key, 0),
    begins=first_units,
    tokens=share * block,
  )
