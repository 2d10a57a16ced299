"""Finds the rows that begin with the same pages.

`plan_shared_prefix` runs once a step; `cascade` uses its result in each layer.
The docstring of the package `attention` defines the letters.
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
from jaxkv_kernels._src.quantization import logical_dtype

# Bytes of K and V that sharing must save in one layer's call to pay for the
# second pass and the merge. For a CPU this number was measured. For other
# platforms it is the number of bytes that a GPU copies in 10 us at 4 TB/s.
_LEAST_SAVING = {"cpu": 2**20, "other": 40 * 2**20}


class SharedPrefix(NamedTuple):
  """Clusters of rows that begin with the same pages.

  Made by `plan_shared_prefix`. Rows in no cluster share nothing.

  Attributes:
    members: the rows of each cluster; B for an entry without a row.
    tokens: the number of tokens that the rows of each cluster share, in whole
      pages; 0 if sharing does not pay.
    prefix_table: the page ids of each cluster's first row, shared pages first.
    own_tokens: the number of remaining tokens of each row, after shared ones.
    own_table: the page ids of the remaining tokens.
  """

  members: jax.Array  # int32[clusters, size]
  tokens: jax.Array  # int32[clusters]
  prefix_table: jax.Array  # int32[clusters, M]
  own_tokens: jax.Array  # int32[B]
  own_table: jax.Array  # int32[B, M]

  def refreshed(
    self, page_table: jax.Array, lengths: jax.Array, *, page_size: int
  ) -> "SharedPrefix":
    """Adapts the clusters to a new page table and new lengths.

    A row stays in its cluster if its table still begins with the cluster's
    pages, its last token is not in these pages, and its table has room for all
    its tokens. Other rows are decoded separately, over their whole tables.

    Args:
      page_table: int32[B, M], with the M of the call of `plan_shared_prefix`.
      lengths: int32[B], tokens of each row, including the query's token.
      page_size: S, tokens of a page.
    """
    batch, columns = page_table.shape
    chex.assert_shape(self.own_table, (batch, columns))
    chex.assert_shape(lengths, (batch,))
    shared = _to_rows(self.members, self.tokens, batch)
    prefix_table = _to_rows(self.members, self.prefix_table, batch)
    column = jnp.arange(columns, dtype=jnp.int32)[None]
    pages = (shared // page_size)[:, None]
    belongs = jnp.all((page_table == prefix_table) | (column >= pages), axis=1)
    belongs &= (lengths > shared) & (lengths <= columns * page_size)
    shared = jnp.where(belongs, shared, 0)
    stays = belongs.at[self.members].get(mode="fill", fill_value=False)
    # A row's remaining pages begin after its shared pages.
    suffix = column + (shared // page_size)[:, None]
    return self._replace(
      members=jnp.where(stays, self.members, batch),
      tokens=jnp.where(jnp.any(stays, axis=1), self.tokens, 0),
      own_tokens=lengths - shared,
      own_table=jnp.take_along_axis(page_table, suffix, axis=1, mode="clip"),
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
  """Finds the pages that rows share, and decides if reading them once pays.

  Call it once a step and pass the result to `cascade_decode` in every layer. A
  cluster is a set of rows whose tables begin with the same pages. The rows
  share these pages up to, but not including, the page of the last token of the
  shortest row. Rows of length 0, and rows with more tokens than the table has
  room for, are in no cluster. A cluster keeps only its first `cluster_size`
  rows. Rows in no cluster are decoded separately, which is slower but correct.
  If sharing would save too few bytes to pay for its cost, no cluster shares
  anything. If tables of this size can never save enough, the result is None:
  use `paged_decode`.

  Args:
    page_table: int32[B, M], each sequence's page ids in the order of tokens.
    lengths: int32[B], tokens of each sequence, including the query's token.
    k_pages: [N, K, S, D]; its elements are not read.
    v_pages: [N, K, S, Dv]; its elements are not read.
    num_clusters: the maximum number of clusters. The work over prefixes grows
      with `num_clusters * cluster_size`, so keep that product near B.
    cluster_size: the maximum number of rows of a cluster.
    clusters: int32[B], the cluster of each row, 0 to `num_clusters - 1`; any
      other number means no cluster. None: rows that begin with the same page
      form clusters of at most `cluster_size` rows.
    backend: the backend that you pass to `cascade_decode`.

  Returns:
    The clusters, or None.

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
  check.pool_pair(k_pages, v_pages)
  check.table(page_table, None)
  check.vector("lengths", lengths, page_table.shape[0])
  check.same_devices(
    "page_table", page_table, lengths=lengths, clusters=clusters
  )
  if clusters is not None:
    check.vector("clusters", clusters, page_table.shape[0])
  check.count("num_clusters", num_clusters)
  check.count("cluster_size", cluster_size)
  choose.check_name(backend)
  batch, columns = page_table.shape
  platform = "cpu" if choose.platform(k_pages) == "cpu" else "other"
  # `xla` works in lockstep: it reads as many blocks for each row as the longest
  # row needs.
  name = (
    "xla" if platform == "cpu" else _backend_name(backend, k_pages, v_pages)
  )
  lockstep = name == "xla"
  token = (
    k_pages.shape[1]
    * (k_pages.shape[3] + v_pages.shape[3])
    * k_pages.dtype.itemsize
  )
  min_saving = -(-_LEAST_SAVING[platform] // token)
  # The maximum number of rows whose reads sharing can save.
  if lockstep:
    rows = batch - num_clusters
  else:
    rows = min(batch, num_clusters * cluster_size) - 1
  if rows * columns * k_pages.shape[2] < min_saving:
    return None
  return _find(
    page_table,
    lengths,
    clusters,
    num_clusters=num_clusters,
    cluster_size=cluster_size,
    page_size=k_pages.shape[2],
    min_saving=min_saving,
    lockstep=lockstep,
  )


def _backend_name(backend: str, k_pages: jax.Array, v_pages: jax.Array) -> str:
  """Returns the name of the backend that most likely decodes these pools."""
  if backend != "auto":
    return backend
  dtype = logical_dtype(k_pages.dtype)
  # The caller has no queries yet. This query has a shape that fits the pools.
  query: Any = jax.ShapeDtypeStruct(
    (1, k_pages.shape[1], k_pages.shape[3]),
    dtype if dtype.itemsize > 1 else jnp.bfloat16,
  )
  options = CallOptions(page_offset=jnp.int32(0), scale=1.0)
  row = jnp.zeros((1,), jnp.int32)
  call = calls.decode_call(query, (k_pages, v_pages), row[None], row, options)
  module = choose.choose_backend("plan_shared_prefix", "auto", call)
  return choose.name_of(module)


@functools.partial(
  jax.jit,
  static_argnames=(
    "num_clusters",
    "cluster_size",
    "page_size",
    "min_saving",
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
  min_saving: int,
  lockstep: bool,
) -> SharedPrefix:
  batch, columns = page_table.shape
  # A row that is longer than its table attends to fewer tokens than its length.
  # `own_tokens` cannot represent both numbers, so the row is not split.
  is_active = (lengths > 0) & (lengths <= columns * page_size)
  if clusters is None:
    clusters = _cluster_by_first_page(page_table[:, 0], is_active, cluster_size)
  members = _members(clusters, is_active, num_clusters, cluster_size)
  tables = page_table.at[members].get(mode="fill", fill_value=0)
  is_member = members < batch
  prefix_table = tables[:, 0]
  matches = (tables == prefix_table[:, None]) | ~is_member[:, :, None]
  # The product is 1 for the pages before the first in which rows differ.
  common = jnp.cumprod(jnp.all(matches, axis=1), axis=1, dtype=jnp.int32)
  # The page of a row's last token is not shared, so no row's suffix is empty.
  full_pages = lengths.at[members].get(mode="fill", fill_value=0) - 1
  full_pages = jnp.where(is_member, full_pages // page_size, columns)
  pages = jnp.minimum(
    jnp.sum(common, axis=1, dtype=jnp.int32), jnp.min(full_pages, axis=1)
  )
  has_several = jnp.sum(is_member, axis=1, dtype=jnp.int32) > 1
  tokens = jnp.where(has_several, pages * page_size, 0)
  shared = _to_rows(members, tokens, batch)
  table_lengths = jnp.minimum(lengths, columns * page_size)
  pays = _saved(table_lengths, tokens, shared, lockstep) >= float(min_saving)
  prefix = SharedPrefix(
    members=members,
    tokens=jnp.where(pays, tokens, 0),
    prefix_table=prefix_table,
    own_tokens=lengths,
    own_table=page_table,
  )
  return prefix.refreshed(page_table, lengths, page_size=page_size)


def _cluster_by_first_page(
  first_page: jax.Array, is_active: jax.Array, max_rows: int
) -> jax.Array:
  """Returns int32[B], the cluster of each row, or B for a row in no cluster.

  A cluster has 2 to `max_rows` rows, which have the same first page. Clusters
  are in the order of their first pages, then of their rows.
  """
  batch = first_page.shape[0]
  position = jnp.arange(batch, dtype=jnp.int32)
  # Sorting makes runs of active rows with the same page; other rows come last.
  order = jnp.lexsort((first_page, ~is_active)).astype(jnp.int32)
  page = first_page[order]
  begins_run = jnp.concatenate([jnp.ones((1,), bool), page[1:] != page[:-1]])
  # `rank` is the position in a run. Every `max_rows`-th row begins a new run.
  rank = position - lax.cummax(jnp.where(begins_run, position, 0))
  begins_run = (begins_run | (rank % max_rows == 0)) & is_active[order]
  run = jnp.cumsum(begins_run, dtype=jnp.int32) - 1
  run = jnp.where(is_active[order], run, batch)
  run_length = jnp.zeros((batch,), jnp.int32).at[run].add(1, mode="drop")
  # A row without a partner shares nothing, so only longer runs are clusters.
  cluster = jnp.cumsum(run_length > 1, dtype=jnp.int32) - 1
  cluster = jnp.where(run_length > 1, cluster, batch)
  cluster = cluster.at[run].get(mode="fill", fill_value=batch)
  return jnp.zeros((batch,), jnp.int32).at[order].set(cluster)


def _members(
  clusters: jax.Array,
  is_active: jax.Array,
  num_clusters: int,
  cluster_size: int,
) -> jax.Array:
  """Returns int32[clusters, size], each cluster's rows, padded with B."""
  batch = clusters.shape[0]
  fits = (clusters >= 0) & (clusters < num_clusters) & is_active
  cluster = jnp.where(fits, clusters, num_clusters)
  order = jnp.argsort(cluster, stable=True).astype(jnp.int32)
  cluster = cluster[order]
  # The position in `order` of the first row of each row's cluster.
  first_position = row_of(cluster, cluster - 1)
  rank = jnp.arange(batch, dtype=jnp.int32) - first_position
  members = jnp.full((num_clusters, cluster_size), batch, jnp.int32)
  return members.at[cluster, rank].set(order, mode="drop")


def _to_rows(members: jax.Array, values: jax.Array, batch: int) -> jax.Array:
  """Returns the value of each row's cluster, [B, ...]; 0 without a cluster."""
  chex.assert_equal_shape_prefix([members, values], 1)
  shape = values.shape[1:]
  copies = jnp.broadcast_to(values[:, None], (*members.shape, *shape))
  rows = jnp.zeros((batch, *shape), jnp.int32)
  return rows.at[members].set(copies, mode="drop")


def _saved(
  lengths: jax.Array, tokens: jax.Array, shared: jax.Array, lockstep: bool
) -> jax.Array:
  """Returns float32[], the number of token reads that sharing saves.

  Args:
    lengths: int32[B].
    tokens: int32[clusters], tokens that a cluster shares.
    shared: int32[B], tokens that a row shares.
    lockstep: True if the backend reads as many blocks for each row as the
      longest row needs.
  """
  # In float32, because sums over rows may overflow int32.
  lengths, tokens, shared = (
    x.astype(jnp.float32) for x in (lengths, tokens, shared)
  )
  if not lockstep:
    return jnp.sum(shared) - jnp.sum(tokens)
  rows = lengths.shape[0] * (jnp.max(lengths) - jnp.max(lengths - shared))
  return rows - tokens.shape[0] * jnp.max(tokens)
