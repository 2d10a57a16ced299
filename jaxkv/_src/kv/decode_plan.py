"""Plans a decode step's work for backends that take plans."""

import dataclasses

import jax

import jaxkv_kernels as kernels
from jaxkv._src.kv.kv_pages import KVPages
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
  """Cuts a decode step's work into equal pieces, once for all layers.

  Call it once per decode step, before the layers. Without a plan, a backend
  cuts each row separately, in every layer, and long rows get longer pieces. A
  plan changes only the rounding of results, which then depends on the other
  rows. `attend` ignores plans if a call has several columns or uses `shared`.

  Args:
    kv: the pages; their contents are not read.
    view: the rows, with at most one new token each.
    window: the window of most layers; None for full attention. In layers with
      another window, the pieces differ in work.
    backend: the `backend` that you pass to `attend`.

  Returns:
    The view with `plan`, which is None for latents, and for backends that take
    no plans.

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
    ...   num_tokens=jnp.asarray([1, 1], jnp.int32),
    ... )
    >>> view = jaxkv.kv.plan_decode(kv, view, backend="mosaic_gpu")
    >>> view.plan.row[:5].tolist(), view.plan.first[:5].tolist()
    ([0, 0, 0, 0, 1], [0, 64, 128, 192, 0])
  """
  check_view(view)
  workers = kernels.decode_workers(kv.k, backend=backend)
  plan = None
  # The backends that serve latents take no plans.
  if workers is not None and kv.v is not None:
    plan = kernels.plan_decode(
      decode_lengths(view), workers=workers, window=window
    )
  return dataclasses.replace(view, plan=plan)
