"""Options that act on a whole head, applied outside a kernel.

A kernel that uses these functions needs one factor for each head and computes a
plain softmax.
"""

import chex
import jax
import jax.numpy as jnp

from jaxkv_kernels._src.attention.options import CallOptions


def factors(options: CallOptions, heads: int, kv_heads: int) -> jax.Array:
  """The factor of each query head's logits, before the soft cap.

  Args:
    options: of the call; `k_scale` is included if it is one for each head.
    heads: H.
    kv_heads: K.

  Returns:
    float32[H].
  """
  scale = jnp.full((heads,), options.scale, jnp.float32)
  if options.k_scale is None or options.k_scale.ndim != 1:
    return scale
  return scale * jnp.repeat(options.k_scale, heads // kv_heads)


def finish(
  out: jax.Array, lse: jax.Array, seen: jax.Array, options: CallOptions
) -> tuple[jax.Array, jax.Array]:
  """Applies the scales of values that are one for each head, and sinks.

  Args:
    out: float32[*X, H, Dv], normalised, 0 where no key was seen.
    lse: float32[*X, H], -inf where no key was seen.
    seen: bool[*X], False where there is no query at all.
    options: of the call.

  Returns:
    (float32[*X, H, Dv], float32[*X, H]).
  """
  chex.assert_equal_shape_prefix([out, lse, seen], seen.ndim)
  scale = options.v_scale
  if scale is not None and scale.ndim == 1:
    scale = jnp.repeat(scale, out.shape[-2] // scale.size)
    out = out * scale.reshape(*(1,) * (out.ndim - 2), -1, 1)
  if options.sinks is None:
    return out, lse
  sinks = options.sinks.astype(jnp.float32)
  sinks = sinks.reshape(*(1,) * (lse.ndim - 1), -1)
  whole = jnp.logaddexp(lse, sinks)
  # A sink of -inf leaves a row without keys unchanged.
  share = jnp.exp(lse - jnp.where(whole == -jnp.inf, jnp.float32(0), whole))
  out = out * share[..., None]
  return out, jnp.where(seen[..., None], whole, -jnp.inf)
