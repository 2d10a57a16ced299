"""Array operations of the cache: gather, scatter, windows of work, XLA idioms.

Gathers and scatters are bounds-safe. JAX wraps negative indices to the end of
an array and clamps large ones to its edge; either turns a sentinel into another
sequence's page. Here an index outside of its axis, on either side, reads as
`fill` and writes nothing.

`for_each` walks over ranges of different lengths in windows of a fixed width.
The cost follows the number of items, not the shapes; for no items it is one
comparison.
"""

import functools
from collections.abc import Callable
from typing import Any
from typing import NamedTuple
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

NOWHERE = 2**30
"""An index outside of every array of the cache."""

WINDOW = 128
"""Items of one trip of `for_each`, W: one trip is the common case."""

Carry = TypeVar("Carry")


def where_valid(valid: Array, index: Array) -> Array:
  """The index where `valid`, NOWHERE elsewhere."""
  return jnp.where(valid, index, jnp.int32(NOWHERE))


def take(array: Array, *index: Array, fill=0) -> Array:
  """`array[index]`, and `fill` for an index outside of its axis."""
  return array.at[index].get(
    mode="fill", fill_value=fill, wrap_negative_indices=False
  )


def put(array: Array, *index: Array, values) -> Array:
  """`array[index] = values`; an index outside of its axis writes nothing.

  Indices inside must differ from each other: two writes to one element have
  no defined winner.
  """
  return array.at[index].set(values, mode="drop", wrap_negative_indices=False)


def add(array: Array, *index: Array, values) -> Array:
  """`array[index] += values`, duplicates added up."""
  return array.at[index].add(values, mode="drop", wrap_negative_indices=False)


def put_max(array: Array, *index: Array, values) -> Array:
  """`array[index] = max(array[index], values)`."""
  return array.at[index].max(values, mode="drop", wrap_negative_indices=False)


def put_min(array: Array, *index: Array, values) -> Array:
  """`array[index] = min(array[index], values)`."""
  return array.at[index].min(values, mode="drop", wrap_negative_indices=False)


class SlotRows(NamedTuple):
  """The slots that the rows of a call are for.

  Attributes:
    slots: int32[R], any numbers.
    every: whether the rows are all slots in order, R = B. Reads and writes are
      whole arrays then, without a gather or a scatter.
    skipped: bool[R], masked out.
    bad: bool[R], out of range, or named by an earlier row that counts.
  """

  slots: Array
  every: bool
  skipped: Array
  bad: Array

  def read(self, array: Array) -> Array:
    """Each row's entry of an array by slots; zeros for bad rows."""
    return array if self.every else take(array, self.slots)

  def write(self, array: Array, valid: Array, values: Array) -> Array:
    """The array by slots, with the entries of valid rows replaced.

    Args:
      array: [B, ...].
      valid: bool[R].
      values: [R, ...], or one value for all rows.
    """
    values = jnp.broadcast_to(values, (*valid.shape, *array.shape[1:]))
    if self.every:
      valid = valid.reshape(-1, *(1,) * (array.ndim - 1))
      return jnp.where(valid, values, array)
    return put(array, self.where(valid), values=values)

  def where(self, valid: Array) -> Array:
    """int32[R]: the slots of valid rows, NOWHERE for the others."""
    return where_valid(valid, self.slots)


def between(start: Array, stop: Array, size: int) -> Array:
  """bool[..., size]: the positions `start .. stop`, int32[...] both."""
  position = jnp.arange(size, dtype=jnp.int32)
  position = position.reshape(*(1,) * start.ndim, size)
  return (position >= start[..., None]) & (position < stop[..., None])


def num_earlier(values: Array) -> Array:
  """The number of earlier elements that are equal to each element.

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


def any_earlier(values: Array, counts: Array) -> Array:
  """bool[X]: whether an equal element with `counts` stands before each one.

  Compares all pairs; `num_earlier` sorts.

  Args:
    values: int32[X].
    counts: bool[X], the elements that later ones are compared with.
  """
  same = values[:, None] == values[None, :]
  earlier = jnp.tril(jnp.ones(same.shape, bool), k=-1)
  return jnp.any(same & earlier & counts[None, :], axis=1)


def zeros_like(array: Array) -> Array:
  """Zeros (False for bool) that vary over the same mesh axes as an array.

  A loop's carry must vary over the same axes of a `shard_map` at its start as
  after a trip. `jnp.zeros_like` makes a constant, which varies over none.
  """
  return array & False if array.dtype == jnp.bool_ else array ^ array


def alike(tree: Any) -> Any:
  """Makes all arrays vary over every mesh axis that one of them varies over.

  Inside `shard_map` the carry of a loop must not start to vary on the way. A
  state made inside the shard is at first the same on all devices and tokens are
  not, or the other way round. Outside of `shard_map` nothing is done.
  """
  axes = frozenset().union(*map(_axes, jax.tree.leaves(tree)))
  if not axes:
    return tree

  def widened(leaf: Any) -> Any:
    missing = tuple(axes - _axes(leaf))
    return lax.pcast(leaf, missing, to="varying") if missing else leaf

  return jax.tree.map(widened, tree)


def _axes(leaf: Any) -> frozenset[str]:
  return jax.typeof(leaf).manual_axis_type.varying


def quotient(number: Array, divisor: int) -> Array:
  """`number // divisor` for numbers that are not negative.

  One operation; `//` rounds down, for which XLA computes signs and remainders.
  """
  if divisor & (divisor - 1) == 0:
    return number >> (divisor.bit_length() - 1)
  return lax.div(number, lax.full_like(number, divisor))


def remainder(number: Array, divisor: int) -> Array:
  """`number % divisor` for numbers that are not negative; see `quotient`."""
  if divisor & (divisor - 1) == 0:
    return number & (divisor - 1)
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
  return jnp.where(read >= 0, index, jnp.int32(NOWHERE))


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

  start = alike((condition, carry))
  return lax.while_loop(lambda loop: loop[0], trip, start)[1]


class Items(NamedTuple):
  """A window of items.

  Attributes:
    row: int32[W], the range that the item belongs to.
    offset: int32[W], its 0-based position in that range.
    valid: bool[W], False past the last item.
  """

  row: Array
  offset: Array
  valid: Array


def locate(counts: Array, item: Array) -> Items:
  """The ranges and offsets of items.

  Args:
    counts: int32[X], the items in each range.
    item: int32[W], 0-based positions among all items.
  """
  ends = jnp.cumsum(counts, dtype=jnp.int32)
  # XLA:CPU would repeat an unrolled search for each use of `row`. On an
  # accelerator a loop would be one launch for each step.
  row = lax.platform_dependent(
    ends,
    item,
    cpu=functools.partial(_num_ended, unroll=False),
    default=functools.partial(_num_ended, unroll=True),
  )
  begin = take(ends, row - 1)  # 0 for the first.
  return Items(row, item - begin, (item >= 0) & (item < ends[-1]))


def _num_ended(ends: Array, item: Array, *, unroll: bool) -> Array:
  """int32[W]: how many of the ascending ends are at most each item."""
  size = ends.shape[0]
  steps = size.bit_length()

  def halve(step: Array, count: Array) -> Array:
    more = count + (jnp.int32(1 << (steps - 1)) >> step)
    end = ends.at[more - 1].get(mode="clip")
    return jnp.where((more <= size) & (end <= item), more, count)

  return lax.fori_loop(0, steps, halve, zeros_like(item), unroll=unroll)


def for_each(
  counts: Array,
  body: Callable[[Carry, Items], Carry],
  carry: Carry,
  *,
  window: int | None = None,
) -> Carry:
  """Folds `body` over windows of all items, in order.

  Args:
    counts: int32[X], the items in each range, none negative.
    body: takes the carry and a window of items, returns the carry.
    carry: any pytree of arrays.
    window: W, the items of one trip; None for WINDOW.
  """
  width = window or WINDOW
  total = jnp.sum(counts, dtype=jnp.int32)
  lanes = jnp.arange(width, dtype=jnp.int32)

  def trip(loop):
    begin, carry = loop
    return begin + width, body(carry, locate(counts, begin + lanes))

  _, carry = lax.while_loop(
    lambda loop: loop[0] < total, trip, (zeros_like(total), carry)
  )
  return carry
