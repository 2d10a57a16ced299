"""Merges attention over disjoint parts of the keys."""

import jax
import jax.numpy as jnp

from jaxkv_kernels._src import check


def merge_states(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Merges attention over X disjoint parts of the keys.

  Parts can be merged in any order, and in several calls. A part without keys (a
  log-sum-exp of -inf) can have any output. At most one part can include sinks.

  Args:
    out: [X, ..., H, Dv], a float dtype.
    lse: float32[X, ..., H], log-sum-exps (natural log) of the parts' logits.

  Returns:
    ([..., H, Dv] in out's dtype, float32[..., H]), output and log-sum-exps over
    all keys; zeros and -inf if no part has a key.

  Examples:
    >>> import jax.numpy as jnp
    >>> out, lse = merge_states(
    ...   jnp.asarray([[[1.0]], [[4.0]]]), jnp.log(jnp.asarray([[2.0], [1.0]]))
    ... )
    >>> round(float(out[0, 0]), 3), round(float(jnp.exp(lse[0])), 3)
    (2.0, 3.0)
  """
  check.is_array("out", out)
  if not jnp.issubdtype(out.dtype, jnp.floating):
    check.refuse(TypeError, "out", "float[X, ..., H, Dv]", out)
  if out.ndim < 2 or out.shape[0] == 0:
    check.refuse(ValueError, "out", "[X, ..., H, Dv] with X >= 1", out)
  expected = f"float32{list(out.shape[:-1])}, the leading axes of out"
  check.float32("lse", lse, expected)
  if lse.shape != out.shape[:-1]:
    check.refuse(ValueError, "lse", expected, lse)
  check.same_devices("out", out, lse=lse)
  out = jnp.asarray(out)
  lse = jnp.asarray(lse)
  m = jnp.max(lse, axis=0)
  has_no_key = m == -jnp.inf
  weights = jnp.exp(lse - jnp.where(has_no_key, jnp.float32(0), m)[None])
  l = jnp.sum(weights, axis=0)
  share = weights / jnp.where(has_no_key, jnp.float32(1), l)[None]
  # 0 * NaN is NaN, so a share of zero would not exclude a NaN.
  parts = jnp.where(
    share[..., None] > 0, out.astype(jnp.float32), jnp.float32(0)
  )
  result = jnp.sum(share[..., None] * parts, axis=0)
  lse = jnp.where(
    has_no_key, -jnp.inf, m + jnp.log(jnp.where(has_no_key, 1.0, l))
  )
  return result.astype(out.dtype), lse
