"""Finding the pages that sequences have in common."""

import dataclasses

import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels
from jaxkv.kv.pages import KVPages
from jaxkv.kv.view import View
from jaxkv.kv.view import check_rows


def share(
  kv: KVPages,
  view: View,
  *,
  num_groups: int,
  group_size: int,
  groups: jax.Array | None = None,
  backend: str = "auto",
) -> View:
  """A view by which `attend` reads the pages that rows share only once.

  Call it once a decode step, before the layers. Forks of one prompt share its
  full pages, and so do rows that found the same prefix in the cache: what
  counts is that their page tables begin alike. If too little would be read
  less to make up for the effort, `attend` does what it does without; so it
  does for several columns, and with a window.

  Args:
    kv: the pages; looked at for its shape alone.
    view: the rows, one new token each at most.
    num_groups: the most groups of rows. The work is that of `num_groups *
      group_size` rows, so keep that near B: B / samples and samples, say.
    group_size: the most rows of a group; others are read alone.
    groups: int32[B], a number below `num_groups` for each row, out of range
      for none. None: rows with the same first page are a group.
    backend: as `attend` will be told.

  Returns:
    The view, with `shared`; that is None if sharing could never pay.

  Raises:
    ValueError: an argument has a shape, dtype or value that is not supported.
    NotImplementedError: there is no such backend.

  Examples:
    >>> import jax.numpy as jnp
    >>> from jaxkv import kv as memory
    >>> kv = memory.init(
    ...   num_layers=1, num_pages=32, page_size=256, num_kv_heads=8, head_dim=64
    ... )
    >>> view = memory.View(
    ...   page_table=jnp.asarray([[5, 6, 7, 8], [5, 6, 7, 9]], jnp.int32),
    ...   starts=jnp.asarray([800, 900], jnp.int32),
    ...   counts=jnp.asarray([1, 1], jnp.int32),
    ... )
    >>> view = memory.share(kv, view, num_groups=1, group_size=2)
    >>> view.shared.tokens  # three pages, read once for both
    Array([768], dtype=int32)
  """
  view = dataclasses.replace(view, shared=None)
  check_rows(view, "view", view.page_table.shape)
  lengths = jnp.where(view.counts > 0, view.starts + 1, 0)
  shared = kernels.plan_shared_prefix(
    view.page_table,
    lengths,
    kv.k,
    kv.v,
    num_groups=num_groups,
    group_size=group_size,
    groups=groups,
    backend=backend,
  )
  return dataclasses.replace(view, shared=shared)
