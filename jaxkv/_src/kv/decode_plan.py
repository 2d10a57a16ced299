"""Equal pieces of a decode step's work, for backends that take a plan."""

import dataclasses

import jax

import jaxkv_kernels as kernels
from jaxkv._src.kv.memory import KVPages
from jaxkv._src.kv.view import View
from jaxkv._src.kv.view import check_view
from jaxkv._src.kv.view import decode_lengths


def plan_decode(
  kv: KVPages,
  view: View,
  *,
  window: jax.Array | int | None = None,
  backend: str = "auto",
) -> View:
  """A view whose decode work is cut into equal pieces, for all layers.

  Call it once a decode step, before the layers. Without a plan a backend cuts
  each row by itself, in every layer, and long rows have longer pieces. A plan
  changes the results of `attend` in rounding only, which then depends on other
  rows. `attend` ignores a plan for several columns and with `shared` pages.

  Args:
    kv: the pages; only their shape is used.
    view: the rows, with at most one new token each.
    window: the window of most layers, None for none. In layers with another
      window the pieces are less equal.
    backend: as given to `attend`.

  Returns:
    The view with a `plan`, which is None if the backend takes no plans, and
    for latents.

  Raises:
    TypeError: an argument has a type or dtype that is not supported.
    ValueError: an argument has a shape or value that is not supported.
    NotImplementedError: the backend does not exist.

  Examples:
    >>> import jax.numpy as jnp
    >>> import jaxkv
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=32, page_size=64, num_slots=2, pages_per_slot=4
    ... )
    >>> kv = jaxkv.kv.init(config, num_layers=4, num_kv_heads=8, head_dim=64)
    >>> view = jaxkv.kv.View(
    ...   page_table=jnp.asarray([[5, 6, 7, 8], [9, 0, 0, 0]], jnp.int32),
    ...   starts=jnp.asarray([200, 30], jnp.int32),
    ...   counts=jnp.asarray([1, 1], jnp.int32),
    ... )
    >>> view = jaxkv.kv.plan_decode(kv, view, backend="mosaic_gpu")
    >>> view.plan.row[:5].tolist(), view.plan.first[:5].tolist()
    ([0, 0, 0, 0, 1], [0, 64, 128, 192, 0])
  """
  check_view(view)
  workers = kernels.decode_workers(kv.k, backend=backend)
  pieces = None
  if workers is not None and kv.v is not None:
    pieces = kernels.plan_decode(
      decode_lengths(view), workers=workers, window=window
    )
  return dataclasses.replace(view, plan=pieces)
