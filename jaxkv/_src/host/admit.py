"""Gives a request without pages a slot, its hit and its first pages."""

from typing import Any

from jaxkv._src.host import allocate
from jaxkv._src.host import lookup
from jaxkv._src.host.allocate import Demand
from jaxkv._src.host.lookup import HashedTokens
from jaxkv._src.host.request import RequestFields
from jaxkv._src.host.sequences import HeldSequence
from jaxkv._src.host.state import HostState
from jaxkv._src.host.types import CachePages


def admit(
  state: HostState,
  request: Any,
  fields: RequestFields,
  hit: CachePages | None,
  num_found: int,
  demand: Demand,
) -> CachePages | None:
  """Gives a request a vacant slot and its first pages, if all are free.

  Args:
    state: the state.
    request: the scheduler's object.
    fields: its attributes.
    hit: the result of its lookup; None for none.
    num_found: tokens of the hit.
    demand: the sizes.

  Raises:
    ValueError: the pages of the hit do not hold the request's tokens.
    RuntimeError: `max_requests` requests already hold pages.
  """
  if not state.vacant:
    _check_requests(state)
    return None
  hashed = _hashed(state, fields, hit, demand.publish)
  hits = hit.pages if hit is not None else tuple([] for _ in state.groups)
  if not lookup.holds_tokens(state, hits, hashed, demand.num_computed):
    raise ValueError(
      "`new_computed_pages` must hold the tokens that "
      f"{fields.request_id!r} begins with, got {hit}; look it up again."
    )
  # Nothing of the state has changed yet. If the pages do not fit, the new
  # object is dropped.
  held = HeldSequence(fields.request_id, state.vacant[-1], len(state.groups))
  held.request = request
  held.prompt_length = fields.num_prompt_tokens
  boundary = hit.shared_prefix_boundary if hit is not None else 0
  held.boundary = fields.shared_prefix_boundary or boundary
  pages = allocate.begin(state, held, request, hits, demand, hashed)
  if pages is None:
    return None
  log = state.undo_log
  # The slot is taken last, because a refused request must not use one up.
  log.save_list(state.vacant)
  state.vacant.pop()
  log.save_key(state.held, fields.request_id)
  state.held[fields.request_id] = held
  for name in ("num_queried", "num_hit", "statistics"):
    log.save_attribute(state, name)
  state.num_queried += fields.num_tokens
  state.num_hit += num_found
  if state.config.prefix_caching and not fields.skips_lookup:
    state.statistics = state.statistics.counting(
      fields.num_tokens, num_found, is_preempted=fields.status == "preempted"
    )
  return pages


def _hashed(
  state: HostState,
  fields: RequestFields,
  hit: CachePages | None,
  num_tokens: int,
) -> HashedTokens | None:
  """Returns a request's hashed first tokens, those of its lookup if valid."""
  if not state.config.prefix_caching:
    return None
  hashed = hit.lookup if hit is not None else None
  if hashed is not None and hashed.serves(fields, num_tokens):
    return hashed
  return lookup.hash_tokens(state, fields, num_tokens)


def _check_requests(state: HostState) -> None:
  """Raises if `max_requests`, and not the pool, limits the requests."""
  limit = state.limits.max_requests
  if state.config.num_slots == limit:
    raise RuntimeError(
      f"`max_requests` must be more than {limit} for this request to hold "
      "pages too; free one first, or make the CacheManager with a larger "
      "number."
    )
