"""The loss of GRPO, token by token, and its mean."""

from typing import Literal
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv._src.cache import checks
from jaxkv._src.rl import ratios

Mean = Literal["token", "sequence"] | int


class GrpoMetrics(NamedTuple):
  """What a loss was made of, each a float32[]: means over all drawn tokens.

  Attributes:
    ratio: the new policy's probability, divided by the old one's.
    clipped: the share of tokens whose ratio no longer has a gradient.
    kl: k3, from the old policy to the new one; 0 in the first step of an
      update if both have the same numbers.
    reference_kl: the estimate that the loss has; 0 without a reference.
  """

  ratio: jax.Array
  clipped: jax.Array
  kl: jax.Array
  reference_kl: jax.Array


def grpo_loss(
  log_probs: jax.Array,
  old: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip: float | tuple[float, float] = 0.2,
  weights: jax.Array | None = None,
  reference: jax.Array | None = None,
  kl_weight: float = 0.04,
  estimator: ratios.Estimator = "k3",
  mean: Mean = "sequence",
) -> tuple[jax.Array, GrpoMetrics]:
  """The clipped policy loss of GRPO (Shao et al., 2024, equation 3).

  For each drawn token -min(r A, clip(r, 1 - c, 1 + c) A), where r is the ratio
  of the new to the old probability, plus `kl_weight` times a divergence from
  the reference.

  Args:
    log_probs: floats[Q, T], of the policy that is trained.
    old: floats[Q, T], of the policy that r is relative to: at the beginning of
      the update. No gradient goes through them.
    advantages: floats[Q], or floats[Q, T] of each token.
    mask: bool[Q, T], the tokens that were drawn, such as
      `generated(state).mask`. Only they count; numbers elsewhere may be NaN.
    clip: c; or two, below and above 1 (Yu et al., 2025, "clip higher").
    weights: floats[Q, T], factors of the policy loss, such as
      `importance_weights`; None for 1.
    reference: floats[Q, T], of the reference policy; None for no divergence.
    kl_weight: of the divergence.
    estimator: of the divergence, see `kl`.
    mean: over what losses of tokens are averaged: "sequence", over the tokens
      of a sequence and then over sequences with any; "token", over all drawn
      tokens; or a number, by which the sum of all is divided, such as Q times
      the longest answer.

  Returns:
    The loss, float32[], and what it was made of.

  Raises:
    TypeError: `mask` is not bool.
    ValueError: an argument has another shape, or is out of range.

  Examples:
    Both tokens became twice as likely. The first was good, and is clipped:

    >>> old = jnp.log(jnp.array([[0.4], [0.4]]))
    >>> good, drawn = jnp.array([1.0, -1.0]), jnp.ones((2, 1), bool)
    >>> loss, metrics = grpo_loss(old + jnp.log(2.0), old, good, drawn)
    >>> loss  # (-1.2 + 2) / 2
    Array(0.39999998, dtype=float32)
    >>> metrics.clipped
    Array(0.5, dtype=float32)
  """
  low, high = clip if isinstance(clip, tuple) else (clip, clip)
  if not (0 <= low <= 1 and high >= 0):
    raise ValueError(f"`clip` must be 0 .. 1 below and positive, got {clip}.")
  mask = ratios.drawn("mask", mask, jnp.asarray(log_probs))
  away = ratios.log_ratio(log_probs, jax.lax.stop_gradient(old), "old")
  # Where nothing was drawn nothing may be infinite: 0 * inf has no gradient.
  away = jnp.where(mask, away, 0)
  ratio = jnp.exp(away)
  good = _by_token(advantages, mask)
  bounded = jnp.clip(ratio, 1 - low, 1 + high)
  losses = -jnp.minimum(ratio * good, bounded * good)
  if weights is not None:
    checks.check_shape("weights", weights, mask.shape, ", one for each token")
    losses = losses * jax.lax.stop_gradient(jnp.where(mask, weights, 0))
  extra = jnp.zeros_like(losses)
  if reference is not None:
    fixed = jax.lax.stop_gradient(reference)
    checks.check_shape("reference", fixed, mask.shape, ", one for each token")
    apart = [jnp.where(mask, values, 0) for values in (log_probs, fixed)]
    extra = ratios.kl(*apart, estimator=estimator)
  loss = _mean(losses + jnp.float32(kl_weight) * extra, mask, mean)
  fixed = jax.lax.stop_gradient(away)
  stopped = (ratio * good) > (bounded * good)
  metrics = GrpoMetrics(
    ratio=_mean(jnp.exp(fixed), mask, "token"),
    clipped=_mean(stopped.astype(jnp.float32), mask, "token"),
    kl=_mean(jnp.expm1(fixed) - fixed, mask, "token"),
    reference_kl=_mean(jax.lax.stop_gradient(extra), mask, "token"),
  )
  return loss, metrics


def _by_token(advantages: jax.Array, mask: jax.Array) -> jax.Array:
  """float32[Q, T]: the advantage of each drawn token."""
  advantages = jnp.asarray(advantages, jnp.float32)
  if advantages.ndim == 1:
    advantages = advantages[:, None]
    checks.check_shape("advantages", advantages, (mask.shape[0], 1))
  else:
    meaning = ", or one for each sequence"
    checks.check_shape("advantages", advantages, mask.shape, meaning)
  spread = jnp.broadcast_to(advantages, mask.shape)
  return jnp.where(mask, spread, 0)


def _mean(values: jax.Array, mask: jax.Array, mean: Mean) -> jax.Array:
  """float32[]: the mean of values [Q, T] where `mask` is True."""
  values, there = jnp.where(mask, values, 0), mask.astype(jnp.float32)
  if mean == "sequence":
    count = jnp.sum(there, axis=1)
    rows = jnp.sum(values, axis=1) / jnp.maximum(count, 1)
    some = jnp.sum((count > 0).astype(jnp.float32))
    return jnp.sum(rows) / jnp.maximum(some, 1)
  if mean == "token":
    return jnp.sum(values) / jnp.maximum(jnp.sum(there), 1)
  if isinstance(mean, int) and mean > 0:
    return jnp.sum(values) / mean
  raise ValueError(
    f'`mean` must be "sequence", "token" or a positive int, got {mean!r}.'
  )
