"""Who gets pages when there are not enough for all."""

import jax.numpy as jnp
from jax import Array
from jax import lax


def in_order(
  need: Array, asked: Array, available: Array, keep: Array | None = None
) -> Array:
  """Serves rows one after the other, passing over those that do not fit.

  Every trip of the loop settles all rows up to the first that does not fit,
  and every later one that needs more than what is left at that point. One trip
  is enough when all fit, and two when no row needs more than one page.

  Args:
    need: int32[R], pages a row needs, none negative.
    asked: bool[R], rows that want to be served.
    available: int32[].
    keep: int32[R], pages that must be left when a row is served, none
      negative; None for none.

  Returns:
    bool[R].
  """
  # A sum of needs may not overflow; what can never fit needs no exact number.
  keep = jnp.zeros_like(need) if keep is None else keep
  never = asked & (need > available - keep)
  need, keep = (jnp.minimum(pages, available) for pages in (need, keep))

  def overdrawn(granted: Array) -> Array:
    taken = jnp.cumsum(jnp.where(granted, need, 0), dtype=jnp.int32)
    return granted & (taken > available - keep)

  def refuse(granted: Array) -> Array:
    first = jnp.argmax(overdrawn(granted))
    before = jnp.arange(need.shape[0]) < first
    left = available - jnp.sum(
      jnp.where(granted & before, need, 0), dtype=jnp.int32
    )
    return granted & (before | (need <= left - keep))

  return lax.while_loop(
    lambda granted: jnp.any(overdrawn(granted)), refuse, asked & ~never
  )
