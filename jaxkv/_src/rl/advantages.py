"""Advantages of samples relative to other samples of the same prompt."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.arrays import arguments
from jaxkv._src.rl import array_checks


def group_normalized(
  rewards: jax.Array,
  *,
  num_samples: int | None = None,
  mask: jax.Array | None = None,
  normalized: bool = True,
  eps: float = 1e-6,
) -> jax.Array:
  """Computes the advantages of GRPO (Shao et al., 2024, section 4.1.2).

  An advantage is the reward minus the mean of its group, divided by the
  population standard deviation of the group. With `normalized=False` there is
  no division, as in Dr. GRPO (Liu et al., 2025).

  Args:
    rewards: floats, integers or bools [N, G], the rewards of G samples of each
      of N prompts; or [Q], with the G samples of a prompt in adjacent entries,
      as in a rollout. Those of used samples must be finite. In a traced
      function this cannot be checked, and one NaN makes its group NaN.
    num_samples: G, a divisor of Q; None for the G of [N, G].
    mask: bool, of the shape of `rewards`: the samples to use; None for all.
    normalized: True to divide by the standard deviation.
    eps: added to the standard deviation; at least 0.

  Returns:
    float32, of the shape of `rewards`. If `eps` > 0, the values are 0 where
    `mask` is False, and in a group whose rewards are equal.

  Raises:
    TypeError: `mask` is not bool, `num_samples` is not an int, `eps` is not a
      number, or rewards are not real numbers.
    ValueError: an argument has the wrong shape, `eps` is negative, or a reward
      is not finite.

  Examples:
    >>> group_normalized(jnp.array([1.0, 0.0, 0.9, 0.9]), num_samples=2)
    Array([ 0.999998, -0.999998,  0.      ,  0.      ], dtype=float32)
  """
  divisor_offset = arguments.as_number("eps", eps)
  if arguments.is_concrete(eps) and not 0 <= eps < np.inf:
    arguments.refuse(ValueError, "eps", "finite and at least 0", eps)
  rewards, is_used, shape = _groups(rewards, num_samples, mask)
  # A group without used samples gets a count of 1, because 0 / 0 is NaN.
  count = jnp.maximum(jnp.sum(is_used, axis=1, keepdims=True), 1)
  mean = jnp.sum(rewards, axis=1, keepdims=True) / count
  advantages = jnp.where(is_used > 0, rewards - mean, 0)
  if normalized:
    variance = jnp.sum(advantages * advantages, axis=1, keepdims=True) / count
    advantages = advantages / (jnp.sqrt(variance) + divisor_offset)
  return advantages.reshape(shape)


def leave_one_out(
  rewards: jax.Array,
  *,
  num_samples: int | None = None,
  mask: jax.Array | None = None,
) -> jax.Array:
  """Computes the advantages of RLOO (Ahmadian et al., 2024, section 3.4).

  An advantage is the reward minus the mean of the other samples in its group.

  Args:
    rewards: see `group_normalized`.
    num_samples: see `group_normalized`.
    mask: see `group_normalized`.

  Returns:
    float32, of the shape of `rewards`; 0 where `mask` is False, and for the
    only used sample of a group.

  Raises:
    TypeError: `mask` is not bool, `num_samples` is not an int, or rewards are
      not real numbers.
    ValueError: an argument has the wrong shape, or a reward is not finite.

  Examples:
    >>> leave_one_out(jnp.array([1.0, 0.0, 2.0]), num_samples=3)
    Array([ 0. , -1.5,  1.5], dtype=float32)
  """
  rewards, is_used, shape = _groups(rewards, num_samples, mask)
  num_others = jnp.sum(is_used, axis=1, keepdims=True) - is_used
  sum_others = jnp.sum(rewards, axis=1, keepdims=True) - rewards
  has_baseline = (is_used > 0) & (num_others > 0)
  # Without a baseline, the divisor is 1, because 0 / 0 is NaN.
  baseline = sum_others / jnp.where(has_baseline, num_others, 1)
  return jnp.where(has_baseline, rewards - baseline, 0).reshape(shape)


def _groups(
  rewards: jax.Array, num_samples: int | None, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array, tuple[int, ...]]:
  """Returns rewards minus a constant per group, the mask, and the shape given.

  The first two are float32[N, G].
  """
  rewards = arguments.as_real("rewards", rewards)
  if num_samples is None and rewards.ndim == 2:
    num_samples = rewards.shape[1]
  num_samples = arguments.as_int("num_samples", num_samples)
  is_table = rewards.ndim == 2 and rewards.shape[1] == num_samples
  is_list = num_samples > 0 and rewards.ndim == 1
  if not is_table and (not is_list or rewards.shape[0] % num_samples):
    raise ValueError(
      f"`rewards` must be [N, {num_samples}], or [Q] with Q a multiple of "
      f"num_samples, {num_samples}, got {list(rewards.shape)}."
    )
  if mask is None:
    mask = jnp.ones(rewards.shape, bool)
  is_used = array_checks.as_mask("mask", mask, rewards, ", one for each reward")
  _check_finite(rewards, is_used)
  shape = rewards.shape
  is_used = is_used.reshape(-1, num_samples)
  rewards = rewards.astype(jnp.float32).reshape(-1, num_samples)
  # The first used reward is subtracted, so equal rewards become zeros. The mean
  # of zeros is exact, but the mean of other equal floats can be rounded.
  first = jnp.argmax(is_used, axis=1, keepdims=True)
  rewards = rewards - jnp.take_along_axis(rewards, first, axis=1)
  rewards = jnp.where(is_used, rewards, 0)
  return rewards, is_used.astype(jnp.float32), shape


def _check_finite(rewards: jax.Array, is_used: jax.Array) -> None:
  """Raises ValueError for a NaN or an infinity that the host can read."""
  is_readable = all(
    arguments.is_concrete(array) and array.is_fully_addressable
    for array in (rewards, is_used)
  )
  if not is_readable:
    return
  is_wrong = np.asarray(is_used) & ~np.isfinite(np.asarray(rewards, np.float64))
  if is_wrong.any():
    index = np.argwhere(is_wrong)[0].tolist()
    raise ValueError(
      f"`rewards` must be finite, got {np.asarray(rewards)[tuple(index)]} at "
      f"{index}; leave the sample out with `mask`."
    )
