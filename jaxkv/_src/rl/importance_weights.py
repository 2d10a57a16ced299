"""Importance weights of tokens that an older policy drew."""

import jax
import jax.numpy as jnp

from jaxkv._src.arrays import arguments
from jaxkv._src.rl import array_checks


def importance_weights(
  log_probs: jax.Array,
  behavior: jax.Array,
  *,
  mask: jax.Array,
  most: float | None = 2.0,
  lag: jax.Array | None = None,
  max_lag: int | None = None,
) -> jax.Array:
  """Computes truncated importance weights (Ionides, 2008), without a gradient.

  A weight is min(exp(log_probs - behavior), most). It corrects the loss of a
  token that was drawn by an older policy, or with other rounding.

  Args:
    log_probs: floats[Q, T], log-probs such as `old` of `grpo_loss`.
    behavior: floats[Q, T], log-probs of the policy that drew the tokens, such
      as `generated(state).log_probs`.
    mask: bool[Q, T], the tokens that were drawn.
    most: the largest weight; None for no bound.
    lag: integers[Q, T], the number of updates since each token was drawn: the
      version of the parameters minus `generated(state).versions`.
    max_lag: an integer; tokens with a greater lag get weight 0. `lag` and
      `max_lag` must be given together.

  Returns:
    float32[Q, T]; 0 where `mask` is False.

  Raises:
    TypeError: an argument has the wrong dtype.
    ValueError: an argument has the wrong shape or is out of range, or only one
      of `lag` and `max_lag` is given.

  Examples:
    >>> drawn = jnp.array([[True, True, False]])
    >>> new = jnp.array([[-0.5, -1.0, 0.0]])
    >>> importance_weights(new, jnp.array([[-0.5, -9.0, 0.0]]), mask=drawn)
    Array([[1., 2., 0.]], dtype=float32)
  """
  if (lag is None) != (max_lag is None):
    raise ValueError(
      "`lag` and `max_lag` must be given together, got "
      f"{'max_lag' if lag is None else 'lag'} alone."
    )
  log_probs = array_checks.as_log_probs("log_probs", log_probs)
  behavior = array_checks.as_floats_like("behavior", behavior, log_probs)
  log_ratio = log_probs - behavior
  is_used = array_checks.as_mask("mask", mask, log_ratio)
  if lag is not None and max_lag is not None:
    lag = arguments.as_array("lag", lag)
    arguments.check_shape("lag", lag, log_ratio.shape, ", one for each token")
    if not jnp.issubdtype(lag.dtype, jnp.integer):
      raise TypeError(f"`lag` must be integers, got {lag.dtype.name}.")
    arguments.check_integer("max_lag", max_lag)
    # Compared in int32, because `max_lag` may not fit the dtype of `lag`.
    is_used &= lag.astype(jnp.int32) <= jnp.asarray(max_lag, jnp.int32)
  # Masked before `exp`, because unused tokens can have huge log-ratios.
  weights = jnp.exp(jnp.where(is_used, log_ratio, 0))
  if most is not None:
    bound = arguments.as_number("most", most)
    if arguments.is_concrete(most) and not most > 0:
      raise ValueError(f"`most` must be positive, got {most}.")
    weights = jnp.minimum(weights, bound)
  return jax.lax.stop_gradient(jnp.where(is_used, weights, 0))
