"""Views: the part of the cache state that a call to the K/V memory needs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels
from jaxkv._src.arrays import arguments
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import check_single
from jaxkv._src.kv.kv_pages import check_group
from jaxkv._src.kv.kv_pages import in_memory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
  """The pages of B sequences, and their new tokens in this call.

  Each row has T columns, as in keys [B, T, K, D]. The first `num_tokens[b]`
  columns of row b are tokens at positions `starts[b]`, `starts[b] + 1` ...; the
  other columns are padding. `jaxkv.view` makes views.

  For the next step, replace the first three fields; you can keep `shared`.
  `attend` checks which rows still begin with the pages in `shared`, and reads
  all other rows separately.

  Attributes:
    page_table: page ids of each row's sequence, in the order of its tokens, for
      one layer group; a missing page is 0 (the null page) or out of range.
    starts: the position of each row's first new token.
    num_tokens: the number of new tokens in each row; 0 for an idle row.
    shared: pages that rows have in common, from `jaxkv.kv.share`; or None.
    kind: the kind of the layer group, so that `attend` can check the window;
      None to accept any window.
  """

  page_table: jax.Array  # int32[B, M]
  starts: jax.Array  # int32[B]
  num_tokens: jax.Array  # int32[B]
  shared: kernels.SharedPrefix | None = None
  kind: GroupKind | None = dataclasses.field(
    default=None, metadata={"static": True}
  )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FreshView:
  """A view whose `shared` is already checked, so `attend` skips the check.

  `jaxkv.kv.refresh_shared` makes it for the layers of one step. `write` and
  `attend` take it in place of the view. For the next step, update the original
  `View` and call `refresh_shared` again.

  Attributes:
    view: the view. Its `shared` has only rows that still share pages.
  """

  view: View


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedView:
  """Tokens of many sequences in one row, for steps that decode and prefill.

  A call has a single row of B + C columns. Column b < B is the new token of row
  b of `decode`. The other C columns are the new tokens of `prefill`: the
  `num_tokens[0]` tokens of its row 0, those of row 1 and so on, then padding.
  So the cost of a step grows with its number of tokens, not with the length of
  its longest row. Tokens of `decode` use the decode kernel, which costs less
  than a chunk of one token.

  A sequence can have tokens in both parts. Either part can have the earlier
  tokens, because `write` stores all tokens before `attend` reads.

  Attributes:
    decode: B rows of at most one new token each; can have `shared`.
    prefill: rows with at most C tokens in total; None if C is 0.
  """

  decode: View | FreshView
  prefill: View | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
  """The tokens of one call of a model, and their pages.

  A rollout packs the tokens of all sequences into one row, so B is 1 and T is
  C, the number of packed columns. Other loops can use one row for each
  sequence.

  Attributes:
    tokens: the tokens.  # int32[B, T]
    positions: the position of each token in its sequence.  # int32[B, T]
    views: one view for each layer group of the cache; a `PackedView` in a
      rollout.
    columns: the X packed columns that need logits; None for all. For rows that
      are not packed, `jaxkv.models.forward` takes int32[B, X].  # int32[X]
    rows: a `jaxkv.rollout.Rows` that gives the sequence of each packed column;
      None outside of a rollout.
  """

  tokens: jax.Array
  positions: jax.Array
  views: tuple[View | PackedView, ...]
  columns: jax.Array | None = None
  rows: Any = None


def view(state: CacheState, *, group: int = 0, num_tokens: Any) -> View:
  """Returns the view of all slots of a cache, for the layers of one group.

  Call it after `allocate`, and before `commit`.

  Args:
    state: the cache.
    group: the index of the layer group.
    num_tokens: int32[B], the number of new tokens of each slot in this call; 0
      for an idle slot. Lists and other integer dtypes are converted.

  Returns:
    The view. `starts` is the length of each slot.

  Raises:
    TypeError: `state` is not a CacheState, or another argument is not made of
      integers.
    ValueError: `state` is a stack of states, the group does not exist, or a
      number of tokens has a shape or value that is not supported.

  Examples:
    >>> import jaxkv
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=8, page_size=4, num_slots=2, pages_per_slot=4
    ... )
    >>> view(jaxkv.init(config), num_tokens=[3, 0]).starts
    Array([0, 0], dtype=int32)
  """
  check_single(state)
  check_group(state.config, group)
  num_tokens = as_int32(
    "num_tokens", num_tokens, state.length.shape, ", one for each slot"
  )
  return View(
    page_table=state.page_table[:, group],
    starts=jnp.asarray(state.length),
    num_tokens=jnp.asarray(num_tokens),
    kind=state.config.groups[group],
  )


AnyView = View | FreshView | PackedView


def rows_of(view: View | FreshView) -> View:
  """Returns a `View` unchanged, or the `View` in a `FreshView`."""
  return view.view if isinstance(view, FreshView) else view


def view_in_memory(kv: Any, view: AnyView) -> Any:
  """Replaces the page numbers of a view by rows of a memory of any kind."""
  if kv.first_page == 0:
    return view
  if isinstance(view, FreshView):
    return FreshView(view=view_in_memory(kv, view.view))
  if isinstance(view, PackedView):
    prefill = view.prefill
    return PackedView(
      decode=view_in_memory(kv, view.decode),
      prefill=None if prefill is None else view_in_memory(kv, prefill),
    )
  return dataclasses.replace(view, page_table=in_memory(kv, view.page_table))


def decode_lengths(view: View) -> jax.Array:
  """Returns int32[B], lengths including the new token; 0 for idle rows."""
  return jnp.where(view.num_tokens > 0, view.starts + 1, 0)


def positions(view: View, columns: int) -> jax.Array:
  """Returns int32[B, T], the position of each token, -1 for padding."""
  # No token has position -1, so callers can tell padding from tokens.
  column = jnp.arange(columns, dtype=jnp.int32)[None]
  is_token = column < view.num_tokens[:, None]
  return jnp.where(is_token, view.starts[:, None] + column, -1)


def packed_positions(view: View, columns: int) -> tuple[jax.Array, jax.Array]:
  """Computes the row and the position of each of C packed columns.

  Returns:
    int32[C] rows, out of range for padding; int32[C] positions, -1 for padding.
  """
  # A column is in row r if r rows end at or before the column.
  ends = jnp.cumsum(view.num_tokens, dtype=jnp.int32)
  column = jnp.arange(columns, dtype=jnp.int32)
  row = jnp.sum(column[:, None] >= ends[None], axis=1, dtype=jnp.int32)
  # `ends - num_tokens` is the column in which a row begins.
  offsets = (view.starts - (ends - view.num_tokens)).at[row].get(mode="clip")
  return row, jnp.where(column < ends[-1], offsets + column, -1)


def check_view(view: View) -> None:
  """Raises unless `view` is a View whose fields agree in shape."""
  hint = "make one with jaxkv.view"
  arguments.check_type("view", view, View, "a View", hint)
  arguments.check_int32("view.page_table", view.page_table, ("B", "M"))
  shape = view.page_table.shape
  arguments.check_int32("view.starts", view.starts, (shape[0],))
  arguments.check_int32("view.num_tokens", view.num_tokens, (shape[0],))
  # `own_table` has the shape of the table with which `share` was called.
  if view.shared is not None and view.shared.own_table.shape != shape:
    raise ValueError(
      f"`view.shared` must be for a page_table of shape {shape}, got one for"
      f" {view.shared.own_table.shape}; call share again."
    )


def check_rows(view: AnyView, name: str, array: jax.Array) -> None:
  """Raises unless an array fits a view's rows, or a PackedView's columns."""
  arguments.check_array(name, array)
  if isinstance(view, PackedView):
    _check_columns(view, name, array)
    return
  rows = rows_of(view)
  check_view(rows)
  batch = rows.page_table.shape[0]
  if array.shape[:1] != (batch,):
    expected = f"[{batch}, ...], with the rows of view.page_table"
    arguments.refuse(ValueError, name, expected, array)


def _check_columns(view: PackedView, name: str, array: jax.Array) -> None:
  decode = rows_of(view.decode)
  check_view(decode)
  batch = decode.page_table.shape[0]
  if view.prefill is None:
    fits = array.shape[:2] == (1, batch)
    columns = f"{batch}"
  else:
    check_view(view.prefill)
    # At least one column of `prefill` must follow the columns of `decode`.
    fits = array.ndim > 1 and array.shape[0] == 1 and array.shape[1] > batch
    columns = f"more than {batch}"
  if not fits:
    expected = f"[1, {columns}, ...], with a column for each row of view.decode"
    arguments.refuse(ValueError, name, expected, array)
