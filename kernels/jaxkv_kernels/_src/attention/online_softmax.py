"""The online softmax of one block of keys, in base 2, for kernels.

Implements the softmax of FlashAttention (Dao et al. 2022, algorithm 1) in plain
`jax.numpy`, which tests can call without a kernel. Y query rows see A keys. In
all backends `m` is a row's largest logit so far, `l` the sum of its weights,
and `alpha` the factor that adapts earlier sums to a new `m`.
"""

import math

import chex
import jax
import jax.numpy as jnp
from jax import lax

# The initial value of a row's largest logit: below all logits, but finite,
# because -inf - -inf would be NaN.
LOWEST = float(jnp.finfo(jnp.float32).min)

# GPUs have an instruction for 2 ** x, so logits are in base 2.
LOG2_E = math.log2(math.e)


def logits(
  products: jax.Array,
  factor: jax.Array,
  distance: jax.Array,
  soft_cap: float | None,
  slopes: jax.Array | None,
) -> jax.Array:
  """Converts products of queries and keys to logits in base 2.

  Products and logits are float32[Y, A], `factor` is float32[]. `distance`,
  int32[Y, A], is the key's position minus the query's. `slopes`, float32[Y],
  are the ALiBi slopes of the rows, or None.
  """
  if soft_cap is None and slopes is None:
    return products * (factor * LOG2_E)
  result = products * factor
  if soft_cap is not None:
    # tanh(x) = 1 - 2 / (1 + e^2x). Mosaic GPU's tanh has 11 correct bits.
    power = jnp.exp2(result * (2 * LOG2_E / soft_cap))
    result = soft_cap * (1 - 2 / (1 + power))
  if slopes is not None:
    slopes = lax.broadcast_in_dim(slopes, result.shape, [0])
    result += slopes * distance.astype(jnp.float32)
  return result * LOG2_E


def absorb(
  logits: jax.Array, mask: jax.Array, m: jax.Array, l: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Adds a block of keys to the softmax.

  Args:
    logits: float32[Y, A].
    mask: bool[Y, A], True for keys that a row sees.
    m: float32[Y], each row's largest logit so far, never -inf.
    l: float32[Y], each row's sum of 2 ** (logit - m).

  Returns:
    (m, l, alpha, weights): the new m and l; float32[Y], the factor
    for sums over earlier blocks; float32[Y, A], 2 ** (logit - m).
  """
  chex.assert_equal_shape([logits, mask])
  chex.assert_equal_shape([m, l])
  logits = jnp.where(mask, logits, -jnp.inf)
  next_m = jnp.maximum(m, jnp.max(logits, axis=1))
  alpha = jnp.exp2(m - next_m)
  weights = jnp.exp2(logits - lax.broadcast_in_dim(next_m, logits.shape, [0]))
  l = l * alpha + jnp.sum(weights, axis=1)
  return next_m, l, alpha, weights


def normalise(l: jax.Array, weighted: jax.Array) -> jax.Array:
  """Divides rows by the sums of their weights.

  Args:
    l: float32[...], sums of weights.
    weighted: float32[..., D], sums of weights times values.

  Returns:
    float32[..., D], 0 for a row without keys.
  """
  chex.assert_shape(weighted, (*l.shape, None))
  divisor = jnp.where(l == 0, 1.0, l)
  axes = tuple(range(l.ndim))
  return weighted / lax.broadcast_in_dim(divisor, weighted.shape, axes)


def log_sum_exp(m: jax.Array, l: jax.Array) -> jax.Array:
  """Returns natural log-sum-exps, elementwise; -inf if `l` is 0.

  A large `m` rounds off digits of `l`. To merge parts of a row, use `m`
  and `l` instead.
  """
  has_no_key = l == 0
  argument = jnp.where(has_no_key, 1.0, l)
  return jnp.where(has_no_key, -jnp.inf, m / LOG2_E + jnp.log(argument))
