"""Which items of a list were there before."""

import jax.numpy as jnp
from jax import Array
from jax import lax


def num_earlier(values: Array) -> Array:
  """How many earlier items are equal to each item.

  Args:
    values: int32[X].

  Returns:
    int32[X].
  """
  size = values.shape[0]
  if size == 0:
    return values
  order = jnp.argsort(values, stable=True).astype(jnp.int32)
  ordered = values[order]
  lanes = jnp.arange(size, dtype=jnp.int32)
  begins = jnp.concatenate([jnp.ones((1,), bool), ordered[1:] != ordered[:-1]])
  run = lax.cummax(jnp.where(begins, lanes, 0))
  return jnp.zeros_like(values).at[order].set(lanes - run)


def named_before(values: Array, counts: Array) -> Array:
  """bool[X]: whether an earlier item that counts is equal to each item."""
  same = values[:, None] == values[None, :]
  earlier = jnp.tril(jnp.ones(same.shape, bool), k=-1)
  return jnp.any(same & earlier & counts[None, :], axis=1)
