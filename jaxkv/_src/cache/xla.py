"""Idioms that XLA needs, each with its name and its reason."""

from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from jax import Array
from jax import lax

Carry = TypeVar("Carry")

_NEVER = 2**30


def zeros_like(array: Array) -> Array:
  """Zeros (False for bool) that vary over the same mesh axes as an array.

  A loop's carry must vary over the same axes of a `shard_map` at its start as
  after a trip. `jnp.zeros_like` makes a constant, which varies over none.
  """
  return array & False if array.dtype == jnp.bool_ else array ^ array


def quotient(number: Array, divisor: int) -> Array:
  """`number // divisor` for numbers that are not negative.

  One operation; `//` rounds down, for which XLA computes signs and remainders.
  """
  return lax.div(number, lax.full_like(number, divisor))


def remainder(number: Array, divisor: int) -> Array:
  """`number % divisor` for numbers that are not negative; see `quotient`."""
  return lax.rem(number, lax.full_like(number, divisor))


def read_before(read: Array, index: Array) -> Array:
  """The index of an update, made to depend on what was read before it.

  XLA updates an array in place only if every earlier read of it is known to be
  done. A read whose result does not lead to the indices of the update is not
  known to be, and then XLA copies the whole array, at every step of a loop.
  `lax.optimization_barrier` does not help; a true dependency does.

  Args:
    read: int32[], computed from what was read, never negative.
    index: int32[...], where the update writes.

  Returns:
    The index. XLA cannot tell that the comparison always holds.
  """
  return jnp.where(read >= 0, index, jnp.int32(_NEVER))


def at_most_once(
  condition: Array, body: Callable[[Carry], Carry], carry: Carry
) -> Carry:
  """`lax.cond(condition, body, identity, carry)` that updates in place.

  XLA copies the operands of a conditional and runs the body of a loop in
  place, so this is a loop of at most one trip.

  Args:
    condition: bool[].
    body: takes and returns the carry.
    carry: any pytree of arrays.
  """

  def trip(loop: tuple[Array, Carry]) -> tuple[Array, Carry]:
    going, carry = loop
    return zeros_like(going), body(carry)

  return lax.while_loop(lambda loop: loop[0], trip, (condition, carry))[1]
