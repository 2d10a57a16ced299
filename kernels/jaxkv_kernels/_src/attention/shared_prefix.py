"""Finding the rows that begin with the same pages.

This runs once a step, on page tables and lengths alone; `cascade` uses the
result.
"""

import functools
from typing import Any
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels._src import check
from jaxkv_kernels._src.attention import calls
from jaxkv_kernels._src.attention import choose
from jaxkv_kernels._src.attention.options import CallOptions
from jaxkv_kernels._src.attention.query_packing import row_of
from jaxkv_kernels._src.formats import logical_dtype

# Bytes of K and V that sharing must save in one layer's call to pay for the
# second pass and the merge. For a CPU, measured; for others, a copy of 10 us at
# 4 TB/s.
_LEAST_SAVING = {"cpu": 2**20, "other": 40 * 2**20}


class SharedPrefix(NamedTuple):
  """Clusters of rows that begin with the same pages.

  Made by `plan_shared_prefix`. Rows in no cluster share nothing.

  Attributes:
    members: the rows of each cluster; B for no row.
    tokens: how many tokens a cluster shares, in whole pages; 0 where sharing
      does not pay.
    prefix_table: the pages of the cluster's first row.
    own_tokens: tokens of each row after those it shares.
    own_table: the pages of those tokens.
  """

  members: jax.Array  # int32[clusters, size]
  tokens: jax.Array  # int32[clusters]
  prefix_table: jax.Array  # int32[clusters, M]
  own_tokens: jax.Array  # int32[B]
  own_table: jax.Array  # int32[B, M]

  def refreshed(
    self, page_table: jax.Array, lengths: jax.Array, *, page_size: int
  ) -> "SharedPrefix":
    """The clusters, without rows that no longer belong to them.

    A row stays in its cluster if its table still begins with the cluster's
    pages, its last token is behind them, and its table holds all its tokens.
    Any other row is decoded alone, over its whole table.

    Args:
      page_table: int32[B, M], as wide as the one `self` was made from.
      lengths: int32[B].
      page_size: S.

    Returns:
      The clusters, valid for these tables and lengths.
    """
    batch, columns = page_table.shape
    chex.assert_shape(self.own_table, (batch, columns))
    chex.assert_shape(lengths, (batch,))
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
  num_clusters: int,
  cluster_size: int,
  clusters: jax.Array | None = None,
  backend: str = "auto",
) -> SharedPrefix | None:
  """Finds the pages that rows share, and decides where reading them once pays.

  Call it once a step and pass the result to `cascade_decode` in every layer. A
  cluster shares the first pages that all its rows have in common, except pages
  that are not full without the row's last token. Rows of length 0, or of more
  tokens than the table holds, are in no cluster. Rows in no cluster, and those
  past `cluster_size` in one, are decoded alone, which is slower but correct. If
  sharing saves fewer bytes than it costs, no cluster shares anything. If tables
  of this size could never save enough, the result is None: use `paged_decode`.

  Args:
    page_table: int32[B, M], page ids in sequence order.
    lengths: int32[B], tokens of each sequence, the query's own included.
    k_pages: [N, K, S, D]; only shape and dtype are used.
    v_pages: [N, K, S, Dv]; only shape and dtype are used.
    num_clusters: the most clusters. The work over prefixes is that of
      `num_clusters * cluster_size` rows, so keep that near B.
    cluster_size: the most rows of a cluster.
    clusters: int32[B], the cluster of each row, 0 to `num_clusters - 1`, or any
      other number for none. None: rows that begin with the same page are a
      cluster, or several if they are more than `cluster_size`.
    backend: as given to the decode.

  Returns:
    The clusters, or None.

  Raises:
    TypeError: an argument has a type or dtype that is not supported.
    ValueError: an argument has a shape or value that is not supported.
    NotImplementedError: the backend does not exist.

  Examples:
    >>> import jax.numpy as jnp
    >>> pool = jnp.zeros((64, 8, 256, 64))
    >>> table = jnp.asarray([[3, 4, 5], [6, 9, 0], [3, 4, 7]], jnp.int32)
    >>> shared = plan_shared_prefix(
    ...   table,
    ...   jnp.asarray([700, 300, 600], jnp.int32),
    ...   pool,
    ...   pool,
    ...   num_clusters=1,
    ...   cluster_size=2,
    ... )
    >>> shared.members.tolist(), shared.tokens.tolist()
    ([[0, 2]], [512])
    >>> shared.own_tokens.tolist()
    [188, 300, 88]
  """
  check.alike(k_pages, v_pages)
  check.table(page_table, None)
  check.vector("lengths", lengths, page_table.shape[0])
  check.beside("page_table", page_table, lengths=lengths, clusters=clusters)
  if clusters is not None:
    check.vector("clusters", clusters, page_table.shape[0])
  check.count("num_clusters", num_clusters)
  check.count("cluster_size", cluster_size)
  choose.check_name(backend)
  batch, columns = page_table.shape
  page_size, itemsize = k_pages.shape[2], k_pages.dtype.itemsize
  here = "cpu" if choose.platform(k_pages) == "cpu" else "other"
  lockstep = here == "cpu" or _serves(backend, k_pages, v_pages) == "xla"
  token = k_pages.shape[1] * (k_pages.shape[3] + v_pages.shape[3]) * itemsize
  least = -(-_LEAST_SAVING[here] // token)
  if lockstep:
    rows = batch - num_clusters
  else:
    rows = min(batch, num_clusters * cluster_size) - 1
  if rows * columns * page_size < least:
    return None
  return _find(
    page_table,
    lengths,
    clusters,
    num_clusters=num_clusters,
    cluster_size=cluster_size,
    page_size=page_size,
    least=least,
    lockstep=lockstep,
  )


def _serves(backend: str, k_pages: jax.Array, v_pages: jax.Array) -> str:
  """The name of the backend that most likely decodes from these pools."""
  if backend != "auto":
    return backend
  dtype = logical_dtype(k_pages.dtype)
  # The real queries are not known here; this shape fits the pools.
  query: Any = jax.ShapeDtypeStruct(
    (1, k_pages.shape[1], k_pages.shape[3]),
    dtype if dtype.itemsize > 1 else jnp.bfloat16,
  )
  options = CallOptions(page_offset=jnp.int32(0), scale=1.0)
  row = jnp.zeros((1,), jnp.int32)
  call = calls.decode_call(query, (k_pages, v_pages), row[None], row, options)
  chosen = choose.choose_backend("plan_shared_prefix", "auto", call)
  return choose.name_of(chosen)


@functools.partial(
  jax.jit,
  static_argnames=(
    "num_clusters",
    "cluster_size",
    "page_size",
    "least",
    "lockstep",
  ),
  inline=True,
)
def _find(
  page_table: jax.Array,
  lengths: jax.Array,
  clusters: jax.Array | None,
  *,
  num_clusters: int,
  cluster_size: int,
  page_size: int,
  least: int,
  lockstep: bool,
) -> SharedPrefix:
  batch, columns = page_table.shape
  # A row longer than its table attends to fewer tokens than its position says.
  # `own_tokens` could not express both, so such a row is not split.
  alive = (lengths > 0) & (lengths <= columns * page_size)
  if clusters is None:
    clusters = _by_first_page(page_table[:, 0], alive, cluster_size)
  members = _members(clusters, alive, num_clusters, cluster_size)
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
  found = SharedPrefix(
    members=members,
    tokens=jnp.where(pays, tokens, 0),
    prefix_table=prefix_table,
    own_tokens=lengths,
    own_table=page_table,
  )
  return found.refreshed(page_table, lengths, page_size=page_size)


def _by_first_page(first: jax.Array, alive: jax.Array, most: int) -> jax.Array:
  """Clusters of 2 .. `most` rows that have the same first page: int32[B].

  Clusters are numbered in the order of their first pages, then of their rows; B
  for no cluster.
  """
  batch = first.shape[0]
  position = jnp.arange(batch, dtype=jnp.int32)
  order = jnp.lexsort((first, ~alive)).astype(jnp.int32)
  page = first[order]
  begins = jnp.concatenate([jnp.ones((1,), bool), page[1:] != page[:-1]])
  rank = position - lax.cummax(jnp.where(begins, position, 0))
  begins = (begins | (rank % most == 0)) & alive[order]
  run = jnp.cumsum(begins, dtype=jnp.int32) - 1
  run = jnp.where(alive[order], run, batch)
  size = jnp.zeros((batch,), jnp.int32).at[run].add(1, mode="drop")
  number = jnp.cumsum(size > 1, dtype=jnp.int32) - 1
  number = jnp.where(size > 1, number, batch)
  number = number.at[run].get(mode="fill", fill_value=batch)
  return jnp.zeros((batch,), jnp.int32).at[order].set(number)


def _members(
  clusters: jax.Array, alive: jax.Array, num_clusters: int, cluster_size: int
) -> jax.Array:
  """Rows of each cluster, ascending, B for none: int32[clusters, size]."""
  batch = clusters.shape[0]
  fits = (clusters >= 0) & (clusters < num_clusters) & alive
  cluster = jnp.where(fits, clusters, num_clusters)
  order = jnp.argsort(cluster, stable=True).astype(jnp.int32)
  cluster = cluster[order]
  begin = row_of(cluster, cluster - 1)
  rank = jnp.arange(batch, dtype=jnp.int32) - begin
  members = jnp.full((num_clusters, cluster_size), batch, jnp.int32)
  return members.at[cluster, rank].set(order, mode="drop")


def _of_rows(members: jax.Array, values: jax.Array, batch: int) -> jax.Array:
  """Values of clusters for their rows, 0 for rows in no cluster.

  Args:
    members: int32[clusters, size].
    values: int32[clusters, ...].
    batch: B.

  Returns:
    int32[B, ...].
  """
  chex.assert_equal_shape_prefix([members, values], 1)
  rest = values.shape[1:]
  spread = jnp.broadcast_to(values[:, None], (*members.shape, *rest))
  rows = jnp.zeros((batch, *rest), jnp.int32)
  return rows.at[members].set(spread, mode="drop")


def _saved(
  lengths: jax.Array, tokens: jax.Array, shared: jax.Array, lockstep: bool
) -> jax.Array:
  """Tokens of K and V that need not be read: float32[], as int32 may overflow.

  A backend that works in lockstep reads, for every row, as many blocks as the
  longest row needs.

  Args:
    lengths: int32[B].
    tokens: int32[clusters].
    shared: int32[B].
    lockstep: whether the backend works in lockstep.
  """
  lengths, tokens, shared = (
    x.astype(jnp.float32) for x in (lengths, tokens, shared)
  )
  if not lockstep:
    return jnp.sum(shared) - jnp.sum(tokens)
  alone = lengths.shape[0] * (jnp.max(lengths) - jnp.max(lengths - shared))
  return alone - tokens.shape[0] * jnp.max(tokens)
