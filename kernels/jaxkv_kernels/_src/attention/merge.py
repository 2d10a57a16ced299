"""Putting attention over parts of the keys together."""

import jax
import jax.numpy as jnp

from jaxkv_kernels._src import check


def merge_states(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Attention over all keys, from that over each of n disjoint parts of them.

  Parts may be merged in any grouping. What a part without keys (a log-sum-exp
  of -inf) has for an output does not matter. A sink belongs to one part only.

  Args:
    out: [n, ..., H, Dv], a float dtype.
    lse: float32[n, ..., H], natural-log log-sum-exps, as `return_lse` gives.

  Returns:
    ([..., H, Dv] in out's dtype, float32[..., H]); zeros and -inf where no
    part has a key.

  Raises:
    ValueError: shapes or dtypes that do not go together.

  Examples:
    >>> import jax.numpy as jnp
    >>> out, lse = merge_states(
    ...   jnp.asarray([[[1.0]], [[4.0]]]), jnp.log(jnp.asarray([[2.0], [1.0]]))
    ... )
    >>> round(float(out[0, 0]), 3), round(float(jnp.exp(lse[0])), 3)
    (2.0, 3.0)
  """
  check.is_array("out", out)
  check.is_array("lse", lse)
  if not jnp.issubdtype(out.dtype, jnp.floating) or out.ndim < 2:
    raise ValueError(
      f"out is {out.dtype}{list(out.shape)}; it must be float[n, ..., H, Dv]"
    )
  if lse.shape != out.shape[:-1] or lse.dtype != jnp.float32:
    raise ValueError(
      f"lse is {lse.dtype}{list(lse.shape)}; it must be"
      f" float32{list(out.shape[:-1])} for out of shape {out.shape}"
    )
  if out.shape[0] == 0:
    raise ValueError(f"out has shape {out.shape}; there must be a part")
  check.beside("out", out, lse=lse)
  out, lse = jnp.asarray(out), jnp.asarray(lse)
  top = jnp.max(lse, axis=0)
  empty = top == -jnp.inf
  weights = jnp.exp(lse - jnp.where(empty, jnp.float32(0), top)[None])
  total = jnp.sum(weights, axis=0)
  share = weights / jnp.where(empty, jnp.float32(1), total)[None]
  parts = jnp.where(
    share[..., None] > 0, out.astype(jnp.float32), jnp.float32(0)
  )
  merged = jnp.sum(share[..., None] * parts, axis=0)
  lse = jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1.0, total)))
  return merged.astype(out.dtype), lse
