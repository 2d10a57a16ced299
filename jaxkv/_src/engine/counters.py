"""Counters of a rollout, in 64 bits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Count:
  """A count below 2**64, or an array of counts.

  It has two words, because JAX's integers have 32 bits by default. On the host,
  `int(count)` returns the value, and `numpy.asarray(count)` a uint64 array.

  Attributes:
    low: the count modulo 2**32.  # uint32[...]
    high: the count divided by 2**32, rounded down.  # uint32[...]

  Examples:
    >>> count = Count.zeros() + jnp.int32(2**31 - 1) + jnp.int32(2**31 - 1)
    >>> int(count + jnp.int32(7))
    4294967301
  """

  low: Array
  high: Array

  @classmethod
  def zeros(cls, shape: tuple[int, ...] = ()) -> "Count":
    """Returns zeros, in buffers that no other count shares."""
    return cls(
      low=jnp.zeros(shape, jnp.uint32), high=jnp.zeros(shape, jnp.uint32)
    )

  def __add__(self, count: Array) -> "Count":
    """Adds a non-negative int32[...]."""
    low = self.low + count.astype(jnp.uint32)
    # A sum that wrapped around is less than each of its terms.
    return Count(low=low, high=self.high + (low < self.low).astype(jnp.uint32))

  def since(self, earlier: "Count") -> Array:
    """Returns the difference from an earlier count, which must fit int32."""
    return (self.low - earlier.low).astype(jnp.int32)

  def modulo(self, modulus: int) -> Array:
    """Returns the remainder of the division by `modulus`, int32[...].

    Correct while `high * modulus` is below 2**32. With 10**6, this holds
    for counts below 2**44.
    """
    divisor = jnp.uint32(modulus)
    wrapped = self.high * jnp.uint32(2**32 % modulus) % divisor
    return ((wrapped + self.low % divisor) % divisor).astype(jnp.int32)

  def __int__(self) -> int:
    return int(np.asarray(self))

  def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
    del copy
    low, high = (np.asarray(x).astype(np.uint64) for x in (self.low, self.high))
    return np.asarray(low + (high << np.uint64(32)), dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
  """Totals and peaks since the start of a rollout.

  All but the peaks are 64-bit `Count`s: read them with `int(counters.steps)`,
  or with `numpy.asarray` for `calls` and for the counters of several rollouts.

  Attributes:
    steps: calls of the model. An iteration of the loop makes up to
      `RolloutConfig.decode_steps` calls.
    calls: calls of the model by width. A width is a number of columns beyond
      one for each slot: 0, a quarter of `prefill_chunk` if that is at least 64,
      or `prefill_chunk`. With speculation, these widths repeat for each number
      of draft columns: 0, a quarter of `draft_columns` if that is at least 2,
      or `draft_columns`. With `Requests.log_probs_from` the widths are 0, and
      `prefill_chunk` without and with logits of all columns; the first is
      missing if nothing is sampled.  # [X], for X widths
    rows: columns of all calls, including padding.
    generated: sampled tokens.
    prefilled: tokens of prompts and `extend` computed for the first time,
      except tokens from whose logits a token was sampled.
    recomputed: tokens computed again: after preemption, in a later turn, or
      with new weights.
    drafted: draft tokens that were computed.
    accepted: draft tokens that were accepted.
    forked: samples that forked a prompt that another sample computed.
    preempted: preemptions of running sequences. Samples that return to the
      queue because their leader was preempted, or because no page was free for
      their fork, do not count.
    peak_pages: maximum number of pages in use, with several pools the maximum
      of each pool.  # int32[] or int32[P]
    peak_shared: maximum of (page-table entries - pages in use).  # int32[]
  """

  steps: Count
  calls: Count
  rows: Count
  generated: Count
  prefilled: Count
  recomputed: Count
  drafted: Count
  accepted: Count
  forked: Count
  preempted: Count
  peak_pages: Array
  peak_shared: Array


def init_counters(num_widths: int, num_pools: int) -> Counters:
  """Returns zeros, with one entry of `calls` for each width."""
  names = [field.name for field in dataclasses.fields(Counters)]
  counts: dict[str, Any] = {name: Count.zeros() for name in names}
  counts["calls"] = Count.zeros((num_widths,))
  counts["peak_pages"] = jnp.zeros((num_pools,) * (num_pools > 1), jnp.int32)
  counts["peak_shared"] = jnp.zeros((), jnp.int32)
  return Counters(**counts)
