"""Checks the logits that a model returns, and casts them to float32."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays.arguments import check_shape

_FROM_MODEL = ", as `model` returns them"


def as_logits(logits: Array) -> Array:
  """Casts floats of any width to float32; raises TypeError for other types."""
  _check_floats(logits)
  return logits.astype(jnp.float32)


def check_logits(logits: Any, rows: int) -> None:
  """Checks that logits are floats [B, V] for B rows.

  Raises:
    TypeError: `logits` are not floats.
    ValueError: `logits` have another shape.
  """
  check_shape("logits", logits, (rows, "V"), _FROM_MODEL)
  _check_floats(logits)


def check_all_logits(logits: Any, columns: int) -> None:
  """Checks that logits are [1, C, V] for C columns, or raises ValueError."""
  meaning = ", as the model of `all_logits` returns"
  check_shape("logits", logits, (1, columns, "V"), meaning)


def _check_floats(logits: Any) -> None:
  if not jnp.issubdtype(logits.dtype, jnp.floating):
    raise TypeError(
      f"`logits` must be floats, got {logits.dtype}; let the model return its "
      "last layer's output."
    )
