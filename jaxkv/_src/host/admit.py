"""Admits requests that hold no page yet."""

from typing import Any

from jaxkv._src.host import prefix_lookup
from jaxkv._src.host.allocate import allocate
from jaxkv._src.host.arguments import Demand
from jaxkv._src.host.request import RequestFields
from jaxkv._src.host.state import HeldSequence
from jaxkv._src.host.state import HostState
from jaxkv._src.host.types import CachePages


def admit(
  state: HostState,
  request: Any,
  fields: RequestFields,
  hit: CachePages,
  num_found: int,
  demand: Demand,
) -> CachePages | None:
  """Gives a request a slot, the pages of its hit, and new pages.

  The pages of `hit` hold the first `num_found` tokens of the request.

  Returns:
    The new pages. None, with nothing changed, if the request has to wait.

  Raises:
    ValueError: the pages of the hit do not hold the request's tokens, or a
      token is not a 32-bit integer.
    RuntimeError: `max_requests` requests already hold pages.
  """
  config = state.config
  if not state.vacant:
    # The pool is too small for `max_requests` slots, so the request waits.
    if config.num_slots < state.limits.max_requests:
      return None
    raise RuntimeError(
      f"`max_requests` must be more than {config.num_slots} to admit another "
      "request; free a request first, or make the CacheManager with a larger "
      "number."
    )
  hashed = None
  if config.prefix_caching:
    hashed = hit.lookup
    if hashed is None or not hashed.serves(
      fields, demand.publish, state.secret
    ):
      hashed = prefix_lookup.hash_tokens(state, fields, demand.publish)
  if not prefix_lookup.holds_tokens(
    state, demand.hits, hashed, demand.num_computed
  ):
    raise ValueError(
      "`new_computed_pages` must hold the tokens that "
      f"{fields.request_id!r} begins with, got {hit}; look up the hit again."
    )
  # Added to `state.held` only after the allocation, which can fail.
  held = HeldSequence(
    fields.request_id,
    state.vacant[-1],
    tables=[[] for _ in state.groups],
    skipped=[0] * len(state.groups),
    request=request,
    prompt_length=fields.num_prompt_tokens,
    boundary=fields.shared_prefix_boundary or hit.shared_prefix_boundary,
  )
  pages = allocate(state, held, demand, demand.hits, hashed)
  if pages is None:
    return None
  state.undo_log.replace(state, vacant=state.vacant[:-1])
  state.undo_log.save_key(state.held, fields.request_id)
  state.held[fields.request_id] = held
  state.pool.count("queried_tokens", fields.num_tokens)
  state.pool.count("hit_tokens", num_found)
  if config.prefix_caching and not fields.skips_lookup:
    is_preempted = fields.status == "preempted"
    counted = state.statistics.counting(
      fields.num_tokens, num_found, is_preempted=is_preempted
    )
    state.undo_log.replace(state, statistics=counted)
  return pages
