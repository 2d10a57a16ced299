"""Counters of a cache."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
  """Counters since `init`, each a uint32[], modulo 2**32.

  `later - earlier` counts the events between two readings, even if a counter
  wrapped around in between.

  Attributes:
    queried_tokens: tokens of admitted sequences.
    hit_tokens: cached tokens of admitted sequences.
    unusable_tokens: further tokens of these sequences that some groups had
      cached, but not all groups, such as keys and values without a state.
      `jaxkv.host` does not count them.
    popped_pages: pages popped from the free queue, except restored pages.
    evicted_pages: cached pages that the device evicted to reuse their memory.
    published_pages: full pages that were published or merged.
    merged_pages: full pages replaced by an equal cached page.
    failed_rows: rows whose code is neither OK nor SKIPPED.
    saved_pages: pages saved to offload memory. Only `jaxkv.stats` sets this and
      the following counters; they are None without offload pages.
    restored_pages: pages restored from offload memory.
    forgotten_pages: cached offload pages that saved pages overwrote.
    dropped_pages: cached pages that the device evicted and did not save.
  """

  queried_tokens: Array
  hit_tokens: Array
  unusable_tokens: Array
  popped_pages: Array
  evicted_pages: Array
  published_pages: Array
  merged_pages: Array
  failed_rows: Array
  saved_pages: Array | None = None
  restored_pages: Array | None = None
  forgotten_pages: Array | None = None
  dropped_pages: Array | None = None

  def __sub__(self, earlier: "Stats") -> "Stats":
    """Returns the counts between two readings."""
    return jax.tree.map(lambda end, start: end - start, self, earlier)


COUNTERS = tuple(
  field.name
  for field in dataclasses.fields(Stats)
  if field.default is dataclasses.MISSING
)
"""The names of the counters that every cache has, in the order of `counts`."""


def counted(counts: Array, **amounts: Array) -> Array:
  """Adds the sum of each keyword argument to the counter of the same name."""
  # One array of all counters, because an array for each would be one more small
  # kernel for each in every step.
  zero = jnp.zeros((), jnp.uint32)
  return counts + jnp.stack(
    [
      jnp.sum(amounts[name], dtype=jnp.uint32) if name in amounts else zero
      for name in COUNTERS
    ]
  )
