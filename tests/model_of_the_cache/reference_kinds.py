"""What each kind of group finds, skips, reserves and keeps (SEMANTICS 4.5-8).

A kind is told by the name of its class, sizes by their attribute names, so
that nothing of the library is imported here.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from tests.model_of_the_cache.reference_request import Request

Find = Callable[[int], list[int] | None]
"""Place of a page in its sequence -> cached pages, one for each group."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """Sizes and options of a manager that all of its groups share.

  Attributes:
    classic: the K rules of the text, else its C rules.
    caching: whether pages are published and found.
    eagle: whether a draft model needs the last page computed again.
    hybrid: whether there are several groups.
    hash_size: tokens a key, the gcd of the page sizes.
    align: the scheduler's block size, their lcm.
    max_model_len: tokens of the longest sequence.
    max_in_flight: tokens that steps in flight may still write.
    retention: see `ReferenceManager`.
  """

  classic: bool
  caching: bool
  eagle: bool
  hybrid: bool
  hash_size: int
  align: int
  max_model_len: int
  max_in_flight: int
  retention: int | None


def name(group: Any) -> str:
  """The kind of a group."""
  return type(group).__name__


def ceil_div(tokens: int, size: int) -> int:
  """Pages of `size` for so many tokens."""
  return -(-tokens // size)


# --- recycling and admission --------------------------------------------------


def skipped_tokens(group: Any, tokens: int) -> int:
  """Leading tokens that nothing behind the first `tokens` looks at."""
  match name(group):
    case "SlidingWindow":
      return max(0, tokens - group.window + 1)
    case "ChunkedLocal":
      return tokens // group.chunk * group.chunk
    case "Recurrent":
      return tokens - 1
    case _:
      return 0


def admission_cap(group: Any, rules: Rules) -> int | None:
  """Most pages that a sequence holds at once; None for no such bound."""
  longest, size = rules.max_model_len, group.page_size
  match name(group):
    case "SlidingWindow":
      tokens = group.window - 1 + rules.max_in_flight
      return ceil_div(min(tokens, longest), size) + 1
    case "ChunkedLocal":
      return ceil_div(min(group.chunk + rules.max_in_flight, longest), size)
    case _:
      return None


# --- lookup -------------------------------------------------------------------


def lookup(
  group: Any, find: Find, limit: int, drop: bool, rules: Rules
) -> list[list[int] | None]:
  """Columns of the longest hit of at most `limit` tokens; None is no page.

  Args:
    group: its kind.
    find: cached pages of a place, or None.
    limit: tokens; with `drop` one page more is looked at than is returned.
    drop: whether the last page found is left out.
    rules: sizes; a hit ends at a multiple of `align`.
  """
  columns = limit // group.page_size
  match name(group):
    case "FullAttention":
      return _lookup_full(group, find, columns, drop, rules)
    case "SlidingWindow":
      return _lookup_window(group, find, columns, drop, rules)
    case "ChunkedLocal":
      return _lookup_chunk(group, find, limit, columns)
    case "Recurrent":
      return _lookup_state(group, find, columns, rules)
    case other:
      raise NotImplementedError(other)


def _leading(find, start, end):
  found = []
  for place in range(start, end):
    pages = find(place)
    if pages is None:
      break
    found.append(pages)
  return found


def _aligned(columns, group, rules):
  while len(columns) * group.page_size % rules.align:
    columns = columns[:-1]
  return columns


def _lookup_full(group, find, columns, drop, rules):
  found = _leading(find, 0, columns)
  if drop:
    found = found[:-1]
  return _aligned(found, group, rules)


def _lookup_window(group, find, columns, drop, rules):
  """Scans from the end for as many pages in a row as the window needs."""
  need = window_pages(group) + drop
  slots, run = [None] * columns, 0
  for place in range(columns - 1, -1, -1):
    pages = find(place)
    if pages is None:
      run = 0
      continue
    edge = place if drop and not rules.classic else place + 1
    if run == 0 and edge * group.page_size % rules.align:
      continue
    slots[place] = pages
    run += 1
    # Not ==: a window of one token needs no page and still ends at one.
    if run >= need:
      slots = slots[: place + run]
      break
  else:
    slots = _aligned(slots[:run], group, rules)
  if drop:
    slots = _aligned(slots[:-1], group, rules)
  return slots


def _lookup_chunk(group, find, limit, columns):
  """Pages of the last chunk, and none of the chunks before.

  Where no chunk ends at a page, the text returns prefixes of which it has not
  looked at a page that is needed; here they are shorter.
  """
  first = limit // group.chunk * group.chunk // group.page_size
  found = [None] * first + _leading(find, first, columns)
  while found:
    needed = skipped_tokens(group, len(found) * group.page_size)
    places = range(needed // group.page_size, len(found))
    pages = {place: found[place] or find(place) for place in places}
    if None not in pages.values():
      return [pages.get(place) for place in range(len(found))]
    found.pop()
  return []


def _lookup_state(group, find, columns, rules):
  """The last state that is cached; a draft model has none, so none drops."""
  for place in range(columns - 1, -1, -1):
    if (place + 1) * group.page_size % rules.align:
      continue
    pages = find(place)
    if pages is not None:
      return [*([None] * place), pages]
  return []


# --- reachability -------------------------------------------------------------


def window_pages(group: Any) -> int:
  """Pages before a token that its window can reach into."""
  return ceil_div(group.window - 1, group.page_size)


def reachable(group: Any, place: int, request: Request, rules: Rules) -> bool:
  """Whether the page at a place can ever be part of a hit (C only)."""
  if rules.classic:
    return True
  match name(group):
    case "SlidingWindow":
      return _window_reachable(group, place, request, rules)
    case "Recurrent":
      return _state_reachable(group, place, request, rules)
    case _:
      return True


def _window_reachable(group, place, request, rules):
  shift = int(rules.eagle)
  need = window_pages(group) + shift
  segment = rules.align if rules.retention is None else rules.retention
  if segment:
    period = segment // group.page_size
    if need >= period:
      return True
    if place >= shift and (place - shift) % period >= period - need:
      return True
  if rules.retention is None:
    return False
  ends = [
    _aligned_page(tokens, group, rules) + shift
    for tokens in _boundaries(group, request, rules)
  ]
  return any(end - need <= place < end for end in ends)


def _state_reachable(group, place, request, rules):
  if rules.retention is None:
    return True
  if rules.retention:
    period = rules.retention // group.page_size
    if (place + 1) % period == 0:
      return True
  return any(
    place == _aligned_page(tokens, group, rules) - 1
    for tokens in _boundaries(group, request, rules)
  )


def _aligned_page(tokens, group, rules):
  return tokens // rules.align * rules.align // group.page_size


def _boundaries(group, request, rules):
  """Where the same or a longer prompt, or a shared one, would go on."""
  prompt, align = request.num_prompt_tokens, rules.align
  junction = request.shared_prefix_boundary
  if not rules.eagle:
    return [prompt - 1] + [junction] * (junction > 0)
  again = (prompt - 1) // align * align
  extended = prompt // align * align
  found = [max(again - align, 0), max(extended - align, 0)]
  if junction > 0:
    found += [junction, junction - group.page_size]
  return found
