"""What a verb's arguments must look like, checked when it is traced."""

import jax.numpy as jnp
from jax import Array


def check_array(
  name: str,
  value: Array,
  shape: tuple[int | str, ...] | None,
  dtype: jnp.dtype | type,
) -> None:
  """Raises ValueError unless an argument has the shape and dtype given.

  Args:
    name: the argument's name, for the message.
    value: the argument.
    shape: its sizes, a letter for any size but 0; None for any shape.
    dtype: its dtype.
  """
  letters = "..." if shape is None else ", ".join(map(str, shape))
  wanted = f"{jnp.dtype(dtype).name}[{letters}]"
  found_shape = getattr(value, "shape", None)
  found_dtype = getattr(value, "dtype", None)
  if found_shape is None or found_dtype is None:
    raise ValueError(
      f"{name} must be an array {wanted}, got {type(value).__name__}. "
      f"Wrap it in jnp.asarray(..., jnp.{jnp.dtype(dtype).name})."
    )
  if not _fits(found_shape, shape) or found_dtype != jnp.dtype(dtype):
    sizes = ", ".join(str(size) for size in found_shape)
    raise ValueError(f"{name} must be {wanted}, got {found_dtype}[{sizes}].")


def _fits(found: tuple[int, ...], wanted: tuple[int | str, ...] | None) -> bool:
  if wanted is None:
    return True
  return len(found) == len(wanted) and all(
    size > 0 if isinstance(least, str) else size == least
    for size, least in zip(found, wanted, strict=True)
  )


def check_sequences(tokens: Array, lengths: Array, salts: Array | None) -> None:
  """Checks the arguments that name R token sequences."""
  check_array("tokens", tokens, ("R", "T"), jnp.int32)
  check_array("lengths", lengths, (tokens.shape[0],), jnp.int32)
  if salts is not None:
    check_array("salts", salts, (tokens.shape[0], 4), jnp.uint32)


def mask_or_all(mask: Array | None, num_rows: int, letter: str) -> Array:
  """The mask bool[num_rows], all True for None."""
  if mask is None:
    return jnp.ones((num_rows,), bool)
  check_array(f"mask (a row of it for each {letter})", mask, (num_rows,), bool)
  return mask
