"""Chooses the slots that speculate in a step, limited by the free pages."""

from typing import Any
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.rollout import drafts
from jaxkv._src.rollout import slots
from jaxkv._src.rollout.drafts import Draft
from jaxkv._src.rollout.rows import rows_of
from jaxkv._src.rollout.state import RolloutState


class Guesses(NamedTuple):
  """Guessed tokens of each slot.

  Attributes:
    tokens: int32[B, K].
    counts: int32[B], the number of guesses.
    found: bool[B], slots with an n-gram match.
  """

  tokens: Array
  counts: Array
  found: Array


def guess(
  params: Any, state: RolloutState, draft: Draft | None
) -> Guesses | None:
  """Guesses the next tokens of slots that decode; None without speculation."""
  config, known = state.config, state.drafts
  if known is None:
    return None
  none = state.sequences.length.shape[0]
  asked = (slots.missing_tokens(state) == 1) & ~slots.followed(state)
  rows = jnp.where(asked, state.running, none)
  if draft is None:
    tokens, counts, found = drafts.propose(
      known, state.sequences, rows, asked, config
    )
  else:
    buffer = indexing.take(state.sequences.tokens, rows)
    tokens, counts = drafts.checked(
      draft(params, rows_of(state.sequences, state.user, rows), buffer),
      rows.shape[0],
      config,
    )
    found = asked & (counts > 0)
    counts = drafts.limited(known, state.sequences, rows, counts, config)
  counts = lax.cond(
    jnp.any(counts > 0),
    lambda: jnp.where(_fit(state, counts), counts, 0),
    lambda: counts,
  )
  return Guesses(tokens, counts, found)


def _fit(state: RolloutState, counts: Array) -> Array:
  """Returns bool[B], guesses that fit pages that no other slot needs now."""
  cache, sizes = state.cache, state.cache.config.sizes
  zero = jnp.zeros_like(counts)
  tokens = jnp.minimum(slots.missing_tokens(state), slots.tokens_at_once(state))
  stop = sizes.columns_for(cache.length + tokens, zero)
  more = sizes.columns_for(cache.length + tokens + counts, zero)
  more = jnp.maximum(more - jnp.maximum(stop, cache.num_pages), 0)
  runners = jnp.sum(slots.computing(state), dtype=jnp.int32)
  # A page for each of them to grow, too.
  room = cache.pool.queue.num_free - slots.needed_now(state)
  room -= runners * len(cache.config.groups)
  wanted = jnp.cumsum(jnp.sum(more, axis=1, dtype=jnp.int32), dtype=jnp.int32)
  return wanted <= room
