"""The online softmax of one block, to the base of 2, as a kernel needs it.

FlashAttention's (Dao et al. 2022, algorithm 1), on arrays in registers; plain
`jax.numpy`, so that it can be tested by itself. R rows see C keys.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

# Below every logit, and finite: what a row has seen when it has seen nothing.
LOWEST = float(jnp.finfo(jnp.float32).min)

LOG2_E = math.log2(math.e)


def logits(
  products: jax.Array,
  factor: jax.Array,
  distance: jax.Array,
  soft_cap: float | None,
  slopes: jax.Array | None,
) -> jax.Array:
  """Products of queries and keys as logits to the base of 2.

  Args:
    products: float32[R, C].
    factor: float32[].
    distance: position of a key less that of the query. int32[R, C]
    soft_cap: as in `CallOptions`.
    slopes: of ALiBi, or None. float32[R]

  Returns:
    float32[R, C].
  """
  if soft_cap is None and slopes is None:
    return products * (factor * LOG2_E)
  result = products * factor
  if soft_cap is not None:
    # tanh(x) = 1 - 2 / (1 + e^2x); the hardware's own tanh has 11 bits.
    power = jnp.exp2(result * (2 * LOG2_E / soft_cap))
    result = soft_cap * (1 - 2 / (1 + power))
  if slopes is not None:
    slopes = lax.broadcast_in_dim(slopes, result.shape, [0])
    result += slopes * distance.astype(jnp.float32)
  return result * LOG2_E


def absorb(
  logits: jax.Array, seen: jax.Array, top: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """One more block.

  Args:
    logits: float32[R, C].
    seen: bool[R, C].
    top: largest logit so far, never -inf. float32[R]
    total: sum of 2 ** (logit - top). float32[R]

  Returns:
    (top, total, shrink, weights): the two, what the sums so far are to be
    multiplied by, float32[R], and 2 ** (logit - top), float32[R, C].
  """
  logits = jnp.where(seen, logits, -jnp.inf)
  higher = jnp.maximum(top, jnp.max(logits, axis=1))
  shrink = jnp.exp2(top - higher)
  weights = jnp.exp2(logits - lax.broadcast_in_dim(higher, logits.shape, [0]))
  total = total * shrink + jnp.sum(weights, axis=1)
  return higher, total, shrink, weights


def normalise(total: jax.Array, weighted: jax.Array) -> jax.Array:
  """The output.

  Args:
    total: float32[...], one or more rows.
    weighted: sums of weights times values. float32[..., D]

  Returns:
    float32[..., D], 0 for a row that saw nothing.
  """
  safe = jnp.where(total == 0, 1.0, total)
  axes = tuple(range(total.ndim))
  return weighted / lax.broadcast_in_dim(safe, weighted.shape, axes)


def log_sum_exp(top: jax.Array, total: jax.Array) -> jax.Array:
  """The natural log-sum-exp, of the shape of both; -inf where total is 0.

  A large `top` swallows digits of the sum: parts of a row are put together by
  the two numbers themselves.
  """
  empty = total == 0
  safe = jnp.where(empty, 1.0, total)
  return jnp.where(empty, -jnp.inf, top / LOG2_E + jnp.log(safe))
