"""How old cached pages are when they are evicted.

The unit of time is a published page (`PrefixIndex.clock`): which pages a cache
of another size would have kept does not depend on how fast pages fill.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.cache import ops

NUM_BINS = 33
"""The numbers of bits that a uint32 can have, 0 to 32."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Residency:
  """Ages of the pages evicted since `init`, in pages published meanwhile.

  Ages are counted by their number of bits: entry 0 is for age 0, entry i for
  ages of `2**(i - 1)` to `2**i - 1`. The difference of two readings, `later -
  earlier`, tells of the time between them.

  Attributes:
    lifetime: pages by their time since publication.  # uint32[33]
    idle: pages by their time in the free queue.  # uint32[33]
  """

  lifetime: Array
  idle: Array

  def __sub__(self, earlier: "Residency") -> "Residency":
    """What happened between two readings."""
    return jax.tree.map(lambda late, early: late - early, self, earlier)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PageAges:
  """Per-page timestamps, and the ages counted so far.

  Attributes:
    released: the clock when a page's last reference was given back.
      # uint32[N]
    evicted: the ages of evicted pages.
  """

  released: Array
  evicted: Residency


def init(num_pages: int) -> PageAges:
  """No page was evicted yet."""
  lifetime, idle = (jnp.zeros((NUM_BINS,), jnp.uint32) for _ in range(2))
  return PageAges(
    released=jnp.zeros((num_pages,), jnp.uint32),
    evicted=Residency(lifetime=lifetime, idle=idle),
  )


def released(
  ages: PageAges, pages: Array, valid: Array, clock: Array
) -> PageAges:
  """Stamps valid pages int32[W], all different, that became free."""
  count = (ages.evicted.idle[0] >> 1).astype(jnp.int32)
  place = ops.read_before(count, ops.where_valid(valid, pages))
  return dataclasses.replace(
    ages, released=ops.put(ages.released, place, values=clock)
  )


def evicted(
  ages: PageAges, pages: Array, valid: Array, stamps: Array, clock: Array
) -> PageAges:
  """Counts the ages of evicted pages.

  Args:
    ages: the ages so far.
    pages: int32[W], from the free queue.
    valid: bool[W], those that were cached until now.
    stamps: uint32[W], the clock when they were published.
    clock: uint32[], the clock now.
  """
  since = ops.take(ages.released, pages)
  counts = ages.evicted
  return dataclasses.replace(
    ages,
    evicted=Residency(
      lifetime=_counted(counts.lifetime, clock - stamps, valid),
      idle=_counted(counts.idle, clock - since, valid),
    ),
  )


def _counted(counts: Array, age: Array, valid: Array) -> Array:
  bits = jnp.int32(32) - lax.clz(age).astype(jnp.int32)
  place = ops.where_valid(valid, bits)
  return ops.add(counts, place, values=jnp.uint32(1))
