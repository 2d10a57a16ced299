"""Divergences and importance weights between policies."""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxkv._src.arrays import arguments
from jaxkv._src.rl import per_token

Estimator = Literal["k1", "k2", "k3"]


def kl(
  log_probs: jax.Array,
  other: jax.Array,
  *,
  mask: jax.Array | None = None,
  estimator: Estimator = "k3",
) -> jax.Array:
  """Estimates the divergence KL(p || q) at tokens drawn from p.

  The estimators are functions of the log-ratio d = log p - log q (Schulman,
  2020, "Approximating KL divergence"). k1 is d, which is unbiased. k2 is
  d^2 / 2, which is biased but has less variance. k3 is exp(-d) - 1 + d, which
  is unbiased and never negative.

  Args:
    log_probs: floats[Q, T], log-probs of the policy p that drew the tokens.
    other: floats[Q, T], log-probs of the policy q, such as a reference.
    mask: bool[Q, T], the tokens that were drawn; None for all tokens. For other
      tokens the result and its gradient are 0, even if an input is NaN.
    estimator: static; "k1", "k2" or "k3".

  Returns:
    float32[Q, T].

  Raises:
    TypeError: an argument is not floats, or `mask` is not bool.
    ValueError: shapes differ, or the estimator is unknown.

  Examples:
    >>> kl(jnp.log(jnp.array([[0.5]])), jnp.log(jnp.array([[0.25]])))
    Array([[0.19314718]], dtype=float32)
  """
  check_estimator(estimator)
  log_probs = per_token.as_log_probs("log_probs", log_probs)
  log_ratio = log_probs - per_token.as_floats_like("other", other, log_probs)
  if mask is not None:
    is_drawn = per_token.as_mask("mask", mask, log_ratio)
    log_ratio = jnp.where(is_drawn, log_ratio, 0)
  return divergence(log_ratio, estimator)


def divergence(log_ratio: jax.Array, estimator: Estimator) -> jax.Array:
  """Returns the estimates for log-ratios log p - log q."""
  if estimator == "k1":
    return log_ratio
  if estimator == "k2":
    return log_ratio * log_ratio / 2
  # For small d, exp(-d) - 1 would lose digits by cancellation.
  return jnp.expm1(-log_ratio) + log_ratio


def check_estimator(estimator: Estimator) -> None:
  """Raises ValueError unless the estimator is known."""
  if estimator not in ("k1", "k2", "k3"):
    raise ValueError(
      f'`estimator` must be "k1", "k2" or "k3", got {estimator!r}.'
    )


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
  log_probs = per_token.as_log_probs("log_probs", log_probs)
  behavior = per_token.as_floats_like("behavior", behavior, log_probs)
  log_ratio = log_probs - behavior
  is_used = per_token.as_mask("mask", mask, log_ratio)
  if lag is not None and max_lag is not None:
    lag = jnp.asarray(lag)
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
