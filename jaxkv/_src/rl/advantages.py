"""How much better an answer is than the others to its prompt."""

import jax
import jax.numpy as jnp

from jaxkv._src.arrays import arguments
from jaxkv._src.rl import per_token


def group_normalized(
  rewards: jax.Array,
  *,
  num_samples: int,
  mask: jax.Array | None = None,
  normalized: bool = True,
  eps: float = 1e-6,
) -> jax.Array:
  """Rewards minus the mean of their group, divided by its deviation.

  As in GRPO (Shao et al., 2024, section 4.1.2), with the deviation of a whole
  group, not of a sample of it. Without `normalized` they are not divided, as
  in Dr. GRPO (Liu et al., 2025).

  Args:
    rewards: floats, integers or bools [Q], those of a prompt side by side, as
      in a rollout.
    num_samples: G, the samples of each prompt; divides Q.
    mask: bool[Q], the samples there are; None for all.
    normalized: whether to divide.
    eps: added to the deviation.

  Returns:
    float32[Q]; 0 where `mask` is False, and where a group's rewards are equal.

  Raises:
    TypeError: `mask` is not bool, `num_samples` no int, or rewards are no real
      numbers.
    ValueError: an argument has the wrong shape.

  Examples:
    >>> group_normalized(jnp.array([1.0, 0.0, 0.9, 0.9]), num_samples=2)
    Array([ 0.999998, -0.999998,  0.      ,  0.      ], dtype=float32)
  """
  rewards, there = _groups(rewards, num_samples, mask)
  count = jnp.maximum(jnp.sum(there, axis=1, keepdims=True), 1)
  mean = jnp.sum(rewards, axis=1, keepdims=True) / count
  away = jnp.where(there > 0, rewards - mean, 0)
  if normalized:
    variance = jnp.sum(away * away, axis=1, keepdims=True) / count
    away = away / (jnp.sqrt(variance) + arguments.as_number("eps", eps))
  return away.ravel()


def leave_one_out(
  rewards: jax.Array, *, num_samples: int, mask: jax.Array | None = None
) -> jax.Array:
  """Rewards minus the mean of the others in their group.

  As in RLOO (Ahmadian et al., 2024, section 3.4).

  Args:
    rewards: floats, integers or bools [Q], those of a prompt side by side, as
      in a rollout.
    num_samples: G, the samples of each prompt; divides Q.
    mask: bool[Q], the samples there are; None for all.

  Returns:
    float32[Q]; 0 where `mask` is False, and for a sample without others.

  Raises:
    TypeError: `mask` is not bool, `num_samples` no int, or rewards are no real
      numbers.
    ValueError: an argument has the wrong shape.

  Examples:
    >>> leave_one_out(jnp.array([1.0, 0.0, 2.0]), num_samples=3)
    Array([ 0. , -1.5,  1.5], dtype=float32)
  """
  rewards, there = _groups(rewards, num_samples, mask)
  others = jnp.sum(there, axis=1, keepdims=True) - there
  rest = jnp.sum(rewards, axis=1, keepdims=True) - rewards
  known = (there > 0) & (others > 0)
  away = rewards - rest / jnp.where(known, others, 1)
  return jnp.where(known, away, 0).ravel()


def _groups(
  rewards: jax.Array, num_samples: int, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """Rewards, relative to one of their group, and a mask: float32[P, G].

  Relative ones, because a mean of equal numbers may differ from them. Rewards
  are 0 where the mask is 0.
  """
  num_samples = arguments.as_int("num_samples", num_samples)
  rewards = arguments.as_real("rewards", rewards)
  fits = num_samples > 0 and rewards.ndim == 1
  if not fits or rewards.shape[0] % num_samples:
    raise ValueError(
      f"`rewards` must be [Q], Q a multiple of num_samples, {num_samples}, got "
      f"{list(rewards.shape)}."
    )
  if mask is None:
    mask = jnp.ones(rewards.shape, bool)
  there = per_token.as_mask("mask", mask, rewards, ", one for each reward")
  there = there.reshape(-1, num_samples)
  rewards = rewards.astype(jnp.float32).reshape(-1, num_samples)
  first = jnp.argmax(there, axis=1, keepdims=True)
  rewards = rewards - jnp.take_along_axis(rewards, first, axis=1)
  return jnp.where(there, rewards, 0), there.astype(jnp.float32)
