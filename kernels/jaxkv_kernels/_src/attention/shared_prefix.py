"""Decoding many sequences that begin with the same pages: who shares what.

Found once a step, from page tables and lengths alone; `prefix_decode` is told.
"""

import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv_kernels._src import check
from jaxkv_kernels._src.attention import choose
from jaxkv_kernels._src.attention.options import CallOptions
from jaxkv_kernels._src.attention.query_packing import row_of
from jaxkv_kernels._src.formats import logical_dtype

# What sharing must save, in bytes read of K and V in one layer's call, to make
# up for the second pass and the merge: on a CPU measured with
# benchmarks/attention_cpu.py, elsewhere 10 us of a copy at 4 TB/s.
_LEAST_SAVING = {"cpu": 2**20, "other": 40 * 2**20}


class SharedPrefix(NamedTuple):
  """Which rows begin with the same pages; made by `plan_shared_prefix`.

  Attributes:
    members: rows of each group; B where there is none. int32[G, N]
    tokens: how many tokens the group shares, in whole pages; 0 where sharing
      does not pay. int32[G]
    prefix_table: the pages of the group's first row. int32[G, M]
    own_tokens: tokens of each row behind what it shares. int32[B]
    own_table: their pages. int32[B, M]
  """

  members: jax.Array
  tokens: jax.Array
  prefix_table: jax.Array
  own_tokens: jax.Array
  own_table: jax.Array

  def fitted(
    self, page_table: jax.Array, lengths: jax.Array, *, page_size: int
  ) -> "SharedPrefix":
    """The plan for rows that may have changed since it was made.

    A row stays in its group where its table still begins with the group's
    pages, its last token is behind them, and its table holds all its tokens.
    Any other row is decoded alone, from the whole of its table.

    Args:
      page_table: int32[B, M], as wide as the one it was made from.
      lengths: int32[B].
      page_size: S.

    Returns:
      The plan, right for these tables and lengths.
    """
    batch, columns = page_table.shape
    shared = _of_rows(self.members, self.tokens, batch)
    begins = _of_rows(self.members, self.prefix_table, batch)
    column = jnp.arange(columns, dtype=jnp.int32)[None]
    pages = (shared // page_size)[:, None]
    fits = jnp.all((page_table == begins) | (column >= pages), axis=1)
    fits &= (lengths > shared) & (lengths <= columns * page_size)
    shared = jnp.where(fits, shared, 0)
    stays = fits.at[self.members].get(mode="fill", fill_value=False)
    own = column + (shared // page_size)[:, None]
    return self._replace(
      members=jnp.where(stays, self.members, batch),
      tokens=jnp.where(jnp.any(stays, axis=1), self.tokens, 0),
      own_tokens=lengths - shared,
      own_table=jnp.take_along_axis(page_table, own, axis=1, mode="clip"),
    )


def plan_shared_prefix(
  page_table: jax.Array,
  lengths: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  *,
  num_groups: int,
  group_size: int,
  groups: jax.Array | None = None,
  backend: str = "auto",
) -> SharedPrefix | None:
  """Finds what rows share, and where it pays to read that once.

  Call it once a step and hand the result to `cascade_decode` in every
  layer. A group shares the pages with which the tables of all its rows begin,
  as far as they are full without the row's last token. Rows of length 0, or of
  more tokens than the table holds, are in no group. Rows in no group, and those
  past `group_size` in one, are decoded alone: that costs time, never a wrong
  result. If fewer bytes would be saved than sharing costs, no group shares
  anything; and if tables of this size could never save enough, there is no
  plan: use `paged_decode`.

  Args:
    page_table: int32[B, M], page ids in sequence order.
    lengths: int32[B], tokens of each sequence, the query's own included.
    k_pages: [P, K, S, D]; looked at for its shape alone.
    v_pages: [P, K, S, Dv]; likewise.
    num_groups: G, the most groups. The work over prefixes is that of G * N
      rows, so keep G * N near B.
    group_size: N, the most rows of a group.
    groups: int32[B], a number 0..G-1 for each row, out of range for none.
      None: rows that begin with the same page are a group; those of one row
      do not count.
    backend: as the decode will be told.

  Returns:
    The plan, or None.

  Raises:
    ValueError: an argument has a shape, dtype or value that is not supported.
    NotImplementedError: there is no such backend.

  Examples:
    >>> import jax.numpy as jnp
    >>> pool = jnp.zeros((64, 8, 256, 64))
    >>> table = jnp.asarray([[3, 4, 5], [6, 9, 0], [3, 4, 7]], jnp.int32)
    >>> shared = plan_shared_prefix(
    ...   table,
    ...   jnp.asarray([700, 300, 600], jnp.int32),
    ...   pool,
    ...   pool,
    ...   num_groups=1,
    ...   group_size=2,
    ... )
    >>> shared.members.tolist(), shared.tokens.tolist()
    ([[0, 2]], [512])
    >>> shared.own_tokens.tolist()
    [188, 300, 88]
  """
  check.alike(k_pages, v_pages)
  check.table(page_table, None)
  check.vector("lengths", lengths, page_table.shape[0])
  check.beside("page_table", page_table, lengths=lengths, groups=groups)
  if groups is not None:
    check.vector("groups", groups, page_table.shape[0])
  check.count("num_groups", num_groups)
  check.count("group_size", group_size)
  choose.check_name(backend)
  batch, columns = page_table.shape
  page_size, itemsize = k_pages.shape[2], k_pages.dtype.itemsize
  here = "cpu" if choose.platform(k_pages) == "cpu" else "other"
  lockstep = here == "cpu" or _serves(backend, k_pages, v_pages) == "xla"
  token = k_pages.shape[1] * (k_pages.shape[3] + v_pages.shape[3]) * itemsize
  least = -(-_LEAST_SAVING[here] // token)
  if lockstep:
    rows = batch - num_groups
  else:
    rows = min(batch, num_groups * group_size) - 1
  if rows * columns * page_size < least:
    return None
  return _plan(
    page_table,
    lengths,
    groups,
    num_groups=num_groups,
    group_size=group_size,
    page_size=page_size,
    least=least,
    lockstep=lockstep,
  )


def _serves(backend: str, k_pages: jax.Array, v_pages: jax.Array) -> str:
  """The name of the backend that will decode from these pools, most likely."""
  if backend != "auto":
    return backend
  dtype = logical_dtype(k_pages.dtype)
  # A query that fits: the real ones are not known here.
  query = jax.ShapeDtypeStruct(
    (1, k_pages.shape[1], k_pages.shape[3]),
    dtype if dtype.itemsize > 1 else jnp.bfloat16,
  )
  options: Any = CallOptions(page_offset=jnp.int32(0), scale=1.0)
  like: Any = query
  chosen = choose.choose_backend(
    "plan_shared_prefix", "auto", like, k_pages, v_pages, options
  )
  return choose.name_of(chosen)


@functools.partial(
  jax.jit,
  static_argnames=(
    "num_groups",
    "group_size",
    "page_size",
    "least",
    "lockstep",
  ),
  inline=True,
)
def _plan(
  page_table: jax.Array,
  lengths: jax.Array,
  groups: jax.Array | None,
  *,
  num_groups: int,
  group_size: int,
  page_size: int,
  least: int,
  lockstep: bool,
) -> SharedPrefix:
  batch, columns = page_table.shape
  # Behind the table's end a row's position and what there is to read differ;
  # in two parts they could not.
  alive = (lengths > 0) & (lengths <= columns * page_size)
  if groups is None:
    groups = _by_first_page(page_table[:, 0], alive)
  members = _members(groups, alive, num_groups, group_size)
  tables = page_table.at[members].get(mode="fill", fill_value=0)
  present = members < batch
  prefix_table = tables[:, 0]
  same = (tables == prefix_table[:, None]) | ~present[:, :, None]
  common = jnp.cumprod(jnp.all(same, axis=1), axis=1, dtype=jnp.int32)
  full = lengths.at[members].get(mode="fill", fill_value=0) - 1
  full = jnp.where(present, full // page_size, columns)
  pages = jnp.minimum(
    jnp.sum(common, axis=1, dtype=jnp.int32), jnp.min(full, axis=1)
  )
  several = jnp.sum(present, axis=1, dtype=jnp.int32) > 1
  tokens = jnp.where(several, pages * page_size, 0)
  shared = _of_rows(members, tokens, batch)
  held = jnp.minimum(lengths, columns * page_size)
  pays = _saved(held, tokens, shared, lockstep) >= float(least)
  plan = SharedPrefix(
    members=members,
    tokens=jnp.where(pays, tokens, 0),
    prefix_table=prefix_table,
    own_tokens=lengths,
    own_table=page_table,
  )
  return plan.fitted(page_table, lengths, page_size=page_size)


def _by_first_page(first: jax.Array, alive: jax.Array) -> jax.Array:
  """Numbers for the rows int32[B] of which another has the same first page."""
  batch = first.shape[0]
  order = jnp.lexsort((first, ~alive)).astype(jnp.int32)
  page = first[order]
  begins = jnp.concatenate([jnp.ones((1,), bool), page[1:] != page[:-1]])
  begins = begins & alive[order]
  run = jnp.cumsum(begins, dtype=jnp.int32) - 1
  run = jnp.where(alive[order], run, batch)
  size = jnp.zeros((batch,), jnp.int32).at[run].add(1, mode="drop")
  number = jnp.cumsum(size > 1, dtype=jnp.int32) - 1
  number = jnp.where(size > 1, number, batch)
  number = number.at[run].get(mode="fill", fill_value=batch)
  return jnp.zeros((batch,), jnp.int32).at[order].set(number)


def _members(
  groups: jax.Array, alive: jax.Array, num_groups: int, group_size: int
) -> jax.Array:
  """Rows of each group, ascending, B for none: int32[G, N]."""
  batch = groups.shape[0]
  fits = (groups >= 0) & (groups < num_groups) & alive
  group = jnp.where(fits, groups, num_groups)
  order = jnp.argsort(group, stable=True).astype(jnp.int32)
  group = group[order]
  begin = row_of(group, group - 1)
  place = jnp.arange(batch, dtype=jnp.int32) - begin
  members = jnp.full((num_groups, group_size), batch, jnp.int32)
  return members.at[group, place].set(order, mode="drop")


def _of_rows(members: jax.Array, values: jax.Array, batch: int) -> jax.Array:
  """Each row's group's values int32[G, ...], 0 for rows in none: [B, ...]."""
  rest = values.shape[1:]
  spread = jnp.broadcast_to(values[:, None], (*members.shape, *rest))
  rows = jnp.zeros((batch, *rest), jnp.int32)
  return rows.at[members].set(spread, mode="drop")


def _saved(
  lengths: jax.Array, tokens: jax.Array, shared: jax.Array, lockstep: bool
) -> jax.Array:
  """Tokens of K and V that need not be read, float32[], as it may be many.

  In lockstep all rows read as many blocks as the longest needs.
  """
  lengths, tokens, shared = (
    x.astype(jnp.float32) for x in (lengths, tokens, shared)
  )
  if not lockstep:
    return jnp.sum(shared) - jnp.sum(tokens)
  alone = lengths.shape[0] * (jnp.max(lengths) - jnp.max(lengths - shared))
  return alone - tokens.shape[0] * jnp.max(tokens)
