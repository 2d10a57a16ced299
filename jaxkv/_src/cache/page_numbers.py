"""The numbers of the pages of all pools.

All pools share one numbering, so one array has an element for each page of
every pool. Pool p has the pages from `first_pages[p]` to `first_pages[p] +
sizes[p] - 1`. The first page of a pool is never given to a sequence. Page 0,
the first one of pool 0, is the null page of all page tables.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import elementwise


@dataclasses.dataclass(frozen=True)
class PageNumbers:
  """The numbers of the pages of P pools.

  Attributes:
    sizes: the pages of each pool, its first page included.
  """

  sizes: tuple[int, ...]

  @property
  def num_pools(self) -> int:
    """P, the number of pools."""
    return len(self.sizes)

  @functools.cached_property
  def total(self) -> int:
    """N, the pages of all pools together."""
    return sum(self.sizes)

  @functools.cached_property
  def first_pages(self) -> tuple[int, ...]:
    """The first page of each pool, which is never given to a sequence."""
    return (0, *itertools.accumulate(self.sizes[:-1]))

  def value_of(self, by_pool: Any, pages: Any) -> Any:
    """Reads the value of each page's pool.

    Args:
      by_pool: one value for each pool, [P].
      pages: int32[...]; a number out of range counts to the first or last pool.

    Returns:
      [...], or with one pool the scalar that is the value of all pages.
    """
    # P is small, so comparisons cost less than a gather.
    value = by_pool[0]
    for pool in range(1, self.num_pools):
      is_later = pages >= self.first_pages[pool]
      value = elementwise.where(is_later, by_pool[pool], value)
    return value

  def pool_of(self, pages: Array) -> Array:
    """Returns int32[...]: the pool of each page."""
    pools = range(self.num_pools)
    pool = self.value_of([jnp.int32(pool) for pool in pools], pages)
    return jnp.broadcast_to(pool, pages.shape)

  def are_given(self, pages: Any) -> Any:
    """Returns bool[...]: True for pages that a sequence can get."""
    is_given = (pages > 0) & (pages < self.total)
    for first_page in self.first_pages[1:]:
      is_given &= pages != first_page
    return is_given
