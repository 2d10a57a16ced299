"""Merging attention over disjoint parts of the keys."""

import jax
import jax.numpy as jnp

from jaxkv_kernels._src import check


def merge_states(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Attention over all keys, given attention over X disjoint parts of them.

  Parts may be merged in any order and in steps. The output of a part without
  keys (a log-sum-exp of -inf) does not matter. A sink belongs to one part only.

  Args:
    out: [X, ..., H, Dv], a float dtype.
    lse: float32[X, ..., H], natural-log log-sum-exps of the outputs.

  Returns:
    ([..., H, Dv] in out's dtype, float32[..., H]); zeros and -inf where no
    part has a key.

  Raises:
    TypeError: an argument has a type or dtype that is not supported.
    ValueError: the shapes do not go together, or there is no part.

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
  wanted = f"float32{list(out.shape[:-1])}, as out is"
  check.float32("lse", lse, wanted)
  if lse.shape != out.shape[:-1]:
    check.refuse(ValueError, "lse", wanted, lse)
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
