"""RMSNorm (Zhang and Sennrich, 2019)."""

import jax
import jax.numpy as jnp


def rms_norm(
  x: jax.Array, weight: jax.Array, eps: float, offset: float = 0.0
) -> jax.Array:
  """Normalizes the last axis of x by its root mean square, and scales it.

  The norm is computed in float32. `eps` is added to the mean square, and
  `offset` to `weight`, float[X].
  """
  wide = x.astype(jnp.float32)
  square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
  normalized = wide * jax.lax.rsqrt(square + eps)
  weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
  # Gemma, which has an offset, multiplies in float32 and then rounds. Llama
  # rounds before it multiplies.
  if offset:
    return (normalized * (weight.astype(jnp.float32) + offset)).astype(x.dtype)
  return normalized.astype(x.dtype) * weight
