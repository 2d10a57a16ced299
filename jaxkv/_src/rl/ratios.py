"""How far the trained policy is from the one that drew the tokens."""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxkv._src.cache import checks

Estimator = Literal["k1", "k2", "k3"]


def kl(
  log_probs: jax.Array,
  other: jax.Array,
  *,
  estimator: Estimator = "k3",
) -> jax.Array:
  """Estimates the divergence KL(p || q) at tokens drawn from p.

  With the log-ratio d = log p - log q (Schulman, 2020, "Approximating KL
  divergence"): k1 is d, without bias; k2 is d^2 / 2, with less variance; k3 is
  exp(-d) - 1 + d, without bias and never negative.

  Args:
    log_probs: floats, of the policy p that drew the tokens.
    other: floats of that shape, of the policy q, such as a reference.
    estimator: "k1", "k2" or "k3".

  Returns:
    float32 of that shape.

  Raises:
    ValueError: shapes differ, or there is no such estimator.

  Examples:
    >>> kl(jnp.log(jnp.array([0.5])), jnp.log(jnp.array([0.25])))
    Array([0.19314718], dtype=float32)
  """
  away = log_ratio(log_probs, other, "other")
  if estimator == "k1":
    return away
  if estimator == "k2":
    return away * away / 2
  if estimator == "k3":
    return jnp.expm1(-away) + away
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
    max_lag: tokens with a greater lag get weight 0; None for none. Needs `lag`.

  Returns:
    float32[Q, T]; 0 where `mask` is False.

  Raises:
    ValueError: an argument has another shape or is out of range.

  Examples:
    >>> drawn = jnp.array([[True, True, False]])
    >>> now = jnp.array([[-0.5, -1.0, 0.0]])
    >>> importance_weights(now, jnp.array([[-0.5, -9.0, 0.0]]), mask=drawn)
    Array([[1., 2., 0.]], dtype=float32)
  """
  if most is not None and not most > 0:
    raise ValueError(f"`most` must be positive, got {most}.")
  if max_lag is not None and lag is None:
    raise ValueError("`lag` must be given with max_lag, got None.")
  away = log_ratio(log_probs, behavior, "behavior")
  used = drawn("mask", mask, away)
  if lag is not None and max_lag is not None:
    checks.check_shape("lag", lag, away.shape, ", one for each token")
    used &= jnp.asarray(lag) <= max_lag
  # Elsewhere numbers may be anything, and exp of them infinite.
  weights = jnp.exp(jnp.where(used, away, 0))
  if most is not None:
    weights = jnp.minimum(weights, jnp.float32(most))
  return jax.lax.stop_gradient(jnp.where(used, weights, 0))


def log_ratio(log_probs: jax.Array, other: jax.Array, name: str) -> jax.Array:
  """log_probs - other, float32; `name` is that of `other` in messages."""
  log_probs, other = jnp.asarray(log_probs), jnp.asarray(other)
  meaning = ", that of log_probs"
  checks.check_shape(name, other, log_probs.shape, meaning)
  return log_probs.astype(jnp.float32) - other.astype(jnp.float32)


def drawn(name: str, mask: jax.Array, like: jax.Array) -> jax.Array:
  """A mask of the shape of log-probabilities.

  Raises:
    TypeError: it is not bool.
    ValueError: it has another shape.
  """
  mask = jnp.asarray(mask)
  checks.check_shape(name, mask, like.shape, ", one for each token")
  if mask.dtype != jnp.bool_:
    raise TypeError(
      f"`{name}` must be bool, got {mask.dtype.name}; compare it."
    )
  return mask
