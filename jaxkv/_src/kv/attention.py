"""Attention of new tokens over everything their sequences hold."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv_kernels as kernels
from jaxkv._src.kv.memory import KVPages
from jaxkv._src.kv.memory import check_layer
from jaxkv._src.kv.view import View
from jaxkv._src.kv.view import check_rows
from jaxkv._src.kv.view import decode_lengths
from jaxkv_kernels._src import check


def attend(
  kv: KVPages,
  view: View,
  layer: jax.Array | int,
  q: jax.Array,
  *,
  scale: jax.Array | float | None = None,
  soft_cap: float | None = None,
  window: jax.Array | int | None = None,
  sinks: jax.Array | None = None,
  alibi_slopes: jax.Array | None = None,
  tree_mask: jax.Array | None = None,
  return_lse: bool = False,
  backend: str = "auto",
) -> Any:
  """Causal attention over positions 0 .. starts + counts - 1 of one layer.

  Write the new tokens first. Positions whose page was given back (behind a
  sliding window) must lie outside `window`: they are read as they are.

  With one column, no window, and a view of `share`, pages that rows have in
  common are read once. That rounds differently, but no less precisely. A row
  whose table or position has changed since, so that it no longer begins with
  those pages, is read alone; `fit` finds that out once for all layers. What
  `plan` made is handed to backends that take it.

  Not differentiable: a gradient is zeros or jax's own error.

  Args:
    kv: the pages.
    view: where the rows live and which columns are tokens.
    layer: int32[], 0..L-1.
    q: [B, T, H, D], H a multiple of K.
    scale: factor of the logits; 1 / sqrt(D) if None.
    soft_cap: c > 0 turns a logit x into c * tanh(x / c).
    window: a query at position p sees positions p - window + 1 .. p.
    sinks: float[H], one logit per head without a value.
    alibi_slopes: float[H]; a query at position p adds slope * (j - p) to its
      logit with the key at j.
    tree_mask: bool[B, T, T], for drafts: column t sees column j <= t only if
      `tree_mask[b, t, j]`, so a token sees itself only where the diagonal is
      True; earlier tokens as usual.
    return_lse: also return the log-sum-exp (natural log, sink included).
    backend: see `jaxkv.kernels.BACKENDS`.

  Returns:
    [B, T, H, D] in q's dtype, and float32[B, T, H] with `return_lse`; zeros
    and -inf in columns past `view.counts`.

  Raises:
    ValueError: an argument has a shape, dtype or value that is not supported.
    NotImplementedError: there is no such backend, or it does not serve.
  """
  check_rows(view, "q", q)
  if q.ndim != 4:
    raise ValueError(f"q has shape {q.shape}; it must be [B, T, H, D]")
  check_layer(kv, layer)
  options = {
    "scale": scale,
    "soft_cap": soft_cap,
    "window": window,
    "sinks": sinks,
    "alibi_slopes": alibi_slopes,
    "tree_mask": tree_mask,
    "backend": backend,
  }
  traced = {
    name: value
    for name, value in options.items()
    if not isinstance(value, (int, float, str, np.generic, type(None)))
  }
  for name, value in traced.items():
    check.is_array(name, value)
  static = tuple(item for item in options.items() if item[0] not in traced)
  layer = jnp.asarray(layer, jnp.int32)
  out, lse = _attend(
    kv, view, layer, q, traced, static=static, exact=view.exact
  )
  return (out, lse) if return_lse else out


@functools.partial(jax.jit, static_argnames=("static", "exact"), inline=True)
def _attend(
  kv: KVPages,
  view: View,
  layer: jax.Array,
  q: jax.Array,
  traced: dict[str, jax.Array],
  *,
  static: tuple[tuple[str, Any], ...],
  exact: bool,
) -> tuple[jax.Array, jax.Array]:
  options = {
    "page_offset": layer * kv.num_pages,
    "return_lse": True,
    "k_scale": kv.k_scale,
    "v_scale": kv.v_scale,
    **traced,
    **dict(static),
  }
  if q.shape[1] > 1 or options["tree_mask"] is not None:
    return kernels.paged_attention_padded(
      q, kv.k, kv.v, view.page_table, view.starts, view.counts, **options
    )
  del options["tree_mask"]
  lengths = decode_lengths(view)
  if view.shared is not None and options["window"] is None:
    del options["window"]
    shared = view.shared
    if not exact:  # The rows may have been stepped on.
      shared = shared.fitted(view.page_table, lengths, page_size=kv.page_size)
    out, lse = kernels.cascade_decode(q[:, 0], kv.k, kv.v, shared, **options)
  else:
    out, lse = kernels.paged_decode(
      q[:, 0],
      kv.k,
      kv.v,
      view.page_table,
      lengths,
      plan=view.plan,
      **options,
    )
  lse = jnp.where((view.counts > 0)[:, None], lse, -jnp.inf)
  return out[:, None], lse[:, None]
