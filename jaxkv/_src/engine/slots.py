"""The slots of a rollout: the sequence in each slot of the cache."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays import indexing
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.pool import recurrent
from jaxkv._src.cache.prefix.prefix_rules import next_kept_end
from jaxkv._src.cache.state import CacheState
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.queue.queue import Queue


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
  """B slots, each with at most one running sequence.

  Attributes:
    row: the row of the queue with the slot's sequence; Q for none.
      # int32[B]
    leader: the slot that computes the prompt that this slot waits to fork; B if
      it does not wait.  # int32[B]
  """

  row: Array
  leader: Array

  @property
  def size(self) -> int:
    """B, the number of slots."""
    return self.row.shape[0]

  @property
  def no_slot(self) -> int:
    """B, the sentinel for no slot."""
    return self.size


def init_slots(num_slots: int, queue: Queue) -> Slots:
  """Returns slots without sequences."""
  return Slots(
    row=jnp.full((num_slots,), queue.no_row, jnp.int32),
    leader=jnp.full((num_slots,), num_slots, jnp.int32),
  )


def are_computing(queue: Queue, slots: Slots) -> Array:
  """Returns bool[B], slots with a sequence that does not wait to fork."""
  return (slots.row < queue.no_row) & (slots.leader == slots.no_slot)


def are_followed(slots: Slots) -> Array:
  """Returns bool[B], slots that are the leader of another slot."""
  # Slots without a leader write to the extra entry.
  followed = jnp.zeros((slots.size + 1,), bool)
  return followed.at[slots.leader].set(True)[: slots.size]


def missing_tokens(queue: Queue, slots: Slots, cache: CacheState) -> Array:
  """Returns the number of tokens that each slot has to compute, int32[B]."""
  missing = given_tokens(queue, slots.row) - cache.length
  return jnp.where(are_computing(queue, slots), missing, 0)


def given_tokens(queue: Queue, rows: Array) -> Array:
  """Returns the tokens of queue rows that the model has to compute, int32[...].

  They are all but the last token of a sequence that samples none.
  """
  length = indexing.take(queue.length, rows)
  if queue.log_probs_from is None:
    return length
  limit = indexing.take(queue.limit, rows, fill=1)
  return jnp.minimum(length, limit - 1)


def prompt_rest(queue: Queue, slots: Slots, cache: CacheState) -> Array:
  """Returns int32[B], the tokens to compute before samples fork from a slot.

  Forks share all but the last token of a prompt, which each sample computes for
  the logits. The number is negative if the whole prompt is computed.
  """
  return indexing.take(queue.prompt_length, slots.row) - 1 - cache.length


def chunk_size(cache_config: CacheConfig, config: RolloutConfig) -> int:
  """Returns the maximum number of tokens of a sequence in a step.

  It is at most a page with recurrent groups without a `StateRetention`. With
  groups that skip pages, such as sliding windows, the maximum bounds the pages
  that a sequence holds. With other groups, only the number of columns in a call
  limits the tokens.
  """
  has_states = recurrent.has_states(cache_config)
  if has_states and cache_config.state_retention is None:
    return min(config.prefill_chunk, cache_config.page_size)
  if cache_config.skips_pages:
    return config.prefill_chunk
  return cache_config.slot_tokens


def limit_to_chunk(
  cache: CacheState, missing: Array, config: RolloutConfig
) -> Array:
  """Returns the number of missing tokens that a step may compute, int32[B].

  With recurrent groups, a step stops at the end of a page if the state there is
  kept.
  """
  cache_config = cache.config
  tokens = jnp.minimum(missing, chunk_size(cache_config, config))
  if not recurrent.has_states(cache_config):
    return tokens
  if cache_config.state_retention is not None:
    hashes = cache.hashes
    assert hashes is not None  # Requires prefix caching.
    next_end = next_kept_end(cache_config, cache.length, hashes)
    return jnp.minimum(tokens, next_end - cache.length)
  tail_tokens = elementwise.remainder(cache.length, cache_config.page_size)
  return jnp.minimum(tokens, cache_config.page_size - tail_tokens)


def slots_of(queue: Queue, slots: Slots, rows: Array) -> Array:
  """Returns bool[B], slots whose row is in `rows`, int32[R]; ignores row Q."""
  is_same = (slots.row[:, None] == rows[None]) & (rows < queue.no_row)[None]
  return jnp.any(is_same, axis=1)
