"""Applies options that act on a whole head, outside of a kernel.

The kernel then needs one factor for the logits of a head, and no sinks.
"""

import chex
import jax
import jax.numpy as jnp

from jaxkv_kernels._src.attention.options import CallOptions


def factors(options: CallOptions, heads: int, kv_heads: int) -> jax.Array:
  """Returns the factor of the logits before the soft cap, float32[H].

  A `k_scale` with one number for each K/V head is part of the factor.
  """
  scale = jnp.full((heads,), options.scale, jnp.float32)
  if options.k_scale is None or options.k_scale.ndim != 1:
    return scale
  return scale * jnp.repeat(options.k_scale, heads // kv_heads)


def finish(
  out: jax.Array, lse: jax.Array, is_query: jax.Array, options: CallOptions
) -> tuple[jax.Array, jax.Array]:
  """Applies sinks, and `v_scale` if it has one number for each K/V head.

  For any axes *X, `out` is float32[*X, H, Dv], divided by the softmax
  denominator without sinks, and `lse` is float32[*X, H]; 0 and -inf for queries
  without keys. `is_query`, bool[*X], is False for padding.
  """
  chex.assert_equal_shape_prefix([out, lse, is_query], is_query.ndim)
  scale = options.v_scale
  if scale is not None and scale.ndim == 1:
    scale = jnp.repeat(scale, out.shape[-2] // scale.size)
    out = out * scale.reshape(*(1,) * (out.ndim - 2), -1, 1)
  if options.sinks is None:
    return out, lse
  sinks = options.sinks.astype(jnp.float32)
  sinks = sinks.reshape(*(1,) * (lse.ndim - 1), -1)
  lse_with_sinks = jnp.logaddexp(lse, sinks)
  # If a query has no keys and its sink is -inf, the difference would be NaN.
  share = jnp.exp(
    lse - jnp.where(lse_with_sinks == -jnp.inf, jnp.float32(0), lse_with_sinks)
  )
  out = out * share[..., None]
  return out, jnp.where(is_query[..., None], lse_with_sinks, -jnp.inf)
