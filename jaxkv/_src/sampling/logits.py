"""Checks the logits that a model returns, and casts them to float32."""

from typing import Any

import jax.numpy as jnp
from jax import Array


def as_logits(logits: Array) -> Array:
  """Casts floats of any width to float32; raises TypeError for other types."""
  check_floats(logits)
  return logits.astype(jnp.float32)


def check_floats(logits: Any) -> None:
  """Raises TypeError unless logits are floats."""
  if not jnp.issubdtype(logits.dtype, jnp.floating):
    raise TypeError(
      f"`logits` must be floats, got {logits.dtype}; return the output of the "
      "model's last layer."
    )
