"""Serves running requests, one or many in one call."""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.host import allocate
from jaxkv._src.host.cache_pages import CachePages
from jaxkv._src.host.demand import Demand
from jaxkv._src.host.demand import check_length
from jaxkv._src.host.publish import publish
from jaxkv._src.host.request import tokens_of
from jaxkv._src.host.state import HeldSequence
from jaxkv._src.host.state import HostState


def step(
  state: HostState,
  running: Sequence[Any],
  num_new_tokens: Any,
  num_lookahead_tokens: int,
) -> list[CachePages | None]:
  """Runs `CacheManager.step`."""
  if not isinstance(running, Sequence):
    raise TypeError(f"`running` must be a list of requests, got {running!r}.")
  num_lookahead_tokens = as_count(
    "num_lookahead_tokens", num_lookahead_tokens, 0
  )
  if not running:
    return []
  rows = _rows(state, running, num_new_tokens, num_lookahead_tokens)
  for _, held, demand in rows:
    allocate.drop_behind(state, held, demand.num_computed)
  plans = [allocate.grow(state, held, demand) for _, held, demand in rows]
  for plan, (_, held, demand) in zip(plans, rows, strict=True):
    if plan is not None:
      publish(state, held, demand.publish)
  no_pages = CachePages(tuple([] for _ in state.groups))
  results: list[CachePages | None] = [no_pages] * len(running)
  for plan, (row_index, held, _) in zip(plans, rows, strict=True):
    new = None if plan is None else allocate.new_pages(state, held, plan)
    results[row_index] = new
  return results


def _rows(
  state: HostState,
  running: Sequence[Any],
  num_new_tokens: Any,
  num_lookahead_tokens: int,
) -> list[tuple[int, HeldSequence, Demand]]:
  """Calls `advance_quietly` for each request.

  Returns:
    The place, sequence and demand of each request that is not served yet.
  """
  rows: list[tuple[int, HeldSequence, Demand]] = []
  names: set[str] = set()
  counts = _new_tokens(num_new_tokens, len(running))
  for request, count in zip(running, counts, strict=True):
    name = request.request_id
    held = state.held.get(name)
    if held is None:
      raise not_held(name)
    if name in names:
      raise ValueError(
        f"`running` must name each request once, got {name!r} again."
      )
    demand = advance_quietly(state, held, request, count, num_lookahead_tokens)
    if demand is not None:
      rows.append((len(names), held, demand))
    names.add(name)
    state.set_request(held, request)
  return rows


def advance_quietly(
  state: HostState,
  held: HeldSequence,
  request: Any,
  num_new_tokens: int,
  num_lookahead_tokens: int,
) -> Demand | None:
  """Serves a running request if it pops, frees and fills no page.

  Returns:
    None if the request was served; else its demand.
  """
  # This code runs for every request in every step, so it makes few calls.
  options = state.options
  computed = request.num_computed_tokens
  if computed.__class__ is not int or computed < 0:
    computed = as_count("num_computed_tokens", computed, 0)
  num_tokens = computed + num_new_tokens
  if num_tokens > options.max_model_len:
    check_length(options, request.request_id, num_tokens)
  room = num_tokens + num_lookahead_tokens
  final = len(tokens_of(request))
  if final > num_tokens:
    final = num_tokens
  # A call is quiet if an allocation would only set the length.
  length, page_size = held.length, state.config.page_size
  is_quiet = room <= held.room and (
    final <= length or final // page_size == length // page_size
  )
  if state.skipping:
    in_flight = getattr(request, "num_in_flight_tokens", 0)
    if in_flight.__class__ is not int or in_flight < 0:
      in_flight = as_count("num_in_flight_tokens", in_flight, 0)
    computed = max(computed - in_flight, 0)
    is_quiet = is_quiet and not _frees_pages(state, held, computed)
  if not is_quiet:
    room = min(room, options.max_model_len)
    return Demand(
      num_computed=computed, room=room, tokens=num_tokens, publish=final
    )
  if final > length:
    # Faster than `save_attribute`, which looks the value up.
    state.undo_log.record((setattr, held, "length", length))
    held.length = final
  return None


def _frees_pages(
  state: HostState, held: HeldSequence, num_computed: int
) -> bool:
  """True if a held page is outside a window after `num_computed` tokens."""
  # Groups of the same kind and page size skip the same columns.
  for group in state.skipping_kinds:
    if group.skipped_pages(num_computed) > held.skipped[group.number]:
      return True
  return False


def not_held(name: str) -> KeyError:
  """Returns the error for a request that holds no page."""
  return KeyError(f"{name!r} holds no page; call allocate_slots for it.")


def _new_tokens(num_new_tokens: Any, num_running: int) -> Iterable[int]:
  """Returns the number of new tokens of each request."""
  if isinstance(num_new_tokens, int):
    return [as_count("num_new_tokens", num_new_tokens, 1)] * num_running
  counts = np.asarray(num_new_tokens)
  if counts.dtype.kind not in "iu":
    raise TypeError(f"`num_new_tokens` must be ints, got {num_new_tokens!r}.")
  if counts.shape not in ((), (num_running,)):
    raise ValueError(
      f"`num_new_tokens` must be one number, or one for each of {num_running} "
      f"requests, got an array of shape {counts.shape}."
    )
  as_count("num_new_tokens", counts.min(), 1)
  return np.broadcast_to(counts, (num_running,)).tolist()
