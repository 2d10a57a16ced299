"""Validates and packs the arguments of a manager's calls, unpacks results."""

import operator
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.state import CacheState
from jaxkv._src.host.request import KnownRequest
from jaxkv._src.host.request import int32s
from jaxkv._src.host.request import read_request
from jaxkv._src.host.request import salt_of
from jaxkv._src.host.request import tokens_of_all
from jaxkv._src.host.slots import RequestSlots
from jaxkv._src.host.step import CACHED
from jaxkv._src.host.step import Advanced
from jaxkv._src.host.step import Call
from jaxkv._src.host.types import CachePages

# Tokens for which calls are compiled, from one page up to the longest sequence;
# and 1, for many requests that decode together.
_WIDTHS = (64, 4096, 65536)
# The sum of two such numbers fits int64.
_MOST_TOKENS = 2**61
_ROW_OF = {name: row for row, name in enumerate(Call._fields)}
_NOWHERE = np.iinfo(np.int32).max


class Limits(NamedTuple):
  """The limits that a manager enforces."""

  config: CacheConfig  # sizes of its cache
  max_model_len: int  # tokens of the longest sequence
  max_encoder_tokens: int  # tokens of the longest encoder input
  keep_free: int  # pages that waiting requests leave free while others run
  most_pages: tuple[int, ...]  # of one sequence at once, by group


def at_least(name: str, value: int, least: int) -> int:
  """Returns the value as an int; raises if it is not one or is too small."""
  try:
    if isinstance(value, bool | np.bool_):
      raise TypeError
    number = operator.index(value)
  except TypeError:
    raise TypeError(
      f"`{name}` must be an int, got {value!r} of type {type(value).__name__}."
    ) from None
  if number < least:
    raise ValueError(f"`{name}` must be at least {least}, got {number}.")
  return number


def check_length(limits: Limits, name: str, length: int) -> None:
  """Raises if a sequence is too long."""
  if length > limits.max_model_len:
    raise ValueError(
      f"`max_model_len` is {limits.max_model_len}; {name!r} must have at most "
      f"as many tokens, got {length}."
    )


def allocation_fields(
  limits: Limits,
  request: KnownRequest,
  slot: int | None,
  hit: CachePages | None,
  *,
  delay_cache_pages: bool,
  full_sequence_must_fit: bool,
  has_scheduled_requests: bool,
  **counts: int,
) -> dict[str, int]:
  """Validates `allocate_slots` and returns its fields of `step.Call`."""
  found = counts["num_new_computed_tokens"]
  external = counts["num_external_computed_tokens"]
  _check_counts(limits, request, counts)
  _check_hit(limits.config, request, slot, found, hit)
  behind = request.num_computed_tokens + found + external
  total = behind + counts["num_new_tokens"]
  check_length(limits, request.request_id, total)
  in_flight = 0 if slot is None else request.num_in_flight_tokens
  known, most = request.num_tokens, limits.max_model_len
  boundary = hit.shared_prefix_boundary if hit is not None else 0
  waits = request.status in ("waiting", "preempted")
  return {
    "behind": max(behind - in_flight, 0),
    "external": external,
    "room": min(total + counts["num_lookahead_tokens"], most),
    "tokens": total,
    "encoder": counts["num_encoder_tokens"],
    "whole": min(known, most) if full_sequence_must_fit else 0,
    "keep_free": limits.keep_free if waits and has_scheduled_requests else 0,
    "reserved": min(counts["reserved_pages"], limits.config.num_pages),
    "publish": found if delay_cache_pages else min(total, known),
    "prompt_length": request.num_prompt_tokens,
    "boundary": request.shared_prefix_boundary or boundary,
  }


def _check_counts(
  limits: Limits, request: KnownRequest, counts: dict[str, int]
) -> None:
  for name, count in counts.items():
    at_least(name, count, 0)
  at_least("num_computed_tokens", request.num_computed_tokens, 0)
  at_least("num_in_flight_tokens", request.num_in_flight_tokens, 0)
  if counts["num_encoder_tokens"] > limits.max_encoder_tokens:
    raise ValueError(
      f"`num_encoder_tokens` must be at most {limits.max_encoder_tokens}, got "
      f"{counts['num_encoder_tokens']}; raise max_encoder_tokens (0 without a "
      "CrossAttention group)."
    )
  tokens = ("new", "new_computed", "external_computed")
  if not any(counts[f"num_{name}_tokens"] for name in tokens):
    raise ValueError(
      "`num_new_tokens`, found and external tokens must not all be 0, as for "
      f"{request.request_id!r}."
    )


def _check_hit(
  config: CacheConfig,
  request: KnownRequest,
  slot: int | None,
  found: int,
  hit: CachePages | None,
) -> None:
  """Raises for an impossible hit; the device compares the pages' tokens."""
  pages, name = _pages_of(config, request.request_id, hit), request.request_id
  if slot is not None and (found or any(pages)):
    raise ValueError(
      f"`new_computed_pages` of {name!r} must be empty, got {hit}: it holds "
      "pages already."
    )
  if slot is None and request.num_computed_tokens:
    raise ValueError(
      f"`num_computed_tokens` of {name!r} must be 0, got "
      f"{request.num_computed_tokens}: it holds no page."
    )
  if found % config.alignment:
    raise ValueError(
      f"`num_new_computed_tokens` of {name!r} must be a multiple of "
      f"{config.alignment}, as every hit is, got {found}."
    )
  wanted = [found // size for size in config.page_sizes]
  if [len(column) for column in pages or [()] * len(wanted)] != wanted:
    raise ValueError(
      f"`new_computed_pages` of {name!r} must have {wanted} pages for {found} "
      f"tokens, got {hit}."
    )


def _pages_of(
  config: CacheConfig, name: str, hit: CachePages | None
) -> tuple[list[int], ...]:
  if hit is None:
    return ()
  if not isinstance(hit, CachePages):
    raise TypeError(
      f"`new_computed_pages` of {name!r} must be CachePages or None, got "
      f"{hit!r}."
    )
  for column in hit.pages:
    _check_pages(config, name, column)
  return hit.pages


def _check_pages(config: CacheConfig, name: str, column: list[int]) -> None:
  try:
    pages, last = int32s(column), config.num_pages - 1
    if not column or (pages.min() >= 0 and pages.max() <= last):
      return
  except OverflowError:
    pages, last = column, config.num_pages - 1
  except TypeError as error:
    raise TypeError(
      f"`new_computed_pages` of {name!r} must be lists of page ids, got "
      f"{column!r}: {error}."
    ) from None
  raise ValueError(
    f"`new_computed_pages` of {name!r} must be 0 to {last}, got {column!r}."
  )


def pad_pages(pages: Sequence[int]) -> np.ndarray:
  """Returns int32[X]: the pages, then null pages."""
  out = np.zeros((width_for(len(pages)),), np.int32)
  out[: len(pages)] = pages
  return out


def width_for(count: int) -> int:
  """Returns one of a few widths, for each of which transitions compile."""
  width = 32
  while width < count:
    width *= 8
  return width


def check_groups(config: CacheConfig, groups: Sequence[int]) -> None:
  """Raises if a group does not exist."""
  if not all(group in range(config.num_groups) for group in groups):
    raise ValueError(
      f"`skip_zeroing_group_ids` must be 0 to {config.num_groups - 1}, got "
      f"{list(groups)}."
    )


def pack_step(
  limits: Limits,
  held: RequestSlots,
  running: Sequence[Any],
  num_new_tokens: Any,
  num_lookahead_tokens: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Validates `step`; returns slots int32[R], the array of `step.advance`."""
  if not isinstance(running, Sequence):
    raise TypeError(f"`running` must be a list of requests, got {running!r}.")
  config, slots = limits.config, held.slots_of(running)
  _within("num_lookahead_tokens", num_lookahead_tokens, 0)
  num_new = _new_tokens(num_new_tokens, len(running))
  written, computed = _progress(running, config.skips_pages)
  total = computed + num_new
  longest = int(total.argmax())
  check_length(limits, running[longest].request_id, int(total[longest]))
  tokens = tokens_of_all(running)
  publish = np.minimum(total, np.array([*map(len, tokens)], np.int32))
  padded = _pad_all(held, running, tokens, held.sent[slots], publish)
  fields = {
    "slots": slots,
    "behind": written,
    "room": np.minimum(total + num_lookahead_tokens, limits.max_model_len),
    "tokens": total,
    "publish": publish,
  }
  call = np.zeros((len(Call._fields), config.num_slots), np.int32)
  call[_ROW_OF["slots"]] = _NOWHERE  # Rows past `slots` have no slot.
  for name, values in fields.items():
    call[_ROW_OF[name], : len(slots)] = values
  return slots, np.concatenate([call.ravel(), padded.ravel()])


def _new_tokens(num_new_tokens: Any, num_running: int) -> np.ndarray:
  """Returns int64[R] or int64[]."""
  if isinstance(num_new_tokens, int):
    _within("num_new_tokens", num_new_tokens, 1)
    return np.asarray(num_new_tokens, np.int64)
  num_new = np.asarray(num_new_tokens)
  if num_new.dtype.kind not in "iu":
    raise TypeError(f"`num_new_tokens` must be ints, got {num_new_tokens!r}.")
  if num_new.shape not in ((), (num_running,)):
    raise ValueError(
      f"`num_new_tokens` must be one number, or one for each of {num_running} "
      f"requests, got an array of shape {num_new.shape}."
    )
  _within("num_new_tokens", num_new.min(), 1)
  _within("num_new_tokens", num_new.max(), 1)
  return num_new.astype(np.int64)


def _within(name: str, value: int, least: int) -> None:
  if at_least(name, value, least) > _MOST_TOKENS:
    raise ValueError(f"`{name}` must be at most {_MOST_TOKENS}, got {value}.")


def _progress(
  running: Sequence[Any], skips_pages: bool
) -> tuple[np.ndarray, np.ndarray]:
  """Returns int32[R] each: tokens written, and those including in-flight ones.

  Both are the same if no group frees pages behind a window.
  """
  try:
    computed = int32s([request.num_computed_tokens for request in running])
    written = computed
    if skips_pages:
      in_flight = [getattr(one, "num_in_flight_tokens", 0) for one in running]
      written = np.maximum(computed - int32s(in_flight), 0)
    if computed.min() >= 0:
      return written, computed
  except (OverflowError, TypeError):
    pass  # Raised below, with the name.
  for one in running:
    at_least("num_computed_tokens", one.num_computed_tokens, 0)
    at_least("num_in_flight_tokens", getattr(one, "num_in_flight_tokens", 0), 0)
  raise ValueError("`num_computed_tokens` must have at most 32 bits.")


def pack_lookup(
  held: RequestSlots, request: KnownRequest, stop: int, *, finds: bool = True
) -> np.ndarray:
  """Packs the array of `lookup.look_up`, for tokens up to `stop`.

  Without `finds` they are only hashed.
  """
  length = np.array([stop if finds else 0], np.int32)
  salt = np.frombuffer(salt_of(request, held.config.page_size), np.int32)
  return np.concatenate([length, salt, _pad_one(held, request, 0, stop)])


def pack_begin(
  held: RequestSlots,
  hit: CachePages | None,
  silent: Sequence[int] = (),
  **fields: int,
) -> np.ndarray:
  """Packs the array of `step.begin`."""
  config = held.config
  counts = np.zeros((config.num_groups,), np.int32)
  pages = np.zeros((config.num_groups, config.pages_per_slot), np.int32)
  for group, column in enumerate(hit.pages if hit else ()):
    pages[group, : len(column)] = column
    counts[group] = len(column)
  flags = _flags(config, silent)
  return np.concatenate([_numbers(fields), counts, pages.ravel(), flags])


def pack_one(
  held: RequestSlots,
  request: KnownRequest,
  silent: Sequence[int] = (),
  **fields: int,
) -> np.ndarray:
  """Packs the array of `step.advance` for one request that has a slot."""
  begin = int(held.sent[fields["slots"]])
  tokens = _pad_one(held, request, begin, fields.get("publish", 0))
  flags = _flags(held.config, silent)
  return np.concatenate([_numbers(fields), flags, tokens])


def _numbers(fields: dict[str, int]) -> np.ndarray:
  return np.array([fields.get(name, 0) for name in Call._fields], np.int32)


def _flags(config: CacheConfig, silent: Sequence[int]) -> np.ndarray:
  flags = np.zeros((config.num_groups,), np.int32)
  flags[list(silent)] = 1
  return flags


def _pad_one(
  held: RequestSlots, request: KnownRequest, begin: int, end: int
) -> np.ndarray:
  """Returns int32[T], tokens `begin .. end`, with T one of few widths."""
  config = held.config
  padded = np.zeros((_width(config, end - begin),), np.int32)
  if end > begin:
    padded[: end - begin] = held.content(request, begin, end)
  return padded


def _width(config: CacheConfig, count: int) -> int:
  longest, least = config.slot_tokens, max(count, config.page_size)
  return min(next(n for n in (*_WIDTHS, longest) if n >= least), longest)


def _pad_all(
  held: RequestSlots,
  running: Sequence[Any],
  tokens: Sequence[Sequence[int]],
  start: np.ndarray,
  stop: np.ndarray,
) -> np.ndarray:
  """Returns int32[B, T], tokens `start .. stop` of requests, int32[R] each.

  T is as for one request, or 1 if the tokens have no placeholders.
  """
  counts, num_rows = stop - start, len(held.sent)
  most = int(counts.max())
  if most <= 1 and not held.with_items:
    # Decoding: the newest token of each; a loop over rows is too slow.
    newest = np.zeros((num_rows, 1), np.int32)
    ends = zip(tokens, stop.tolist(), strict=True)
    # A request may have no token yet, only room for those to come.
    last = [sequence[end - 1] if end else 0 for sequence, end in ends]
    try:
      newest[: len(last), 0] = int32s(last)
      return newest
    except (OverflowError, TypeError):
      pass  # The loop below names the request, if its token counts.
  padded = np.zeros((num_rows, _width(held.config, most)), np.int32)
  for row in np.flatnonzero(counts > 0).tolist():
    begin, end = int(start[row]), int(stop[row])
    known = read_request(running[row])
    padded[row, : end - begin] = held.content(known, begin, end)
  return padded


def answers(
  slots: Sequence[int] | np.ndarray,
  out: Advanced,
  newest: Callable[[], CacheState],
) -> list[CachePages | None]:
  """Returns the new pages of each row, None if too few were free."""
  nothing = CachePages(tuple([] for _ in out.begin[0]))
  results: list[CachePages | None] = [nothing] * len(slots)
  counts = out.stop - out.begin
  if counts.max() > 0:
    _fill(results, slots, out, counts, newest)
  for row in np.flatnonzero(~out.ok[: len(slots)]):
    results[row] = None
  return results


def _fill(
  results: list[CachePages | None],
  slots: Sequence[int] | np.ndarray,
  out: Advanced,
  counts: np.ndarray,
  newest: Callable[[], CacheState],
) -> None:
  """Writes the pages of rows that have new ones, usually few."""
  rows = np.flatnonzero(counts.any(axis=1))
  counts = counts[rows]
  most = int(counts.max())
  if most > out.pages.shape[2]:
    told = _all_pages(newest(), np.asarray(slots)[rows], out.begin[rows], most)
  else:
    told = out.pages[rows, :, :most]
  told_of_rows = (told & (CACHED - 1)).tolist(), (told < CACHED).tolist()
  for row, count, pages, fresh in zip(
    rows.tolist(), counts.tolist(), *told_of_rows, strict=True
  ):
    new = tuple([own[:n] for own, n in zip(pages, count, strict=True)])
    unhashed = tuple(
      [
        [page for page, is_fresh in zip(own, flags, strict=False) if is_fresh]
        for own, flags in zip(new, fresh, strict=True)
      ]
    )
    results[row] = CachePages(new, unhashed)


def _all_pages(
  state: CacheState, slots: np.ndarray, begin: np.ndarray, most: int
) -> np.ndarray:
  """Returns all new pages of slots int32[R], like `Advanced.pages`."""
  table, index = np.asarray(state.page_table)[slots], state.pool.index
  columns = begin[..., None] + np.arange(most)
  columns = np.minimum(columns, table.shape[2] - 1)
  pages = np.take_along_axis(table, columns, axis=2)
  if index is None:
    return pages
  return pages + np.where(_contains(index, pages), np.int32(CACHED), 0)


_contains = jax.jit(prefix_index.contains)
