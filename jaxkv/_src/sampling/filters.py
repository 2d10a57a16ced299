"""Which tokens are likely enough to be drawn: min-p, top-k and top-p.

A row has a weight for each token, 1 for the most likely one, in proportion to
their probabilities. What is kept are the tokens above some weight, the cutoff,
so nothing is sorted. The cutoff of top-k and that of top-p are searched for in
the same way: each token counts for a number, 1 for top-k and its probability
for top-p, and the tokens that are kept are the fewest heaviest ones whose sum
is large enough.

Weights are searched by their bits, for numbers that are not negative have the
order of their bits. A trip of the search reads all weights once and cuts the
interval into four. It ends when no row has two different tokens left in its
interval, after some ten trips. Sums are of integers: they are exact in any
order, and XLA vectorizes several of them at once on a CPU, which it does not do
for floats. Probabilities are counted in units of 2**-30.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import sharding
from jaxkv._src.sampling import reductions

_WHOLE = 2**30
"""A probability of 1; the bits of the weight 2.0."""

_NOTHING = 2**26
"""The bits of a weight that is never drawn, some 1e-36."""

_IN_CACHE = 2**18
"""Weights that a core of a CPU has in its cache."""


def cutoff(
  weights: Array,
  *,
  min_p: Array | None = None,
  top_k: Array | None = None,
  top_p: Array | None = None,
) -> Array:
  """The least weight of a token that may be drawn.

  Min-p is applied first, then top-k, then top-p. Top-p counts probabilities of
  the tokens that the other two keep. Equal weights are all kept or all left
  out, so more tokens than `top_k` may be kept, and more probability than
  `top_p`. A row in which a weight is NaN gets some cutoff.

  Args:
    weights: float32[R, V], 0 .. 1, with a 1 in every row.
    min_p: float32[R], the least weight; 0 for all.
    top_k: int32[R], how many tokens to keep; below 1, or V and more, for all.
    top_p: float32[R], their probability; 1 and more for all.

  Returns:
    float32[R]; 0 if nothing is asked for.

  Examples:
    >>> weights = jnp.asarray([[0.25, 1.0, 0.5, 0.125]])
    >>> least = cutoff(weights, top_k=jnp.asarray([2], jnp.int32))
    >>> (weights >= least[:, None]).tolist()
    [[False, True, True, False]]
  """
  weights, min_p, top_k, top_p = sharding.match_varying_axes(
    (weights, min_p, top_k, top_p)
  )
  least = _weight(_bits(weights[:, 0]) & 0) if min_p is None else min_p
  searched = least < 0
  if top_k is not None:
    searched |= (top_k > 0) & (top_k < weights.shape[1])
  if top_p is not None:
    searched |= top_p < 1
  if top_k is None and top_p is None:
    return least
  return lax.cond(
    jnp.any(searched),
    lambda: _search_in_parts(weights, least, top_k, top_p),
    lambda: least,
  )


def _search_in_parts(
  weights: Array, least: Array, top_k: Array | None, top_p: Array | None
) -> Array:
  """Like `_search_cutoff`, a few rows at a time if there are many weights."""
  arrays = weights, least, top_k, top_p
  rows, size = weights.shape
  some = max(1, _IN_CACHE // size)
  if rows <= 2 * some:
    return _search_cutoff(*arrays)

  def one(row: tuple[Array, ...]) -> Array:
    return _search_cutoff(*jax.tree.map(lambda array: array[None], row))[0]

  # From memory a CPU reads slower than it sums: a few rows stay in its cache.
  return lax.platform_dependent(
    *arrays,
    cpu=lambda *arrays: lax.map(one, arrays, batch_size=some),
    default=_search_cutoff,
  )


def _search_cutoff(
  weights: Array, least: Array, top_k: Array | None, top_p: Array | None
) -> Array:
  bits = _bits(least)
  if top_k is not None:
    bits = _keep_count(weights, bits, top_k)
  if top_p is not None:
    bits = _keep_mass(weights, bits, top_p)
  return _weight(bits)


def _bits(weights: Array) -> Array:
  return lax.bitcast_convert_type(weights, jnp.int32)


def _weight(bits: Array) -> Array:
  return lax.bitcast_convert_type(bits, jnp.float32)


def _keep_count(weights: Array, least: Array, top_k: Array) -> Array:
  """The cutoff of top-k, or `least` where that is higher."""
  one = jnp.int32(1)
  active = (top_k > 0) & (top_k < weights.shape[1])
  found = _search(
    weights, one, lambda _: one, least & 0, jnp.maximum(top_k, 1), active
  )
  return jnp.maximum(least, found)


def _keep_mass(weights: Array, least: Array, top_p: Array) -> Array:
  """The cutoff of top-p among the weights from `least` on."""

  def search() -> Array:
    kept = jnp.where(weights >= _weight(least)[:, None], weights, 0)
    unit = _WHOLE / reductions.sums(kept)
    amounts = _units(kept, unit[:, None])

    def own(lightest: Array) -> Array:
      return _units(_weight(lightest), unit)

    wanted = jnp.maximum((top_p * _WHOLE).astype(jnp.int32), 1)
    return _search(weights, amounts, own, least, wanted, top_p < 1)

  return lax.cond(jnp.any(top_p < 1), search, lambda: least)


def _units(weights: Array, unit: Array) -> Array:
  return (weights * unit + 0.5).astype(jnp.int32)


def _search(
  weights: Array,
  amounts: Array,
  own: Callable[[Array], Array],
  least: Array,
  wanted: Array,
  active: Array,
) -> Array:
  """The highest cutoff from which on the amounts sum to what is wanted.

  Args:
    weights: float32[R, V].
    amounts: int32[R, V] or int32[], what each token counts for; not less for
      heavier tokens.
    own: takes the bits of weights, and gives what each of them counts for.
    least: int32[R], a cutoff that is low enough.
    wanted: int32[R], at least 1.
    active: bool[R]; other rows keep `least`.

  Returns:
    int32[R], the bits of the cutoff.
  """
  # The sum from `low` on is at least what is wanted; from `high` on, less.
  high = jnp.where(active, jnp.int32(_WHOLE), least)

  def trip(loop: tuple[Array, Array]) -> tuple[Array, Array]:
    low, high = loop
    pivots = _pivots(low, high)
    sums = _sums(weights, amounts, pivots)
    total = jnp.full_like(low, 2**31 - 1)
    for pivot, found in zip(pivots, sums, strict=True):
      enough = found >= wanted
      low = jnp.where(enough, pivot, low)
      total = jnp.where(enough, found, total)
    for pivot, found in zip(pivots[::-1], sums[::-1], strict=True):
      high = jnp.where(found < wanted, pivot, high)
    # Without the lightest of them there is too little, or in any case: as where
    # few tokens are left to draw.
    done = (total - own(low) < wanted) | (high <= _NOTHING)
    return low, jnp.where(done, low, high)

  return lax.while_loop(
    lambda loop: jnp.any(loop[0] + 1 < loop[1]),
    trip,
    sharding.match_varying_axes((least, high)),
  )[0]


def _pivots(low: Array, high: Array) -> list[Array]:
  """Bits of three weights between two, int32[R] each, ascending.

  From 0 on, an interval has 128 powers of two, and the cutoff is most often one
  of the last few: so first there are two weights near its end, and one to see
  whether that many tokens have a weight at all.
  """
  size = high - low
  step = (size >> 2) + 1
  uneven = low + (size >> 5), high - (size >> 4) - 2, high - (size >> 6) - 2
  return [
    jnp.clip(jnp.where(low > 0, low + step * number, first + 1), low, high)
    for number, first in enumerate(uneven, start=1)
  ]


def _sums(
  weights: Array, amounts: Array, pivots: list[Array]
) -> tuple[Any, ...]:
  """For each pivot the sum of the amounts from it on, int32[R], in one pass."""
  zero = jnp.int32(0)
  parts = [
    jnp.where(weights >= _weight(pivot)[:, None], amounts, zero)
    for pivot in pivots
  ]

  def add(left: tuple[Array, ...], right: tuple[Array, ...]) -> Any:
    return tuple(one + other for one, other in zip(left, right, strict=True))

  return lax.reduce(tuple(parts), (zero,) * len(parts), add, (1,))
