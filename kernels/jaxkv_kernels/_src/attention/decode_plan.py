"""Equal pieces of decode work, for kernels that give each core one piece.

A plan says where contexts are cut, never what a row attends to.
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
  """Pieces of the rows' contexts, in row order.

  Item i stands for those tokens of row `row[i]` with `first[i] <= p < end[i]`
  that the row attends to. The items of row b are `begins[b] <= i <
  begins[b + 1]`, one at least, and ascend from token 0; the last has no end.
  So they hold each token once, whatever the length and the window: for others
  than it was made from, a plan is less even, and as right. Items from
  `begins[B]` on are idle: row 0, no tokens.

  I, the number of items, is static; the rest are values. An item's first
  token is a multiple of the plan's `block`.

  Attributes:
    row: int32[I]
    first: int32[I]
    end: int32[I]
    begins: int32[B + 1]
    tokens: the most that an item holds of the lengths and the window that
      the plan was made from. int32[]
  """

  row: jax.Array
  first: jax.Array
  end: jax.Array
  begins: jax.Array
  tokens: jax.Array


def plan_decode(
  lengths: jax.Array,
  *,
  workers: int,
  block: int = 64,
  window: jax.Array | int | None = None,
) -> DecodePlan:
  """Cuts the contexts of a decode step into equal pieces.

  Call it once a step and hand the plan to `paged_decode` in every layer. With
  W workers there are I = B + W items, enough for pieces of ceil(n / W) blocks
  where n is the number of blocks in all rows: no piece is longer than a
  worker's fair share, to a block. The pieces follow from all lengths, so with
  a plan the last bits of a row's result depend on its neighbours.
  `decode_workers` says whether a backend takes plans, and of what size.

  Args:
    lengths: int32[B], tokens of each sequence, as for `paged_decode`.
    workers: W, pieces to aim at: cores that work at once, divided by the K/V
      heads if each head's piece is a core's.
    block: tokens; pieces begin at multiples of it. A multiple of the page
      size lets a kernel read whole pages.
    window: the window that the layers using this plan attend through: what is
      behind it counts for nothing. None: none. For layers with another window
      the pieces are less even.

  Returns:
    The plan.

  Raises:
    ValueError: an argument has a shape, dtype or value that is not supported.

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
    raise ValueError(
      f"lengths has shape {lengths.shape}; it must be [B] with B >= 1"
    )
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
  skipped = jnp.zeros_like(lengths)
  if window is not None:
    skipped = jnp.maximum(lengths - window, 0) // block
  blocks = (lengths + block - 1) // block - skipped
  total = jnp.sum(blocks, dtype=jnp.int32)
  share = jnp.maximum((total + workers - 1) // workers, 1)
  pieces = jnp.maximum((blocks + share - 1) // share, 1)
  ends = jnp.cumsum(pieces, dtype=jnp.int32)
  begins = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
  item = jnp.arange(batch + workers, dtype=jnp.int32)
  row = row_of(ends, item)
  real = row < batch
  row = jnp.where(real, row, 0)
  begin = skipped[row] + (item - begins[row]) * share
  opens, closes = item == begins[row], item == begins[row + 1] - 1
  end = jnp.where(closes, _NO_END, (begin + share) * block)
  return DecodePlan(
    row=row,
    first=jnp.where(real & ~opens, begin * block, 0),
    end=jnp.where(real, end, 0),
    begins=begins,
    tokens=share * block,
  )
