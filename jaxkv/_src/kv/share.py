"""Finds the pages that sequences have in common."""

import dataclasses
from typing import overload

import jax

import jaxkv_kernels as kernels
from jaxkv._src.kv.kv_pages import KVPages
from jaxkv._src.kv.kv_pages import in_memory
from jaxkv._src.kv.view import FreshView
from jaxkv._src.kv.view import PackedView
from jaxkv._src.kv.view import View
from jaxkv._src.kv.view import check_view
from jaxkv._src.kv.view import decode_lengths


def share(
  kv: KVPages,
  view: View,
  *,
  num_clusters: int,
  cluster_size: int,
  clusters: jax.Array | None = None,
  backend: str = "auto",
) -> View:
  """Finds the pages that rows share, so that `attend` reads them once.

  Call it before one or more decode steps, and `jaxkv.kv.refresh_shared` in each
  step. Rows share pages if their page tables begin with the same pages. For
  example, forks of a prompt share its full pages, and rows with the same cached
  prefix share the pages of this prefix. `attend` reads every row separately if
  sharing would save too little, or if the call has several columns or a window.

  Args:
    kv: the pages; their contents are not read.
    view: the rows, with at most one new token each.
    num_clusters: the maximum number of clusters. A cluster is a set of rows
      that share pages. The work grows with `num_clusters * cluster_size`, so
      keep this product near B, the number of rows. For n samples of each
      prompt, use B / n clusters of n rows.
    cluster_size: the maximum number of rows of a cluster.
    clusters: int32[B], the cluster of each row, 0 to `num_clusters - 1`, or any
      other number for a row in no cluster. If a cluster has more than
      `cluster_size` rows, `attend` reads the last ones separately. None to
      group the rows that have the same first page.
    backend: the `backend` that you pass to `attend`.

  Returns:
    The view with a new `shared`, which is None for latents, and if sharing
    cannot save time with these shapes.

  Examples:
    >>> import dataclasses
    >>> import jax.numpy as jnp
    >>> import jaxkv
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=32, page_size=256, num_slots=2, pages_per_slot=4
    ... )
    >>> kv = jaxkv.kv.init(config, num_layers=1, num_kv_heads=8, head_dim=64)
    >>> view = jaxkv.kv.View(
    ...   page_table=jnp.asarray([[5, 6, 7, 8], [5, 6, 7, 9]], jnp.int32),
    ...   starts=jnp.asarray([800, 900], jnp.int32),
    ...   num_tokens=jnp.asarray([1, 1], jnp.int32),
    ... )
    >>> view = jaxkv.kv.share(kv, view, num_clusters=1, cluster_size=2)
    >>> view.shared.tokens  # three pages, read once for both
    Array([768], dtype=int32)
    >>> ended = dataclasses.replace(view, num_tokens=jnp.zeros((2,), jnp.int32))
    >>> jaxkv.kv.refresh_shared(kv, ended).view.shared.tokens
    Array([0], dtype=int32)
  """
  # The old `shared` is not checked, because it may be for another page table.
  is_view = isinstance(view, View)
  check_view(dataclasses.replace(view, shared=None) if is_view else view)
  # `cascade_decode` does not support latents.
  if kv.v is None:
    return dataclasses.replace(view, shared=None)
  # Like the tables that the kernels get, `shared` has rows and no page numbers.
  shared = kernels.plan_shared_prefix(
    in_memory(kv, view.page_table),
    decode_lengths(view),
    kv.k,
    kv.v,
    num_clusters=num_clusters,
    cluster_size=cluster_size,
    clusters=clusters,
    backend=backend,
  )
  return dataclasses.replace(view, shared=shared)


@overload
def refresh_shared(kv: KVPages, view: View) -> FreshView: ...


@overload
def refresh_shared(kv: KVPages, view: PackedView) -> PackedView: ...


def refresh_shared(
  kv: KVPages, view: View | PackedView
) -> FreshView | PackedView:
  """Checks, once for all layers, which rows still share pages.

  With a `View`, `attend` repeats this check in every layer, because rows may
  have changed since `share`. XLA for a CPU moves the check out of a loop over
  layers, but XLA for a GPU or a TPU does not. So call this function before such
  a loop and pass its result to `attend`. The outputs of `attend` stay the same.

  Args:
    kv: the pages; their contents are not read.
    view: the rows, with at most one new token each; or a `PackedView`.

  Returns:
    A `FreshView` whose `shared` has only rows that still share pages; or the
    `PackedView`, with such a `FreshView` as `decode`. See the example of
    `share`.
  """
  if isinstance(view, PackedView):
    decode = view.decode
    # Chunks in `prefill` never use `shared`.
    if isinstance(decode, View):
      decode = refresh_shared(kv, decode)
    return dataclasses.replace(view, decode=decode)
  check_view(view)
  if view.shared is None:
    return FreshView(view=view)
  shared = view.shared.refreshed(
    in_memory(kv, view.page_table),
    decode_lengths(view),
    page_size=kv.page_size,
  )
  return FreshView(view=dataclasses.replace(view, shared=shared))
