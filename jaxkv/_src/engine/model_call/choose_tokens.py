"""Chooses the tokens that a step computes."""

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.cache.pool import recurrent
from jaxkv._src.engine import schedule
from jaxkv._src.engine.model_call.given_log_probs import are_recorded
from jaxkv._src.engine.schedule import Drafts
from jaxkv._src.engine.schedule import Work
from jaxkv._src.engine.slots import are_followed
from jaxkv._src.engine.slots import limit_to_chunk
from jaxkv._src.engine.slots import missing_tokens
from jaxkv._src.engine.slots import prompt_rest
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import widths_of


def plan_tokens(state: RolloutState) -> Work | None:
  """Chooses the tokens of the step, if their pages depend on them.

  Returns:
    The tokens, if every slot gets pages; None without a `StateRetention`, with
    which the running state gets a page only in the column of the last token.
  """
  if state.memory.cache.config.state_retention is None:
    return None
  no_slot = jnp.zeros(state.slots.row.shape, bool)
  return choose_tokens(state, starved=no_slot)


def choose_tokens(
  state: RolloutState,
  *,
  starved: Array,
  drafts: Drafts | None = None,
  planned: Work | None = None,
) -> Work:
  """Chooses the tokens of the step, or those of `planned` that have pages.

  Slots in `starved`, bool[B], got no page.
  """
  queue, slots, cache = state.queue, state.slots, state.memory.cache
  config = state.config
  widths = widths_of(state)
  missing = missing_tokens(queue, slots, cache)
  missing = jnp.where(starved, 0, missing)
  # A slot with followers stops before the last token of its prompt.
  is_followed = are_followed(slots)
  rest = jnp.minimum(prompt_rest(queue, slots, cache), missing)
  tokens = jnp.where(is_followed, rest, missing)
  tokens = limit_to_chunk(cache, tokens, config)
  if planned is not None:
    tokens = jnp.where(missing > 0, planned.counts, 0)
  work = schedule.schedule(
    tokens,
    (missing > 1) | is_followed,
    indexing.take(queue.place, slots.row),
    widths,
    None if drafts is None else drafts.counts,
    one_part=recurrent.has_states(cache.config),
    width=None if planned is None else planned.width,
    axis=config.lockstep_axis,
  )
  if queue.log_probs_from is not None and planned is None:
    records = jnp.any(are_recorded(queue, slots, cache, work.counts))
    work = schedule.with_records(work, widths, records, config.lockstep_axis)
  is_complete = (work.counts > 0) & (work.counts == missing)
  return work._replace(is_complete=is_complete)
