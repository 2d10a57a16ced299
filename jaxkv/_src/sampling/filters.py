"""Filters unlikely tokens: min-p, top-k and top-p.

Each of R rows is a distribution over V tokens. The weight of a token is its
probability, divided by that of the most likely token of the row. A filter keeps
the tokens whose weight is at least a cutoff, so nothing is sorted.

Top-k and top-p use the same search. Each token has an amount, which is 1 for
top-k, and its probability in units of 2**-30 for top-p. The search finds the
highest cutoff at which the amounts of the kept tokens sum to a target or more.

The search compares the bits of the weights as integers, which have the same
order as the weights. Each iteration reads all weights once and narrows the
interval of the cutoff, mostly to a quarter. The search ends after about ten
iterations, when the interval of each row has at most one distinct weight.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import sharding
from jaxkv._src.sampling import reductions

_ONE = 2**30
"""The probability 1 in units of 2**-30; also the bits of the float32 2.0."""

_NEVER_DRAWN = 2**26
"""The bits of a weight of about 1e-36, which is too small to be drawn."""

_IN_CACHE = 2**18
"""The number of weights that fit in the cache of a CPU core."""


def cutoff(
  weights: Array,
  *,
  min_p: Array | None = None,
  top_k: Array | None = None,
  top_p: Array | None = None,
) -> Array:
  """Returns the cutoff of each row: the filters keep weights >= the cutoff.

  Applies min-p, then top-k, then top-p. Top-p normalizes over the tokens that
  min-p and top-k keep. Tokens of equal weight are kept or dropped together, so
  a row can keep more than `top_k` tokens. A NaN makes a row's cutoff arbitrary.

  Every row of `weights`, float32[R, V], 0 .. 1, has a 1. The value that keeps
  all tokens is 0 for `min_p`, float32[R], below 1 or above V for `top_k`,
  int32[R], and 1 or more for `top_p`, float32[R]. The cutoff, float32[R], is 0
  if no filter applies.
  """
  weights, min_p, top_k, top_p = sharding.match_varying_axes(
    (weights, min_p, top_k, top_p)
  )
  # The zeros and the False values are computed from arguments, because in
  # `shard_map` they must vary over the mesh axes of `weights`.
  floor = _weight(_bits(weights[:, 0]) & 0) if min_p is None else min_p
  needs_search = floor < 0
  if top_k is not None:
    needs_search |= (top_k > 0) & (top_k < weights.shape[1])
  if top_p is not None:
    needs_search |= top_p < 1
  if top_k is None and top_p is None:
    return floor
  # The search is skipped at run time if top-k and top-p are off in every row.
  return lax.cond(
    jnp.any(needs_search),
    lambda: _search_in_parts(weights, floor, top_k, top_p),
    lambda: floor,
  )


def _search_in_parts(
  weights: Array, floor: Array, top_k: Array | None, top_p: Array | None
) -> Array:
  """Calls `_search_cutoff`; on a CPU, for a few rows at a time."""
  arrays = weights, floor, top_k, top_p
  rows, vocab_size = weights.shape
  rows_per_batch = max(1, _IN_CACHE // vocab_size)
  if rows <= 2 * rows_per_batch:
    return _search_cutoff(*arrays)

  def search_row(row: tuple[Array, ...]) -> Array:
    return _search_cutoff(*jax.tree.map(lambda array: array[None], row))[0]

  # A search reads the weights about ten times, and a CPU sums faster than it
  # reads from memory. So a CPU searches only about as many rows at once as fit
  # in its cache.
  return lax.platform_dependent(
    *arrays,
    cpu=lambda *arrays: lax.map(search_row, arrays, batch_size=rows_per_batch),
    default=_search_cutoff,
  )


def _search_cutoff(
  weights: Array, floor: Array, top_k: Array | None, top_p: Array | None
) -> Array:
  bits = _bits(floor)
  if top_k is not None:
    bits = _keep_count(weights, bits, top_k)
  if top_p is not None:
    bits = _keep_mass(weights, bits, top_p)
  return _weight(bits)


def _bits(weights: Array) -> Array:
  return lax.bitcast_convert_type(weights, jnp.int32)


def _weight(bits: Array) -> Array:
  return lax.bitcast_convert_type(bits, jnp.float32)


def _keep_count(weights: Array, floor: Array, top_k: Array) -> Array:
  """Returns the bits of the top-k cutoff, or `floor` if that is higher."""
  unit = jnp.int32(1)
  active = (top_k > 0) & (top_k < weights.shape[1])
  cutoff = _search(
    weights, unit, lambda _: unit, floor & 0, jnp.maximum(top_k, 1), active
  )
  return jnp.maximum(floor, cutoff)


def _keep_mass(weights: Array, floor: Array, top_p: Array) -> Array:
  """Returns the bits of the top-p cutoff over weights that `floor` keeps."""

  def search() -> Array:
    survivors = jnp.where(weights >= _weight(floor)[:, None], weights, 0)
    unit = _ONE / reductions.sums(survivors)
    amounts = _units(survivors, unit[:, None])

    def amount_of(lightest: Array) -> Array:
      return _units(_weight(lightest), unit)

    # The target is at least 1, because an empty set of tokens would reach 0.
    target = jnp.maximum((top_p * _ONE).astype(jnp.int32), 1)
    return _search(weights, amounts, amount_of, floor, target, top_p < 1)

  return lax.cond(jnp.any(top_p < 1), search, lambda: floor)


def _units(weights: Array, unit: Array) -> Array:
  return (weights * unit + 0.5).astype(jnp.int32)


def _search(
  weights: Array,
  amounts: Array,
  amount_of: Callable[[Array], Array],
  floor: Array,
  target: Array,
  active: Array,
) -> Array:
  """Returns the bits of the highest cutoff at which amounts reach a target.

  `amounts`, int32[R, V] or int32[], do not decrease with the weight, and
  `amount_of` maps the bits of weights, int32[R], to their amounts. At the bits
  `floor`, int32[R], the `target`, int32[R], at least 1, is reached. Rows that
  are not `active`, bool[R], get their floor.
  """
  # Invariant: the amounts of weights >= `low` reach the target, but the amounts
  # of weights >= `high` miss it. Initially `high` is 2.0, above all weights.
  high = jnp.where(active, jnp.int32(_ONE), floor)

  def trip(loop: tuple[Array, Array]) -> tuple[Array, Array]:
    low, high = loop
    pivots = _pivots(low, high)
    sums = _sums(weights, amounts, pivots)
    sum_at_low = jnp.full_like(low, 2**31 - 1)
    for pivot, sum_at_pivot in zip(pivots, sums, strict=True):
      reaches_target = sum_at_pivot >= target
      low = jnp.where(reaches_target, pivot, low)
      sum_at_low = jnp.where(reaches_target, sum_at_pivot, sum_at_low)
    for pivot, sum_at_pivot in zip(pivots[::-1], sums[::-1], strict=True):
      high = jnp.where(sum_at_pivot < target, pivot, high)
    # `low` is final if the target is missed without the lowest of the weights
    # >= `low`. The amount of this weight is at least `amount_of(low)`. A row is
    # also done if its cutoff is negligible, for example if fewer than `top_k`
    # weights are above 0.
    done = (sum_at_low - amount_of(low) < target) | (high <= _NEVER_DRAWN)
    return low, jnp.where(done, low, high)

  return lax.while_loop(
    lambda loop: jnp.any(loop[0] + 1 < loop[1]),
    trip,
    sharding.match_varying_axes((floor, high)),
  )[0]


def _pivots(low: Array, high: Array) -> list[Array]:
  """Returns the bits of three pivots in low .. high, ascending, int32[R]."""
  interval = high - low
  step = (interval >> 2) + 1
  # The first interval spans 128 powers of two, but most cutoffs are near its
  # upper end. So while `low` is 0, two pivots are near the upper end. The other
  # is near the lower end, to detect rows with a negligible cutoff.
  uneven = (
    low + (interval >> 5),
    high - (interval >> 4) - 2,
    high - (interval >> 6) - 2,
  )
  return [
    jnp.clip(jnp.where(low > 0, low + step * index, pivot + 1), low, high)
    for index, pivot in enumerate(uneven, start=1)
  ]


def _sums(
  weights: Array, amounts: Array, pivots: list[Array]
) -> tuple[Any, ...]:
  """Sums the amounts of weights >= each pivot, int32[R] for each pivot."""
  # A variadic reduction reads the weights only once. The amounts are integers,
  # because their sum is exact in any order, and because XLA does not vectorize
  # a variadic reduction of floats on a CPU.
  zero = jnp.int32(0)
  parts = [
    jnp.where(weights >= _weight(pivot)[:, None], amounts, zero)
    for pivot in pivots
  ]

  def add(left: tuple[Array, ...], right: tuple[Array, ...]) -> Any:
    return tuple(x + y for x, y in zip(left, right, strict=True))

  return lax.reduce(tuple(parts), (zero,) * len(parts), add, (1,))
