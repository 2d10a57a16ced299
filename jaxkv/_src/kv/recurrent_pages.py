"""Memory of recurrent layers: one state for each page of tokens.

The state after t tokens is in the page of the token at position t - 1, where it
replaces the state after fewer tokens; see `jaxkv._src.cache.pool.recurrent`. A
step reads the state before its new tokens and writes the state after them. With
a `jaxkv.StateRetention`, a state that is not at the end of a page moves on with
its sequence, so both can be in the page of the last new token.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels
from jaxkv._src.arrays import arguments
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.kv import storage_dtypes
from jaxkv._src.kv.kv_pages import check_config
from jaxkv._src.kv.kv_pages import check_group
from jaxkv._src.kv.kv_pages import check_layer
from jaxkv._src.kv.kv_pages import first_page_of
from jaxkv._src.kv.kv_pages import num_rows
from jaxkv._src.kv.kv_pages import page_index
from jaxkv._src.kv.view import FreshView
from jaxkv._src.kv.view import View
from jaxkv._src.kv.view import check_view
from jaxkv._src.kv.view import rows_of

_FORMATS = ("float32", "bfloat16", "float16")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StatePages:
  """States of all recurrent layers, one in each page.

  The first axis is that of `KVPages`.

  Attributes:
    states: arrays by name, in their storage dtypes.  # [L * N, ...]
    num_layers: L.
    first_page: see `KVPages`.
    has_moving_states: True for a cache with a `jaxkv.StateRetention`.
    page_size: S, the tokens of a page.
    dtypes: the number format of each array, by name; on a CPU bfloat16 is
      stored as its bits in uint16.
  """

  states: dict[str, jax.Array]
  num_layers: int = dataclasses.field(metadata={"static": True})
  page_size: int = dataclasses.field(metadata={"static": True})
  dtypes: tuple[tuple[str, str], ...] = dataclasses.field(
    metadata={"static": True}
  )
  first_page: int = dataclasses.field(default=0, metadata={"static": True})
  has_moving_states: bool = dataclasses.field(
    default=False, metadata={"static": True}
  )

  @property
  def num_pages(self) -> int:
    """N, the pages of one layer."""
    return next(iter(self.states.values())).shape[0] // self.num_layers


def init_states(
  config: CacheConfig,
  *,
  num_layers: int,
  shapes: Mapping[str, tuple[tuple[int, ...], Any]],
  group: int | None = None,
) -> StatePages:
  """Makes states of zeros for the recurrent groups of a cache.

  Allocates L * N states. Give the group a pool of its own, see
  `jaxkv.GroupKind`. In a pool that it shares with attention groups, their pages
  have states too, which are unused.

  Args:
    config: the configuration of the cache. It gives N, the pages of the group's
      pool including the null page, and S, the tokens of a page.
    num_layers: L. L * N must fit int32.
    shapes: maps the name of each array to the shape and the dtype of one state
      in one layer. The dtype is float32, bfloat16 or float16.
    group: the recurrent group that gives the pool and the page size; None for
      the first one.

  Examples:
    >>> import jaxkv
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=(9, 5), page_size=4, num_slots=2, pages_per_slot=4,
    ...   groups=(jaxkv.FullAttention(), jaxkv.Recurrent(pool=1))
    ... )
    >>> shapes = {"conv": ((12, 3), "float32"), "delta": ((2, 8, 8), "float32")}
    >>> pages = init_states(config, num_layers=3, shapes=shapes)
    >>> pages.states["delta"].shape, pages.num_pages
    ((15, 2, 8, 8), 5)
  """
  check_config(config)
  group = _group_of(config, group)
  rows = num_rows(config, group, num_layers=num_layers)
  if not shapes:
    arguments.refuse(ValueError, "shapes", "one array or more", shapes)
  states = {}
  dtypes = []
  # Sorted, because `dtypes` is part of the pytree's structure, which must not
  # depend on the order of a caller's dict.
  for name, (shape, dtype) in sorted(shapes.items()):
    for axis_size in shape:
      arguments.as_count(f"shapes[{name!r}]", axis_size, 1)
    dtype = storage_dtypes.as_dtype(f"shapes[{name!r}][1]", dtype, _FORMATS)
    states[name] = jnp.zeros((rows, *shape), storage_dtypes.resolve(dtype))
    dtypes.append((name, dtype.name))
  return StatePages(
    states=states,
    num_layers=int(num_layers),
    page_size=config.page_sizes[group],
    dtypes=tuple(dtypes),
    first_page=first_page_of(config, group),
    has_moving_states=config.state_retention is not None,
  )


def read_state(
  pages: StatePages, view: View | FreshView, layer: jax.Array | int
) -> dict[str, jax.Array]:
  """Reads each row's state after its first `view.starts` tokens, in one layer.

  In a loop, compute the new state from the state that was read. Otherwise XLA
  cannot order the read before the write, and copies all states. For a
  `PackedView`, read and write the rows of `decode`, then those of `prefill`. A
  sequence must not have tokens in both.

  Args:
    pages: the states.
    view: a view of a recurrent group.
    layer: int32[], 0..L-1.

  Returns:
    Arrays [B, ...] by name, in the formats of `pages.dtypes`. Zeros for rows
    whose `starts` is 0 or whose page is missing.
  """
  rows = _rows(view)
  check_layer(pages, layer)
  return _read(pages, rows, jnp.asarray(layer, jnp.int32))


@functools.partial(jax.jit, inline=True)
def _read(
  pages: StatePages, rows: View, layer: jax.Array
) -> dict[str, jax.Array]:
  index = _state_rows(pages, rows, rows.starts, layer)
  if pages.has_moving_states:
    moved = _state_rows(pages, rows, rows.starts + rows.num_tokens, layer)
    is_missing = index == pages.num_layers * pages.num_pages
    has_moved = is_missing & (rows.starts > 0) & (rows.num_tokens > 0)
    index = jnp.where(has_moved, moved, index)
  # A CPU stores bfloat16 as bits. `load` converts only the B gathered states.
  return {
    name: kernels.load(array.at[index].get(mode="fill", fill_value=0))
    for name, array in pages.states.items()
  }


def write_state(
  pages: StatePages,
  view: View | FreshView,
  layer: jax.Array | int,
  states: Mapping[str, jax.Array],
) -> StatePages:
  """Writes each row's state after `starts + num_tokens` tokens, in one layer.

  Stores the state in the page of the row's last token. Skips a row whose
  `num_tokens` is 0 or whose page is missing.

  Other sequences may reuse a full page, so a full page must hold the state
  after its last token. If the new tokens begin inside a page and go past its
  end, call this function twice. In the first call, pass the state at the end of
  that page and a view whose `num_tokens` ends there. Tokens that begin at the
  start of a page can span several pages in one call if a single `allocate` made
  room for them. That `allocate` gives the sequence only the last of these
  pages, so there is no other state to write. With a `jaxkv.StateRetention`, the
  same holds for tokens that begin inside a page.

  Args:
    pages: the states.
    view: a view of a recurrent group.
    layer: int32[], 0..L-1.
    states: float[B, ...] for each name in `pages.states`, rounded to the
      formats of `pages.dtypes`.

  Returns:
    The states.

  Examples:
    >>> import jax.numpy as jnp
    >>> import jaxkv
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=5, page_size=4, num_slots=1, pages_per_slot=2,
    ...   groups=(jaxkv.Recurrent(),)
    ... )
    >>> pages = init_states(
    ...   config, num_layers=1, shapes={"sum": ((2,), "float32")}
    ... )
    >>> cache, _ = jaxkv.allocate(jaxkv.init(config), [3])
    >>> view = jaxkv.view(cache, num_tokens=[3])
    >>> state = read_state(pages, view, 0)["sum"]
    >>> pages = write_state(pages, view, 0, {"sum": state + 5})
    >>> cache, _ = jaxkv.commit(cache, [[7, 8, 9]], [3])
    >>> read_state(pages, jaxkv.view(cache, num_tokens=[1]), 0)["sum"].tolist()
    [[5.0, 5.0]]
  """
  rows = _rows(view)
  check_layer(pages, layer)
  _check_states(pages, rows, states)
  return _write(pages, rows, jnp.asarray(layer, jnp.int32), dict(states))


@functools.partial(jax.jit, inline=True)
def _write(
  pages: StatePages, rows: View, layer: jax.Array, states: dict[str, jax.Array]
) -> StatePages:
  # A row without new tokens counts as 0 tokens. `_state_rows` then returns an
  # index out of range, so nothing is written.
  tokens = jnp.where(rows.num_tokens > 0, rows.starts + rows.num_tokens, 0)
  index = _state_rows(pages, rows, tokens, layer)
  arrays = {
    name: array.at[index].set(
      kernels.store(states[name], array.dtype), mode="drop"
    )
    for name, array in pages.states.items()
  }
  return dataclasses.replace(pages, states=arrays)


def _state_rows(
  pages: StatePages, rows: View, tokens: jax.Array, layer: jax.Array
) -> jax.Array:
  """Returns int32[B]: the index of row b's state after `tokens[b]` tokens.

  The index is L * N for a state without a page.
  """
  columns = rows.page_table.shape[1]
  # After 0 tokens there is no state, so the column is past the table, where
  # reads give page 0.
  column = jnp.where(tokens > 0, (tokens - 1) // pages.page_size, columns)
  row = jnp.arange(tokens.shape[0], dtype=jnp.int32)
  ids = rows.page_table.at[row, column].get(mode="fill", fill_value=0)
  return page_index(pages, ids, layer)


def _group_of(config: CacheConfig, group: int | None) -> int:
  """Returns `group` if it is recurrent; for None the first recurrent group."""
  recurrent = [group_kind.holds_states for group_kind in config.groups]
  if True not in recurrent:
    raise ValueError(
      "`config` must have a recurrent group, got groups of"
      f" {config.groups}; add jaxkv.Recurrent()."
    )
  if group is None:
    return recurrent.index(True)
  check_group(config, group)
  if not recurrent[group]:
    arguments.refuse(ValueError, "group", "a recurrent one", group)
  return group


def _rows(view: View | FreshView) -> View:
  """Returns the checked rows of a view; raises for a `PackedView`."""
  hint = "pass the `decode` of a PackedView, and then its `prefill`"
  arguments.check_type("view", view, View | FreshView, "a View", hint)
  rows = rows_of(view)
  check_view(rows)
  return rows


def _check_states(
  pages: StatePages, rows: View, states: Mapping[str, jax.Array]
) -> None:
  """Raises unless `states` has a new state for each row and array."""
  names = [name for name, _ in pages.dtypes]
  if sorted(states) != names:
    arguments.refuse(ValueError, "states", f"arrays {names}", sorted(states))
  for name, array in pages.states.items():
    state = states[name]
    label = f"states[{name!r}]"
    arguments.check_array(label, state)
    shape = (rows.starts.shape[0], *array.shape[1:])
    if not jnp.issubdtype(state.dtype, jnp.floating):
      arguments.refuse(TypeError, label, "floats", state.dtype)
    if state.shape != shape:
      arguments.refuse(ValueError, label, f"{list(shape)}", state)
