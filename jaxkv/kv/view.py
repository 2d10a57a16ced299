"""What one call needs to know of the cache state."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
  """Where B sequences live, and which of their tokens are new in this call.

  A call brings T columns per row; the first `counts` of them are tokens at
  positions `starts`, `starts + 1` ..., the others are padding.

  Attributes:
    page_table: page ids of each row's sequence, in order, of one group; 0
      (null page) or an id out of range where there is none. int32[B, M]
    starts: position of the first new token. int32[B]
    counts: how many columns are tokens; 0 for an idle row. int32[B]
    shared: pages that rows have in common, as `share` finds them; or None. A
      view that is stepped on may keep it: what no longer holds is not used.
    plan: pieces into which a decode is cut, as `plan` makes it; or None. A view
      that is stepped on may keep it: it is less even then, and as right.
    exact: whether `shared` is known to hold for these very arrays. So it is in
      what `share` and `fit` return, but not in what is made from that with
      `replace`, nor behind a `jit`, `scan` or `while_loop`.
  """

  page_table: jax.Array  # int32[B, M]
  starts: jax.Array  # int32[B]
  counts: jax.Array  # int32[B]
  shared: kernels.SharedPrefix | None = None
  plan: kernels.Plan | None = None
  # Of one object, neither a field nor a leaf, so that whatever makes another
  # view of this one makes it False.
  exact: ClassVar[bool] = False


def mark_exact(view: View) -> View:
  """The view, whose `shared` was just made from its other fields."""
  object.__setattr__(view, "exact", True)
  return view


def decode_lengths(view: View) -> jax.Array:
  """Tokens of each row with its one new token, 0 for idle rows: int32[B]."""
  return jnp.where(view.counts > 0, view.starts + 1, 0)


def positions(view: View, columns: int) -> jax.Array:
  """Position of each column's token, -1 for padding: int32[B, T]."""
  column = jnp.arange(columns, dtype=jnp.int32)[None]
  real = column < view.counts[:, None]
  return jnp.where(real, view.starts[:, None] + column, -1)


def check_rows(view: View, name: str, shape: tuple[int, ...]) -> None:
  """Raises `ValueError` unless the view has as many rows as an argument."""
  rows = shape[0] if shape else None
  table = view.page_table.shape
  if len(table) != 2 or table[1] == 0:
    raise ValueError(f"view.page_table has shape {table}; it must be [B, M]")
  if table[0] != rows:
    raise ValueError(
      f"{name} has shape {shape} but view.page_table {table}; both must have B"
      " rows"
    )
  for field in ("starts", "counts"):
    values = getattr(view, field)
    if values.shape != (rows,):
      raise ValueError(
        f"view.{field} has shape {values.shape}; it must be [{rows}]"
      )
  if view.shared is not None and view.shared.own_table.shape != table:
    raise ValueError(
      f"view.shared is for a page_table of shape {view.shared.own_table.shape}"
      f" but view.page_table has shape {table}; call share again"
    )
  for field in ("page_table", "starts", "counts"):
    dtype = getattr(view, field).dtype
    if dtype != jnp.int32:
      raise ValueError(f"view.{field} is {dtype}; it must be int32")
