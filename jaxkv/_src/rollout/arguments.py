"""Arguments of a rollout: cast to the library's dtypes, or refused by name."""

import operator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.cache.checks import check_shape

_INT32_MAX = 2**31 - 1


def as_logits(logits: Array) -> Array:
  """Logits, float32 whatever width the model computes in.

  Raises:
    TypeError: they are not floats.
  """
  _check_floats(logits)
  return logits.astype(jnp.float32)


def check_logits(logits: Any, rows: int) -> None:
  """Raises unless logits are what a `Model` returns, [B, V] for B rows.

  Raises:
    TypeError: they are not floats.
    ValueError: they have another shape.
  """
  check_shape("logits", logits, (rows, "V"), ", as `model` returns them")
  _check_floats(logits)


def _check_floats(logits: Any) -> None:
  if not jnp.issubdtype(logits.dtype, jnp.floating):
    raise TypeError(
      f"`logits` must be floats, got {logits.dtype}; let the model return its "
      "last layer's output."
    )


def check_all_logits(logits: Any, columns: int) -> None:
  """Raises unless logits are [1, C, V] for C columns.

  Raises:
    ValueError: they have another shape.
  """
  wanted = (1, columns, "V")
  check_shape(
    "logits", logits, wanted, ", as the model of `all_logits` returns"
  )


def last_logits(logits: Array, rows: int) -> Array:
  """Those of each row's last token, [B, V].

  Args:
    logits: [B, X, V], what a model returned.
    rows: B.

  Raises:
    ValueError: they have another shape.
  """
  check_shape("logits", logits, (rows, "X", "V"), ", as `model` returns them")
  return logits[:, -1]


def as_int(name: str, value: Any) -> int:
  """A static number, of Python or of NumPy.

  Raises:
    TypeError: it is not an int.
  """
  if isinstance(value, bool) or not isinstance(value, int | np.integer):
    raise TypeError(f"`{name}` must be an int, got {_static(value)}.")
  return operator.index(value)


def as_count(name: str, value: Any, least: int) -> int:
  """A static int32 of at least `least`.

  Raises:
    TypeError: it is not an int.
    ValueError: it is out of range.
  """
  count = as_int(name, value)
  if not least <= count <= _INT32_MAX:
    raise ValueError(
      f"`{name}` must be at least {least} and below 2**31, got {value}."
    )
  return count


def check_switch(name: str, value: Any) -> None:
  """Raises unless a static argument is a bool.

  Raises:
    TypeError: it is not.
  """
  if not isinstance(value, bool):
    raise TypeError(f"`{name}` must be True or False, got {_static(value)}.")


def _static(value: Any) -> str:
  """What was given for a static argument, in words."""
  if isinstance(value, Array):
    return "a jax.Array; it is static, so give a value of Python"
  return f"{value!r} of type {type(value).__name__}"
