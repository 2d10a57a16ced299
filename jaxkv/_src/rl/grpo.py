"""The clipped policy loss of GRPO."""

import math
from typing import Any
from typing import Literal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.arrays import arguments
from jaxkv._src.rl import array_checks
from jaxkv._src.rl import divergence

Mean = Literal["token", "sequence"] | float | jax.Array


class GrpoMetrics(NamedTuple):
  """Metrics of a loss, each a float32[] and a mean over all drawn tokens.

  Attributes:
    ratio: a token's probability under the new policy, divided by its
      probability under the old policy.
    clipped: the share of tokens without a gradient because of clipping.
    kl: the estimate "k3" of KL(old || new), see `kl`; 0 if both policies have
      the same log-probs, as in the first step of an update.
    reference_kl: the divergence from the reference; 0 without a reference.
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
  estimator: divergence.Estimator = "k3",
  entropy: jax.Array | None = None,
  entropy_weight: float = 0.0,
  mean: Mean = "sequence",
) -> tuple[jax.Array, GrpoMetrics]:
  """Computes the clipped policy loss of GRPO (Shao et al., 2024, equation 3).

  The loss of a drawn token is -min(r A, clip(r, 1 - c, 1 + c) A), where r is
  the ratio of the new to the old probability and A the advantage. With a
  reference policy, `kl_weight` times the divergence from it is added.

  Args:
    log_probs: floats[Q, T], log-probs of the policy in training. This and the
      arrays below can also be [N, G, R].
    old: floats[Q, T], log-probs of the policy at the beginning of the update,
      which get no gradient. `log_probs` and `old` must be log-probs of a
      softmax over all tokens at the same temperature, without top-k, top-p or
      penalties; see `jaxkv.rl`.
    advantages: floats[Q] or [N, G] with a number for each sequence, or an array
      like `log_probs` with a number for each token.
    mask: bool[Q, T], the tokens that were drawn, such as
      `generated(state).mask`. Values elsewhere are ignored and can be NaN.
      `mask & ~jnp.isnan(log_probs)` also excludes completions with a length out
      of range, for which `grouped_log_probs` returns NaN.
    clip: static; c, or a tuple `(below, above)` of the value of c for ratios
      below 1 and that for ratios above 1 (Yu et al., 2025, "clip higher").
    weights: floats[Q, T], factors of the policy loss, such as
      `importance_weights`; None for 1.
    reference: floats[Q, T], log-probs of the reference policy; None for no
      divergence.
    kl_weight: factor of the divergence.
    estimator: static; estimator of the divergence, see `kl`.
    entropy: floats[Q, T], the entropy in nats of the policy's distribution at
      each token. It gets a gradient. None for no entropy bonus.
    entropy_weight: factor of the entropy, which is subtracted from the loss.
    mean: "sequence" averages over the tokens of each sequence, and then over
      the sequences with tokens. "token" averages over all drawn tokens. A
      number divides the sum over all drawn tokens. A string is static, but a
      number can be traced, such as the number of drawn tokens on all devices.

  Returns:
    The loss, float32[], and its metrics `ratio`, `clipped`, `kl` and
    `reference_kl`, each float32[] and a mean over all drawn tokens.

  Raises:
    TypeError: `mask` is not bool, `kl_weight` or `entropy_weight` is not a
      number, `advantages` are not real numbers, or another array is not floats.
    ValueError: an argument has the wrong shape or is out of range; `estimator`
      is unknown; or `clip` or `mean` has the wrong type.

  Examples:
    Both tokens became twice as likely. The first one is clipped, because its
    advantage is positive:

    >>> old = jnp.log(jnp.array([[0.4], [0.4]]))
    >>> good, drawn = jnp.array([1.0, -1.0]), jnp.ones((2, 1), bool)
    >>> loss, metrics = grpo_loss(old + jnp.log(2.0), old, good, drawn)
    >>> loss  # (-1.2 + 2) / 2
    Array(0.39999998, dtype=float32)
    >>> metrics.clipped
    Array(0.5, dtype=float32)
  """
  low, high = _bounds(clip)
  divergence.check_estimator(estimator)
  kl_factor = arguments.as_number("kl_weight", kl_weight)
  log_probs = array_checks.as_log_probs("log_probs", log_probs)
  mask = array_checks.as_mask("mask", mask, log_probs)
  old = array_checks.as_floats_like("old", old, log_probs)
  old = jax.lax.stop_gradient(old)
  # The mask comes before `exp`, because an inf or NaN makes gradients NaN, even
  # with a mask after `exp`.
  log_ratio = jnp.where(mask, log_probs - old, 0)
  advantages = _by_token(advantages, mask)
  factor = mask.astype(jnp.float32)
  if weights is not None:
    weights = array_checks.as_floats_like("weights", weights, log_probs)
    factor = jnp.where(mask, jax.lax.stop_gradient(weights), 0)
  # Log-ratios are compared with the bounds, because a ratio can overflow.
  min_log_ratio = math.log1p(-low) if low < 1 else -math.inf
  clipped = (advantages > 0) & (log_ratio > math.log1p(high))
  clipped |= (advantages < 0) & (log_ratio < min_log_ratio)
  # Tokens without a gradient get a ratio of 1, because `exp` could overflow for
  # them, and inf * 0 is NaN.
  is_constant = clipped | (advantages == 0) | (factor == 0)
  ratio = jnp.exp(jnp.where(is_constant, 0, log_ratio))
  bound = jnp.where(advantages > 0, jnp.float32(1 + high), jnp.float32(1 - low))
  losses = -jnp.where(clipped, bound, ratio) * advantages * factor
  reference_kl = jnp.zeros_like(losses)
  if reference is not None:
    reference = array_checks.as_floats_like("reference", reference, log_probs)
    reference = jax.lax.stop_gradient(reference)
    difference = jnp.where(mask, log_probs - reference, 0)
    reference_kl = divergence.divergence(difference, estimator)
    losses = losses + kl_factor * reference_kl
  if entropy is not None:
    entropy = array_checks.as_floats_like("entropy", entropy, log_probs)
    bonus = arguments.as_number("entropy_weight", entropy_weight)
    losses = losses - bonus * jnp.where(mask, entropy, 0)
  log_ratio = jax.lax.stop_gradient(log_ratio)
  metrics = GrpoMetrics(
    ratio=_mean(jnp.exp(log_ratio), mask, "token"),
    clipped=_mean(clipped.astype(jnp.float32), mask, "token"),
    kl=_mean(jnp.expm1(log_ratio) - log_ratio, mask, "token"),
    reference_kl=_mean(jax.lax.stop_gradient(reference_kl), mask, "token"),
  )
  return _mean(losses, mask, mean), metrics


def _bounds(clip: Any) -> tuple[float, float]:
  """Returns the bounds of a ratio as distances below and above 1."""
  bounds = clip if isinstance(clip, tuple) else (clip, clip)
  is_pair = len(bounds) == 2 and all(
    isinstance(bound, int | float | np.number) and not isinstance(bound, bool)
    for bound in bounds
  )
  if not is_pair or not (0 <= bounds[0] <= 1 and bounds[1] >= 0):
    raise ValueError(
      "`clip` must be a number from 0 to 1, or a tuple `(below, above)` with "
      f"`below` from 0 to 1 and `above` at least 0, got {clip!r}."
    )
  return float(bounds[0]), float(bounds[1])


def _by_token(advantages: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the advantage of each drawn token, float32[..., T]."""
  advantages = arguments.as_real("advantages", advantages).astype(jnp.float32)
  if advantages.ndim == mask.ndim - 1:
    advantages = advantages[..., None]
    arguments.check_shape("advantages", advantages, (*mask.shape[:-1], 1))
  else:
    meaning = ", or one for each sequence"
    arguments.check_shape("advantages", advantages, mask.shape, meaning)
  return jnp.where(mask, jnp.broadcast_to(advantages, mask.shape), 0)


def _mean(values: jax.Array, mask: jax.Array, mean: Mean) -> jax.Array:
  """Returns the mean of values [..., T] where `mask` is True, float32[]."""
  values = jnp.where(mask, values, 0)
  is_drawn = mask.astype(jnp.float32)
  if isinstance(mean, str) and mean == "sequence":
    count = jnp.sum(is_drawn, axis=-1)
    rows = jnp.sum(values, axis=-1) / jnp.maximum(count, 1)
    num_rows = jnp.sum((count > 0).astype(jnp.float32))
    return jnp.sum(rows) / jnp.maximum(num_rows, 1)
  if isinstance(mean, str) and mean == "token":
    return jnp.sum(values) / jnp.maximum(jnp.sum(is_drawn), 1)
  is_number = arguments.is_number(mean)
  # The value of a traced number cannot be checked.
  if not is_number or (arguments.is_concrete(mean) and not mean > 0):
    raise ValueError(
      f'`mean` must be "sequence", "token" or a positive number, got {mean!r}.'
    )
  return jnp.sum(values) / jnp.asarray(mean, jnp.float32)
