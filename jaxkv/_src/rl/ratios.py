"""How far the trained policy is from the one that drew the tokens."""

from typing import Any
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

  With the log-ratio d = log p - log q (Schulman, 2020, "Approximating KL
  divergence"): k1 is d, without bias; k2 is d^2 / 2, with less variance; k3 is
  exp(-d) - 1 + d, without bias and never negative.

  Args:
    log_probs: floats[Q, T], of the policy p that drew the tokens.
    other: floats[Q, T], of the policy q, such as a reference.
    mask: bool[Q, T], the tokens that were drawn; None for all. Numbers
      elsewhere may be NaN: the result and its gradient are 0 there.
    estimator: static; "k1", "k2" or "k3".

  Returns:
    float32[Q, T].

  Raises:
    TypeError: the arguments are no floats, or `mask` is not bool.
    ValueError: shapes differ, or there is no such estimator.

  Examples:
    >>> kl(jnp.log(jnp.array([[0.5]])), jnp.log(jnp.array([[0.25]])))
    Array([[0.19314718]], dtype=float32)
  """
  check_estimator(estimator)
  log_probs = per_token.as_log_probs("log_probs", log_probs)
  away = log_probs - per_token.as_floats_like("other", other, log_probs)
  if mask is not None:
    away = jnp.where(per_token.as_mask("mask", mask, away), away, 0)
  return divergence(away, estimator)


def divergence(away: jax.Array, estimator: Estimator) -> jax.Array:
  """The estimate of log-ratios."""
  if estimator == "k1":
    return away
  if estimator == "k2":
    return away * away / 2
  return jnp.expm1(-away) + away


def check_estimator(estimator: Estimator) -> None:
  """Raises ValueError unless there is such an estimator."""
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
  """How much more likely tokens are now than when they were drawn.

  exp(log_probs - behavior), truncated at `most` (Ionides, 2008). They multiply
  the loss of tokens that another policy, or the same one in other numbers, has
  drawn. No gradient goes through them.

  Args:
    log_probs: floats[Q, T], of the policy at the beginning of the update.
    behavior: floats[Q, T], of the policy that drew the tokens, such as
      `generated(state).log_probs`.
    mask: bool[Q, T], the tokens that were drawn.
    most: the largest weight; None for no bound.
    lag: integers[Q, T], updates since each token was drawn: the version of the
      weights minus `generated(state).versions`.
    max_lag: an integer; tokens with a greater lag get weight 0. With `lag`
      alone, and needed there.

  Returns:
    float32[Q, T]; 0 where `mask` is False.

  Raises:
    TypeError: an argument has another dtype.
    ValueError: an argument has another shape or is out of range, or of `lag`
      and `max_lag` one is missing.

  Examples:
    >>> drawn = jnp.array([[True, True, False]])
    >>> now = jnp.array([[-0.5, -1.0, 0.0]])
    >>> importance_weights(now, jnp.array([[-0.5, -9.0, 0.0]]), mask=drawn)
    Array([[1., 2., 0.]], dtype=float32)
  """
  bound = None if most is None else _bound(most)
  if (lag is None) != (max_lag is None):
    raise ValueError(
      "`lag` and `max_lag` must be given together, got "
      f"{'max_lag' if lag is None else 'lag'} alone."
    )
  log_probs = per_token.as_log_probs("log_probs", log_probs)
  away = log_probs - per_token.as_floats_like("behavior", behavior, log_probs)
  used = per_token.as_mask("mask", mask, away)
  if lag is not None and max_lag is not None:
    lag = jnp.asarray(lag)
    arguments.check_shape("lag", lag, away.shape, ", one for each token")
    if not jnp.issubdtype(lag.dtype, jnp.integer):
      raise TypeError(f"`lag` must be integers, got {lag.dtype.name}.")
    used &= lag <= _whole("max_lag", max_lag, lag)
  # Elsewhere numbers may be anything, and exp of them infinite.
  weights = jnp.exp(jnp.where(used, away, 0))
  if bound is not None:
    weights = jnp.minimum(weights, bound)
  return jax.lax.stop_gradient(jnp.where(used, weights, 0))


def _bound(most: Any) -> jax.Array:
  """The largest weight, float32[]; raises unless it is a positive number."""
  bound = arguments.as_number("most", most)
  if arguments.is_concrete(most) and not most > 0:
    raise ValueError(f"`most` must be positive, got {most}.")
  return bound


def _whole(name: str, value: Any, other: jax.Array) -> Any:
  """An integer, also a traced one, to be compared with others."""
  arguments.check_integer(name, value)
  concrete = arguments.is_concrete(value)
  return int(value) if concrete else value.astype(other.dtype)
