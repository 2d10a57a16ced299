"""Trees of tokens, each in one row: who stands where, and after whom.

The root of a tree is a prompt, level 0. Each branch of a level begins where a
branch of the level above ends. All tokens of a tree stand in one row, level
after level, branch after branch:

  | prompt, P columns | G branches of R columns each | G * G' of R' | ...

Letters: N trees, T columns of a row, C_l branches of level l in a tree (C_0 is
1, and each divides the next), R_l columns of such a branch.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from collections.abc import Sequence

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree:
  """Where the tokens of N trees stand.

  Attributes:
    branches: C_l of each level.
    widths: R_l of each level, at least 1.
    lengths: int32[N, C_l] of each level, tokens of each branch; of the last
      level perhaps more than there are columns.
    starts: int32[N, C_l] of each level, tokens before each branch, from the
      root on.
  """

  branches: tuple[int, ...] = dataclasses.field(metadata={"static": True})
  widths: tuple[int, ...] = dataclasses.field(metadata={"static": True})
  lengths: tuple[jax.Array, ...]
  starts: tuple[jax.Array, ...]

  def split(self, x: jax.Array) -> list[jax.Array]:
    """Rows [N, T, ...] as levels [N, C_l, R_l, ...]."""
    parts, column = [], 0
    for count, width in zip(self.branches, self.widths, strict=True):
      part = x[:, column : column + count * width]
      parts.append(part.reshape(x.shape[0], count, width, *x.shape[2:]))
      column += count * width
    return parts

  def join(self, parts: Iterable[jax.Array]) -> jax.Array:
    """Levels [N, C_l, R_l or more, ...] as rows [N, T, ...]."""
    flat = []
    for part, width in zip(parts, self.widths, strict=True):
      rows, count, *_ = part.shape
      part = part[:, :, :width]
      flat.append(part.reshape(rows, count * width, *part.shape[3:]))
    return jnp.concatenate(flat, axis=1)

  def positions(self) -> list[jax.Array]:
    """int32[N, C_l, R_l] of each level, counted from the root."""
    return [
      start[..., None] + columns(width)
      for start, width in zip(self.starts, self.widths, strict=True)
    ]

  def paths(self, x: jax.Array, level: int) -> jax.Array:
    """Rows [N, T, ...] as [N * C_l, R_0 + ... + R_l, ...]: from the root on.

    The tokens of each branch of a level, after those of all its ancestors,
    without columns between them; then anything.
    """
    count, stop = self.branches[level], sum(self.widths[: level + 1])
    dims = x.shape[2:]
    path = jnp.zeros((x.shape[0] * count, stop, *dims), x.dtype)
    put = jax.vmap(
      lambda path, part, at: jax.lax.dynamic_update_slice_in_dim(
        path, part, at, 0
      )
    )
    # What stands behind a branch's end is overwritten by the next one.
    for part, start in zip(
      self.split(x)[: level + 1], self.starts, strict=False
    ):
      times = count // part.shape[1]
      part = jnp.repeat(part, times, axis=1).reshape(-1, *part.shape[2:])
      path = put(path, part, jnp.repeat(start, times, axis=1).ravel())
    return path

  def last(self, level: int) -> jax.Array:
    """int32[N, C_l]: the row's column of the last token up to a branch's end.

    That of a branch without tokens stands in one of its ancestors. 0 if there
    are none at all.
    """
    begin, column = 0, jnp.zeros_like(self.lengths[0])
    for number in range(level + 1):
      count, width = self.branches[number], self.widths[number]
      column = jnp.repeat(column, count // column.shape[1], axis=1)
      first = begin + width * jnp.arange(count, dtype=jnp.int32)[None]
      own = self.lengths[number]
      column = jnp.where(own > 0, first + own - 1, column)
      begin += count * width
    return column


def of_lengths(widths: Sequence[int], lengths: Sequence[jax.Array]) -> Tree:
  """A tree of branches of so many columns and tokens.

  Args:
    widths: R_l of each level.
    lengths: int32[N, C_l] of each level.
  """
  starts = [jnp.zeros_like(lengths[0])]
  for above, own in itertools.pairwise(lengths):
    times = own.shape[1] // above.shape[1]
    starts.append(jnp.repeat(starts[-1] + above, times, axis=1))
  return Tree(
    branches=tuple(own.shape[1] for own in lengths),
    widths=tuple(widths),
    lengths=tuple(lengths),
    starts=tuple(starts),
  )


def columns(width: int) -> jax.Array:
  """int32[1, 1, R]: 0 .. R - 1."""
  return jnp.arange(width, dtype=jnp.int32)[None, None]
