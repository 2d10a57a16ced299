"""Allocates for many running requests in one call."""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np

from jaxkv._src.host import allocate
from jaxkv._src.host.allocate import Demand
from jaxkv._src.host.arguments import at_least
from jaxkv._src.host.arguments import check_length
from jaxkv._src.host.publish import publish
from jaxkv._src.host.request import tokens_of
from jaxkv._src.host.sequences import HeldSequence
from jaxkv._src.host.state import HostState
from jaxkv._src.host.types import CachePages


class _Row(NamedTuple):
  """A request that needs pages, frees pages or fills pages in this step."""

  place: int  # among all requests of the step
  request: Any
  held: HeldSequence
  demand: Demand


def step(
  state: HostState,
  running: Sequence[Any],
  num_new_tokens: Any,
  num_lookahead_tokens: int,
) -> list[CachePages | None]:
  """Runs `CacheManager.step`."""
  if not isinstance(running, Sequence):
    raise TypeError(f"`running` must be a list of requests, got {running!r}.")
  at_least("num_lookahead_tokens", num_lookahead_tokens, 0)
  if not running:
    return []
  rows, results = _rows(state, running, num_new_tokens, num_lookahead_tokens)
  # Each of the three loops serves all requests, before the next loop begins.
  for row in rows:
    if row.held.tables[state.config.first_self_group]:
      allocate.drop_behind(state, row.held, row.demand.num_computed)
  plans = [allocate.grow(state, row.held, row.demand) for row in rows]
  served = [
    (row, plan)
    for row, plan in zip(rows, plans, strict=True)
    if plan is not None
  ]
  for row, _ in served:
    publish(state, row.held, row.request, row.demand.publish)
  for row, plan in served:
    results[row.place] = allocate.new_pages(state, row.held, plan)
  return results


def advance_one(
  state: HostState,
  held: HeldSequence,
  request: Any,
  num_new_tokens: int,
  num_lookahead_tokens: int,
) -> tuple[bool, CachePages | None]:
  """Allocates for a running request, if its numbers need no further check.

  Returns:
    True and the result of `allocate_slots`. Or, without a change, False and
    None, if `allocate_slots` must check the arguments.
  """
  computed, in_flight = request.num_computed_tokens, 0
  if state.skipping:
    in_flight = getattr(request, "num_in_flight_tokens", 0)
  for number in (num_new_tokens, num_lookahead_tokens, computed, in_flight):
    if number.__class__ is not int or number < 0:
      return False, None
  total, limits = computed + num_new_tokens, state.limits
  # With a watermark the status of the request matters, which is read elsewhere.
  if not num_new_tokens or total > limits.max_model_len or limits.keep_free:
    return False, None
  num_computed = max(computed - in_flight, 0)
  room = min(total + num_lookahead_tokens, limits.max_model_len)
  final = min(total, len(tokens_of(request)))
  if allocate.advance_quietly(state, held, num_computed, room, final):
    return True, CachePages(tuple([] for _ in state.groups))
  demand = Demand(
    num_computed=num_computed, room=room, tokens=total, publish=final
  )
  return True, allocate.advance(state, held, request, demand)


def _rows(
  state: HostState,
  running: Sequence[Any],
  num_new_tokens: Any,
  num_lookahead_tokens: int,
) -> tuple[list[_Row], list[CachePages | None]]:
  """Serves the requests that need no page; returns the others, and answers."""
  limits, by_name = state.limits, state.held
  longest = limits.max_model_len
  no_pages = CachePages(tuple([] for _ in state.groups))
  rows: list[_Row] = []
  results: list[CachePages | None] = []
  names: set[str] = set()
  # One loop over plain numbers serves the requests that need nothing else.
  counts = _new_tokens(num_new_tokens, len(running))
  for request, count in zip(running, counts, strict=True):
    name = request.request_id
    held = by_name.get(name)
    if held is None or name in names:
      raise _bad_name(name, is_held=held is not None)
    names.add(name)
    computed = request.num_computed_tokens
    if computed.__class__ is not int or computed < 0:
      computed = at_least("num_computed_tokens", computed, 0)
    total = computed + count
    if total > longest:
      check_length(limits, name, total)
    num_computed = computed
    if state.skipping:
      in_flight = getattr(request, "num_in_flight_tokens", 0)
      num_computed = max(
        computed - at_least("num_in_flight_tokens", in_flight, 0), 0
      )
    room = min(total + num_lookahead_tokens, longest)
    final = min(total, len(tokens_of(request)))
    if not allocate.advance_quietly(state, held, num_computed, room, final):
      demand = Demand(
        num_computed=num_computed, room=room, tokens=total, publish=final
      )
      rows.append(_Row(len(results), request, held, demand))
      results.append(None)
    else:
      results.append(no_pages)
    # The bridge reads the tokens of the newest object that a scheduler has
    # sent.
    held.request = request
  return rows, results


def _bad_name(name: str, *, is_held: bool) -> Exception:
  if is_held:
    return ValueError(
      f"`running` must name each request once, got {name!r} again."
    )
  return KeyError(f"{name!r} holds no page; call allocate_slots for it.")


def _new_tokens(num_new_tokens: Any, num_running: int) -> Iterable[int]:
  """Returns the new tokens of each request."""
  if isinstance(num_new_tokens, int):
    return [at_least("num_new_tokens", num_new_tokens, 1)] * num_running
  counts = np.asarray(num_new_tokens)
  if counts.dtype.kind not in "iu":
    raise TypeError(f"`num_new_tokens` must be ints, got {num_new_tokens!r}.")
  if counts.shape not in ((), (num_running,)):
    raise ValueError(
      f"`num_new_tokens` must be one number, or one for each of {num_running} "
      f"requests, got an array of shape {counts.shape}."
    )
  at_least("num_new_tokens", counts.min(), 1)
  return np.broadcast_to(counts, (num_running,)).tolist()
