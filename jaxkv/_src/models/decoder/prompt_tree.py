"""The layout of a tree of tokens in one row of an array.

The root of a tree is a prompt, at level 0. Each branch of a level continues a
branch of the level above. One row has all tokens of a tree, level after level
and branch after branch:

  | prompt, R_0 columns | C_1 branches of R_1 columns each | C_2 of R_2 | ...

Letters: N trees, T columns of a row, C_l branches of level l in a tree (C_0 is
1, and C_l divides C_(l+1)), R_l columns of a branch of level l.
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
  """N trees with the same layout.

  Attributes:
    branches: C_l of each level.
    widths: R_l of each level, at least 1.
    lengths: int32[N, C_l] of each level, the number of tokens of each branch.
      At the last level a length can be R_l + 1. Then the row omits the last
      token of the branch, which predicts no other token.
    starts: int32[N, C_l] of each level, the number of tokens before the branch,
      counted from the root.
  """

  branches: tuple[int, ...] = dataclasses.field(metadata={"static": True})
  widths: tuple[int, ...] = dataclasses.field(metadata={"static": True})
  lengths: tuple[jax.Array, ...]
  starts: tuple[jax.Array, ...]

  def split(self, x: jax.Array) -> list[jax.Array]:
    """Splits rows [N, T, ...] into levels [N, C_l, R_l, ...]."""
    parts = []
    column = 0
    for count, width in zip(self.branches, self.widths, strict=True):
      part = x[:, column : column + count * width]
      parts.append(part.reshape(x.shape[0], count, width, *x.shape[2:]))
      column += count * width
    return parts

  def join(self, parts: Iterable[jax.Array]) -> jax.Array:
    """Joins levels [N, C_l, R_l or more, ...] to rows [N, T, ...]."""
    flat = []
    for part, width in zip(parts, self.widths, strict=True):
      # At the last level a part can have one more column, which rows omit.
      rows, count, *_ = part.shape
      part = part[:, :, :width]
      flat.append(part.reshape(rows, count * width, *part.shape[3:]))
    return jnp.concatenate(flat, axis=1)

  def positions(self) -> list[jax.Array]:
    """Returns int32[N, C_l, R_l] of each level, the positions from the root."""
    return [
      start[..., None] + columns(width)
      for start, width in zip(self.starts, self.widths, strict=True)
    ]

  def paths(self, x: jax.Array, level: int) -> jax.Array:
    """Copies rows [N, T, ...] to one sequence per branch of level l (`level`).

    Returns:
      [N * C_l, R_0 + ... + R_l, ...]: the tokens of all ancestors of the branch
      and then of the branch, without padding between them; arbitrary values
      after them.
    """
    count = self.branches[level]
    num_columns = sum(self.widths[: level + 1])
    path = jnp.zeros((x.shape[0] * count, num_columns, *x.shape[2:]), x.dtype)
    put = jax.vmap(
      lambda path, part, start: jax.lax.dynamic_update_slice_in_dim(
        path, part, start, 0
      )
    )
    # Goes from the root down, so that a part overwrites its parent's padding.
    for part, start in zip(
      self.split(x)[: level + 1], self.starts, strict=False
    ):
      times = count // part.shape[1]
      part = jnp.repeat(part, times, axis=1).reshape(-1, *part.shape[2:])
      path = put(path, part, jnp.repeat(start, times, axis=1).ravel())
    return path

  def last(self, level: int) -> jax.Array:
    """Returns the column of each branch's last token, int32[N, C_l].

    For an empty branch, returns the column of the last token of its nearest
    ancestor with tokens, or 0 if all ancestors are empty.
    """
    level_start = 0
    column = jnp.zeros_like(self.lengths[0])
    for index in range(level + 1):
      count = self.branches[index]
      width = self.widths[index]
      column = jnp.repeat(column, count // column.shape[1], axis=1)
      starts = level_start + width * jnp.arange(count, dtype=jnp.int32)[None]
      length = self.lengths[index]
      column = jnp.where(length > 0, starts + length - 1, column)
      level_start += count * width
    return column


def of_lengths(widths: Sequence[int], lengths: Sequence[jax.Array]) -> Tree:
  """Returns a `Tree` with the given fields `widths` and `lengths`."""
  # A branch starts after its parent's tokens, because positions skip padding.
  starts = [jnp.zeros_like(lengths[0])]
  for parent, child in itertools.pairwise(lengths):
    times = child.shape[1] // parent.shape[1]
    starts.append(jnp.repeat(starts[-1] + parent, times, axis=1))
  return Tree(
    branches=tuple(length.shape[1] for length in lengths),
    widths=tuple(widths),
    lengths=tuple(lengths),
    starts=tuple(starts),
  )


def of_sequences(rows: int, width: int) -> Tree:
  """Returns trees of one branch each: N (`rows`) sequences of T tokens."""
  return of_lengths([width], [jnp.full((rows, 1), width, jnp.int32)])


def columns(width: int) -> jax.Array:
  """Returns 0 .. R - 1 as int32[1, 1, R]."""
  return jnp.arange(width, dtype=jnp.int32)[None, None]
