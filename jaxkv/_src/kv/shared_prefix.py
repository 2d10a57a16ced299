"""Finding the pages that sequences have in common."""

import dataclasses

import jax

import jaxkv_kernels as kernels
from jaxkv._src.kv.memory import KVPages
from jaxkv._src.kv.view import View
from jaxkv._src.kv.view import check_view
from jaxkv._src.kv.view import decode_lengths
from jaxkv._src.kv.view import mark_exact


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

  Call it once a decode step, before the layers; see also `refresh_shared`.
  Forks of one prompt share its full pages, and so do rows that found the same
  prefix in the cache: what counts is that their page tables begin alike. If
  too little would
  be read less to make up for the effort, `attend` does what it does without; so
  it does for several columns, and with a window.

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
  check_view(view)
  shared = kernels.plan_shared_prefix(
    view.page_table,
    decode_lengths(view),
    kv.k,
    kv.v,
    num_groups=num_groups,
    group_size=group_size,
    groups=groups,
    backend=backend,
  )
  return mark_exact(dataclasses.replace(view, shared=shared))


def refresh_shared(kv: KVPages, view: View) -> View:
  """A view of which only what still holds is `shared`.

  `attend` looks at that itself, in every layer, unless it has the very view
  that this or `share` returned. XLA takes it out of a loop over layers for a
  CPU, but not for a GPU or a TPU. So a function with such a loop that is given
  a view begins with this; the results are the same.

  Args:
    kv: the pages; looked at for its shape alone.
    view: the rows, one new token each at most.

  Returns:
    The view, or the same if there is nothing to look at.

  Raises:
    ValueError: a field of the view has a shape or dtype that is not supported.

  Examples:
    >>> import dataclasses
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
    >>> ended = dataclasses.replace(view, counts=jnp.zeros((2,), jnp.int32))
    >>> memory.refresh_shared(kv, ended).shared.tokens
    Array([0], dtype=int32)
  """
  check_view(view)
  if view.exact or view.shared is None:
    return view
  shared = view.shared.fitted(
    view.page_table, decode_lengths(view), page_size=kv.page_size
  )
  return mark_exact(dataclasses.replace(view, shared=shared))
