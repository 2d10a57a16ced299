"""The part of the cache state that one call to the K/V memory needs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels
from jaxkv._src.arrays import arguments
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.arrays.arguments import check_shape
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import check_single
from jaxkv._src.kv.memory import check_group


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
  """Where B sequences live, and which of their tokens are new in this call.

  A call has T columns in each row. The first `counts` of them are tokens at
  positions `starts`, `starts + 1` ...; the others are padding. Make one with
  `jaxkv.view`.

  For the next step, replace `starts` and `counts`, and keep `shared` and
  `plan`. `attend` checks which rows still begin with the pages in `shared` and
  reads the others alone; `refresh_shared` does that once for all layers. With
  an old plan the work is less balanced; results are still right.

  Attributes:
    page_table: page ids of each row's sequence, in order, of one layer group; 0
      (null page) or an id out of range where there is no page.
    starts: position of the first new token.
    counts: how many columns are tokens; 0 for an idle row.
    shared: pages that rows have in common, from `share`; or None.
    plan: pieces into which a decode is cut, from `plan_decode`; or None.
  """

  page_table: jax.Array  # int32[B, M]
  starts: jax.Array  # int32[B]
  counts: jax.Array  # int32[B]
  shared: kernels.SharedPrefix | None = None
  plan: kernels.DecodePlan | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FreshView:
  """A view whose `shared` has been checked; `attend` does not check it again.

  Made by `refresh_shared`; `write` and `attend` take it in place of the view.
  It serves the layers of one step. For the next step, change `view` and refresh
  it again.

  Attributes:
    view: the view, with `shared` refreshed.
  """

  view: View


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedView:
  """Tokens of many sequences in one row, for steps that decode and prefill.

  A call has a single row of B + C columns. Column b < B is the new token of row
  b of `decode`. Columns from B on are the new tokens of `prefill`, one row
  after another: `prefill.counts[p]` for row p, then padding. So a step costs
  what its tokens cost, not rows times the longest one. Single tokens are read
  as in a decode step, which costs less than as a chunk of one token.

  A sequence may have tokens in both parts, in any order: all are written before
  any is attended to.

  Attributes:
    decode: B rows with at most one new token each; with `shared` or a `plan`,
      as in a decode step.
    prefill: P rows; None if C is 0.
  """

  decode: View | FreshView
  prefill: View | None = None


def view(
  state: CacheState,
  *,
  group: int = 0,
  counts: Any,
  num_encoder_tokens: Any = None,
) -> View:
  """The view of all slots of a cache, for the layers of one group.

  Call it after `allocate`, and before `commit`.

  Args:
    state: the cache.
    group: the layer group, 0..G-1.
    counts: int32[B], the new tokens of each slot in this call; 0 for an idle
      slot. Any integer array or list is cast.
    num_encoder_tokens: int32[B], tokens of each slot's encoder, as `admit` and
      `allocate` were told; for groups of `CrossAttention` alone.

  Returns:
    The view; `starts` is the length of each slot, or `num_encoder_tokens`: of
    the latter, `attend(causal=False)` sees all.

  Raises:
    TypeError: `state` is not a CacheState, or `counts` does not hold integers.
    ValueError: `state` is a stack of states, there is no such group, `counts`
      or `num_encoder_tokens` has a shape or value that is not supported, or the
      latter is missing, or given for a group of the sequences' own tokens.

  Examples:
    >>> import jaxkv
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=8, page_size=4, num_slots=2, pages_per_slot=4
    ... )
    >>> view(jaxkv.init(config), counts=[3, 0]).starts
    Array([0, 0], dtype=int32)
  """
  check_single(state)
  check_group(state.config, group)
  counts = as_int32("counts", counts)
  check_shape("counts", counts, state.length.shape, ", one for each slot")
  kind, starts = state.config.groups[group], state.length
  if kind.holds_encoder != (num_encoder_tokens is not None):
    wanted = "given" if kind.holds_encoder else "None"
    raise ValueError(
      f"`num_encoder_tokens` must be {wanted} for group {group}, {kind}."
    )
  if kind.holds_encoder:
    name = "num_encoder_tokens"
    starts = jnp.asarray(as_int32(name, num_encoder_tokens))
    check_shape(name, starts, state.length.shape, ", one for each slot")
  return View(
    page_table=state.page_table[:, group],
    starts=starts,
    counts=jnp.asarray(counts),
  )


AnyView = View | FreshView | PackedView


def rows_of(view: View | FreshView) -> View:
  """The view, fresh or not."""
  return view.view if isinstance(view, FreshView) else view


def decode_lengths(view: View) -> jax.Array:
  """Tokens of each row, the new one included; 0 for idle rows: int32[B]."""
  return jnp.where(view.counts > 0, view.starts + 1, 0)


def positions(view: View, columns: int) -> jax.Array:
  """Position of each column's token, -1 for padding: int32[B, T]."""
  column = jnp.arange(columns, dtype=jnp.int32)[None]
  real = column < view.counts[:, None]
  return jnp.where(real, view.starts[:, None] + column, -1)


def packed_positions(view: View, columns: int) -> tuple[jax.Array, jax.Array]:
  """Row and position of tokens that stand one row after another.

  Returns:
    int32[C] rows, P for padding; int32[C] positions, -1 for padding.
  """
  ends = jnp.cumsum(view.counts, dtype=jnp.int32)
  column = jnp.arange(columns, dtype=jnp.int32)
  row = jnp.sum(column[:, None] >= ends[None], axis=1, dtype=jnp.int32)
  first = (view.starts - (ends - view.counts)).at[row].get(mode="clip")
  return row, jnp.where(column < ends[-1], first + column, -1)


def check_view(view: View) -> None:
  """Raises unless `view` is a View whose fields agree in shape."""
  if not isinstance(view, View):
    raise TypeError(
      f"`view` must be a View, got {type(view).__name__}; make one with"
      " jaxkv.view."
    )
  arguments.check_int32("view.page_table", view.page_table, ("B", "M"))
  shape = view.page_table.shape
  arguments.check_int32("view.starts", view.starts, (shape[0],))
  arguments.check_int32("view.counts", view.counts, (shape[0],))
  if view.shared is not None and view.shared.own_table.shape != shape:
    raise ValueError(
      f"`view.shared` must be for a page_table of shape {shape}, got one for"
      f" {view.shared.own_table.shape}; call share again."
    )


def check_rows(view: AnyView, name: str, array: jax.Array) -> None:
  """Raises unless an array has the rows, or the columns, of a view."""
  arguments.check_array(name, array)
  if isinstance(view, PackedView):
    _check_columns(view, name, array)
    return
  rows = rows_of(view)
  check_view(rows)
  batch = rows.page_table.shape[0]
  if array.shape[:1] != (batch,):
    wanted = f"[{batch}, ...], with the rows of view.page_table"
    arguments.refuse(ValueError, name, wanted, array)


def _check_columns(view: PackedView, name: str, array: jax.Array) -> None:
  decode = rows_of(view.decode)
  check_view(decode)
  single = decode.page_table.shape[0]
  if view.prefill is None:
    fits, columns = array.shape[:2] == (1, single), f"{single}"
  else:
    check_view(view.prefill)
    fits = array.ndim > 1 and array.shape[0] == 1 and array.shape[1] > single
    columns = f"more than {single}"
  if not fits:
    wanted = f"[1, {columns}, ...], with a column for each row of view.decode"
    arguments.refuse(ValueError, name, wanted, array)
