"""The loss of GRPO, token by token, and its mean."""

import math
from typing import Any
from typing import Literal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.arrays import arguments
from jaxkv._src.rl import per_token
from jaxkv._src.rl import ratios

Mean = Literal["token", "sequence"] | float | jax.Array


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
    log_probs: floats[Q, T], of the policy that is trained; or [N, G, R] of
      groups, and so all others.
    old: floats[Q, T], of the policy that r is relative to: at the beginning of
      the update. No gradient goes through them. They are of the distribution
      that `log_probs` are of: at its temperature, and of all tokens, without
      top-k, top-p, penalties and the like; see `jaxkv.rl`.
    advantages: floats[Q] or [N, G], or floats of each token.
    mask: bool[Q, T], the tokens that were drawn, such as
      `generated(state).mask`. Only they count; numbers elsewhere may be NaN.
      `grouped_log_probs` gives NaN for a prompt with a length out of range, its
      own or a completion's: `mask & ~jnp.isnan(log_probs)` leaves it out.
    clip: static; c; or two, below and above 1 (Yu et al., 2025, "clip
      higher").
    weights: floats[Q, T], factors of the policy loss, such as
      `importance_weights`; None for 1.
    reference: floats[Q, T], of the reference policy; None for no divergence.
    kl_weight: a number, of the divergence.
    estimator: static; of the divergence, see `kl`.
    mean: over what losses of tokens are averaged; static if it is a string.
      "sequence": over the tokens of a sequence, and then over sequences with
      any. "token": over all drawn tokens. A number, also a traced one: what the
      sum of all is divided by, such as the drawn tokens of all devices.

  Returns:
    The loss, float32[], and what it was made of.

  Raises:
    TypeError: `mask` is not bool, `kl_weight` no number, or others are no
      floats.
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
  low, high = _bounds(clip)
  ratios.check_estimator(estimator)
  pull = arguments.as_number("kl_weight", kl_weight)
  log_probs = per_token.as_log_probs("log_probs", log_probs)
  mask = per_token.as_mask("mask", mask, log_probs)
  old = per_token.as_floats_like("old", jax.lax.stop_gradient(old), log_probs)
  # Where nothing was drawn nothing may be infinite: 0 * inf has no gradient.
  away = jnp.where(mask, log_probs - old, 0)
  good = _by_token(advantages, mask)
  factor = mask.astype(jnp.float32)
  if weights is not None:
    weights = per_token.as_floats_like("weights", weights, log_probs)
    factor = jnp.where(mask, jax.lax.stop_gradient(weights), 0)
  # Decided by logarithms: a ratio may be too large for a float.
  clipped = (good > 0) & (away > math.log1p(high))
  clipped |= (good < 0) & (away < (math.log1p(-low) if low < 1 else -math.inf))
  idle = clipped | (good == 0) | (factor == 0)
  ratio = jnp.exp(jnp.where(idle, 0, away))
  bound = jnp.where(good > 0, jnp.float32(1 + high), jnp.float32(1 - low))
  losses = -jnp.where(clipped, bound, ratio) * good * factor
  extra = jnp.zeros_like(losses)
  if reference is not None:
    fixed = jax.lax.stop_gradient(reference)
    fixed = per_token.as_floats_like("reference", fixed, log_probs)
    apart = jnp.where(mask, log_probs - fixed, 0)
    extra = ratios.divergence(apart, estimator)
    losses = losses + pull * extra
  fixed = jax.lax.stop_gradient(away)
  metrics = GrpoMetrics(
    ratio=_mean(jnp.exp(fixed), mask, "token"),
    clipped=_mean(clipped.astype(jnp.float32), mask, "token"),
    kl=_mean(jnp.expm1(fixed) - fixed, mask, "token"),
    reference_kl=_mean(jax.lax.stop_gradient(extra), mask, "token"),
  )
  return _mean(losses, mask, mean), metrics


def _bounds(clip: Any) -> tuple[float, float]:
  """What a ratio may be below and above 1."""
  both = clip if isinstance(clip, tuple) else (clip, clip)
  numbers = all(isinstance(one, int | float | np.number) for one in both)
  if len(both) != 2 or not numbers or not (0 <= both[0] <= 1 and both[1] >= 0):
    raise ValueError(
      "`clip` must be a number of 0 .. 1, or a tuple of such a one and another "
      f"of at least 0, got {clip!r}."
    )
  return float(both[0]), float(both[1])


def _by_token(advantages: jax.Array, mask: jax.Array) -> jax.Array:
  """float32[..., T]: the advantage of each drawn token."""
  advantages = jnp.asarray(advantages, jnp.float32)
  if advantages.ndim == mask.ndim - 1:
    advantages = advantages[..., None]
    arguments.check_shape("advantages", advantages, (*mask.shape[:-1], 1))
  else:
    meaning = ", or one for each sequence"
    arguments.check_shape("advantages", advantages, mask.shape, meaning)
  spread = jnp.broadcast_to(advantages, mask.shape)
  return jnp.where(mask, spread, 0)


def _mean(values: jax.Array, mask: jax.Array, mean: Mean) -> jax.Array:
  """float32[]: the mean of values [..., T] where `mask` is True."""
  values, there = jnp.where(mask, values, 0), mask.astype(jnp.float32)
  if isinstance(mean, str) and mean == "sequence":
    count = jnp.sum(there, axis=-1)
    rows = jnp.sum(values, axis=-1) / jnp.maximum(count, 1)
    some = jnp.sum((count > 0).astype(jnp.float32))
    return jnp.sum(rows) / jnp.maximum(some, 1)
  if isinstance(mean, str) and mean == "token":
    return jnp.sum(values) / jnp.maximum(jnp.sum(there), 1)
  number = arguments.is_number(mean)
  if not number or (arguments.is_concrete(mean) and not mean > 0):
    raise ValueError(
      f'`mean` must be "sequence", "token" or a positive number, got {mean!r}.'
    )
  return jnp.sum(values) / jnp.asarray(mean, jnp.float32)
