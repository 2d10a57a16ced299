"""What one call needs to know of the cache state."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels
from jaxkv_kernels._src import check


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
  plan: kernels.DecodePlan | None = None
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


def check_view(view: View) -> None:
  """Raises `ValueError` unless the fields of a view fit each other."""
  check.table(view.page_table, None, "view.page_table")
  shape = view.page_table.shape
  check.vector("view.starts", view.starts, shape[0])
  check.vector("view.counts", view.counts, shape[0])
  if view.shared is not None and view.shared.own_table.shape != shape:
    raise ValueError(
      f"view.shared is for a page_table of shape {view.shared.own_table.shape}"
      f" but view.page_table has shape {shape}; call share again"
    )


def check_rows(view: View, name: str, array: jax.Array) -> None:
  """Raises `ValueError` unless a view has as many rows as an array."""
  check_view(view)
  check.is_array(name, array)
  table = view.page_table.shape
  if array.shape[:1] != table[:1]:
    raise ValueError(
      f"{name} has shape {array.shape} but view.page_table {table}; both must"
      " have B rows"
    )
