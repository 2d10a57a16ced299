"""CallOptions that act on a whole head, before a kernel and after it.

A kernel that leaves them to this file knows of one factor per head, and its
outputs are those of a plain softmax.
"""

import jax
import jax.numpy as jnp

from jaxkv_kernels._src.attention.options import CallOptions


def factors(options: CallOptions, heads: int, kv_heads: int) -> jax.Array:
  """What multiplies the logits of each query head, before the soft cap.

  Args:
    options: of the call; a scale of keys counts if it is one per head.
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
  """Scales values by head and lets sinks take part.

  Args:
    out: float32[*N, H, Dv], normalised, 0 where no key was seen.
    lse: float32[*N, H], -inf where no key was seen.
    seen: bool[*N], False where there is no query at all.
    options: of the call.

  Returns:
    (float32[*N, H, Dv], float32[*N, H]).
  """
  scale = options.v_scale
  if scale is not None and scale.ndim == 1:
    scale = jnp.repeat(scale, out.shape[-2] // scale.size)
    out = out * scale.reshape(*(1,) * (out.ndim - 2), -1, 1)
  if options.sinks is None:
    return out, lse
  sinks = options.sinks.astype(jnp.float32)
  sinks = sinks.reshape(*(1,) * (lse.ndim - 1), -1)
  whole = jnp.logaddexp(lse, sinks)
  # A sink of -inf leaves a row without keys as it is.
  share = jnp.exp(lse - jnp.where(whole == -jnp.inf, jnp.float32(0), whole))
  out = out * share[..., None]
  return out, jnp.where(seen[..., None], whole, -jnp.inf)
