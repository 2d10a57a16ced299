"""Estimates of the divergence between policies."""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxkv._src.rl import array_checks

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
  log_probs = array_checks.as_log_probs("log_probs", log_probs)
  log_ratio = log_probs - array_checks.as_floats_like("other", other, log_probs)
  if mask is not None:
    is_drawn = array_checks.as_mask("mask", mask, log_ratio)
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
