"""Equal pieces of a decode step's work, for the backends that take them."""

import dataclasses

import jax

import jaxkv_kernels as kernels
from jaxkv._src.kv.memory import KVPages
from jaxkv._src.kv.view import View
from jaxkv._src.kv.view import check_view
from jaxkv._src.kv.view import decode_lengths
from jaxkv._src.kv.view import mark_exact


def plan_decode(
  kv: KVPages,
  view: View,
  *,
  window: jax.Array | int | None = None,
  backend: str = "auto",
) -> View:
  """A view whose decode work is cut by what its rows hold, for all layers.

  Call it once a decode step, before the layers. Without a plan a backend cuts
  each row by itself, in every layer, and a long row has longer pieces. With one
  `attend` gives the same but for last bits, and those of a row depend on its
  neighbours. A plan plays no part for several columns, nor where `attend` reads
  `shared` pages.

  Args:
    kv: the pages; looked at for its shape alone.
    view: the rows, one new token each at most.
    window: the one that most layers attend through, None for none. In others
      the pieces are less equal.
    backend: as `attend` will be told.

  Returns:
    The view, with a `plan`; that is None if the backend takes none.

  Raises:
    ValueError: an argument has a shape, dtype or value that is not supported.
    NotImplementedError: there is no such backend.

  Examples:
    >>> import jax.numpy as jnp
    >>> from jaxkv import kv as memory
    >>> kv = memory.init(
    ...   num_layers=4, num_pages=32, page_size=64, num_kv_heads=8, head_dim=64
    ... )
    >>> view = memory.View(
    ...   page_table=jnp.asarray([[5, 6, 7, 8], [9, 0, 0, 0]], jnp.int32),
    ...   starts=jnp.asarray([200, 30], jnp.int32),
    ...   counts=jnp.asarray([1, 1], jnp.int32),
    ... )
    >>> view = memory.plan_decode(kv, view, backend="mosaic_gpu")
    >>> view.plan.row[:5].tolist(), view.plan.first[:5].tolist()
    ([0, 0, 0, 0, 1], [0, 64, 128, 192, 0])
  """
  check_view(view)
  workers = kernels.decode_workers(kv.k, backend=backend)
  pieces = None
  if workers is not None:
    pieces = kernels.plan_decode(
      decode_lengths(view), workers=workers, window=window
    )
  planned = dataclasses.replace(view, plan=pieces)
  return mark_exact(planned) if view.exact else planned
