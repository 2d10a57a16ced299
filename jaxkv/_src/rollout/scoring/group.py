"""Scores the samples of one prompt, a chunk of tokens in each step.

Each step has these parts, in order; a part without work costs almost nothing:

| part    | action                                                          |
|---------|-----------------------------------------------------------------|
| begin   | the prompt takes an empty slot and its cached prefix            |
| share   | samples take empty slots and share the prompt's full pages      |
| grow    | reserves pages for the tokens of this step                      |
| compute | one call of the model, of the prompt or of samples              |
| commit  | the tokens become final; full pages are cached                  |
| free    | samples whose last token is scored return their pages           |

The last row is the prompt's, and the last sample continues in its slot. The
others are computed in order, each as far as the columns of a call reach, so at
most one is incomplete and holds pages that another may lack. Recurrent layers
stop at the end of a page; with them all samples advance together.

If pages do not suffice, all are freed, and the samples are computed one by one
in the slot of the prompt.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.arrays import sharding
from jaxkv._src.cache.pool import recurrent
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import is_empty
from jaxkv._src.cache.state import rows_of
from jaxkv._src.cache.steps.find import find_prefix
from jaxkv._src.cache.verbs.admit import admit_found
from jaxkv._src.cache.verbs.allocate import make_room
from jaxkv._src.cache.verbs.commit import commit
from jaxkv._src.cache.verbs.fork import owed_copies
from jaxkv._src.cache.verbs.fork import share_prefix
from jaxkv._src.cache.verbs.free import drop_behind
from jaxkv._src.cache.verbs.free import free
from jaxkv._src.kv.pools import Pools
from jaxkv._src.kv.pools import copy as copy_pages
from jaxkv._src.rollout import packing
from jaxkv._src.rollout import sequences as queue
from jaxkv._src.rollout.scoring.scored import Given
from jaxkv._src.rollout.scoring.scored import Scored

_OUT_OF_PAGES = np.int32(Status.OUT_OF_PAGES)


class Group(NamedTuple):
  """State of a group; K rows, the last of which is the prompt's.

  Attributes:
    cache: the cache.
    kv: its memory.
    scored: the results of all groups so far.
    number: int32[], the index of the group.
    slots: int32[K], the slot of each row; B for none.
    samples: int32[K], the sample in each row; G for none.
    fresh: bool[K], samples that share the prompt's full pages, but lack a copy
      of its partly full page.
    waits: bool[G], samples without a row that are not scored yet.
    holds: bool[], whether the prompt's slot has the prompt or a sample.
    alone: bool[], whether samples are computed one by one.
  """

  cache: CacheState
  kv: Pools
  scored: Scored
  number: Array
  slots: Array
  samples: Array
  fresh: Array
  waits: Array
  holds: Array
  alone: Array

  def runs(self) -> Array:
    """Returns bool[K], rows with a sample."""
    return self.samples < self.waits.shape[0]

  def lengths(self) -> Array:
    """Returns the number of computed tokens, int32[K]."""
    return indexing.take(self.cache.length, self.slots)


class Turn(NamedTuple):
  """Tokens of a step.

  Attributes:
    starts: int32[K], tokens of each row that were computed before.
    counts: int32[K], tokens of each row in this step.
    prefills: bool[], True for the prompt's tokens, False for samples'.
  """

  starts: Array
  counts: Array
  prefills: Array


class Widths(NamedTuple):
  """Numbers of columns of a call.

  Attributes:
    prompt: columns of a call for a prompt.
    samples: columns of a call for samples.
    rows: the maximum number of samples in a call.
    row: the maximum number of tokens of a row, by configuration.
    commit: the maximum number of tokens of a row that can occur.
  """

  prompt: int
  samples: int
  rows: int
  row: int
  commit: int


def num_rows(given: Given) -> int:
  """Returns K, the number of samples in slots at once."""
  samples, slots = given.lengths.shape[1], given.busy.shape[0]
  return min(samples, slots, packing.CHUNK_ROWS)


def widths_of(given: Given, cache: CacheState, chunk: int) -> Widths:
  """Returns the columns of calls of at most `chunk` tokens."""
  longest, every = given.completions.shape[2], num_rows(given)
  samples, row = min(chunk, every * longest), chunk
  # Attention pays for rows without tokens, too. So many fill the columns if
  # one is half done, and another one is short.
  rows = min(every, -(-samples // longest) + 2)
  if recurrent.has_states(cache.config):
    row, rows = min(chunk, cache.config.page_size), every
  prompt = min(row, max(given.prompts.shape[1] - 1, 1))
  return Widths(
    prompt=prompt,
    samples=samples,
    rows=rows,
    row=row,
    commit=max(prompt, min(row, longest)),
  )


def start(cache: CacheState, kv: Pools, scored: Scored, given: Given) -> Group:
  """Returns empty rows, before the first group."""
  rows, slots = num_rows(given), given.busy.shape[0]
  samples = given.lengths.shape[1]
  return Group(
    cache=cache,
    kv=kv,
    scored=scored,
    number=jnp.zeros((), jnp.int32),
    slots=jnp.full((rows,), slots, jnp.int32),
    samples=jnp.full((rows,), samples, jnp.int32),
    fresh=jnp.zeros((rows,), bool),
    waits=jnp.zeros((samples,), bool),
    holds=jnp.zeros((), bool),
    alone=jnp.zeros((), bool),
  )


def with_group(group: Group, number: Array, given: Given) -> Group:
  """Queues the samples of a group that have tokens, if its status is OK."""
  right = group.scored.code[number] == Status.OK
  return group._replace(
    # The loop's number is the same on all devices, and a shard's is not.
    number=sharding.zeros_like(group.number) + number,
    waits=(given.lengths[number] > 0) & right,
    alone=sharding.zeros_like(group.alone),
  )


def is_under_way(group: Group) -> Array:
  """Returns bool[], True if a sample is not scored yet."""
  return jnp.any(group.waits) | jnp.any(group.runs())


def step(
  group: Group,
  given: Given,
  widths: Widths,
  compute: Callable[[Group, Turn], Group],
) -> Group:
  """Runs one step; `compute` calls the model for the tokens of a turn."""
  begins = ~group.holds & ~jnp.any(group.runs())
  group = loops.at_most_once(begins, lambda group: _begin(group, given), group)
  last = given.prompt_lengths[group.number] - 1
  ready = group.holds & (group.lengths()[-1] == last) & ~jnp.any(group.runs())
  group = loops.at_most_once(ready, _share, group)
  group, turn = _grow(group, given, widths)
  group = compute(group, turn)
  return _finish(group, turn, given, widths)


def _begin(group: Group, given: Given) -> Group:
  """Admits the prompt to a slot, and reserves the others for its samples."""
  cache, number = group.cache, group.number[None]
  rows, none = group.slots.shape[0], given.busy.shape[0]
  slot = jnp.arange(none, dtype=jnp.int32)
  slots = queue.first_of(~given.busy & is_empty(cache, slot), rows)
  row = jnp.arange(rows, dtype=jnp.int32)
  slots = jnp.where(group.alone & (row > 0), none, slots)
  slots = jnp.roll(slots, -1)
  leader = slots[-1:]
  prompt = indexing.take(given.prompts, number)
  length = indexing.take(given.prompt_lengths, number)
  salts = None if given.salts is None else indexing.take(given.salts, number)
  cache, admitted = admit_found(
    cache,
    leader,
    length,
    lambda asked: find_prefix(cache, prompt, length, asked, salts),
    max_length=prompt.shape[1],
    skipped=leader == none,
    pops=False,
    num_tokens=jnp.ones_like(length),
  )
  code = jnp.where(leader == none, _OUT_OF_PAGES, admitted.code)[0]
  scored = group.scored
  found = indexing.add(
    scored.cached_tokens, number, values=admitted.num_cached_tokens
  )
  group = group._replace(
    cache=cache,
    scored=dataclasses.replace(scored, cached_tokens=found),
    slots=slots,
    holds=admitted.ok[0],
  )
  return _given_up(group, code)


def _given_up(group: Group, code: Array) -> Group:
  """Drops the samples of the group if `code` is not OK."""
  fails, none = code != Status.OK, group.waits.shape[0]
  codes = group.scored.code
  codes = codes.at[group.number].set(jnp.where(fails, code, 0))
  return group._replace(
    scored=dataclasses.replace(group.scored, code=codes),
    waits=group.waits & ~fails,
    samples=jnp.where(fails, none, group.samples),
  )


def _share(group: Group) -> Group:
  """Puts waiting samples into rows, on top of the prompt's full pages.

  The last sample continues in the prompt's slot, as does every sample if it is
  the only slot.
  """
  rows, none = group.slots.shape[0], group.waits.shape[0]
  row = jnp.arange(rows, dtype=jnp.int32)
  there = group.slots < group.cache.config.num_slots
  slots = jnp.sum(there, dtype=jnp.int32)
  waiting = jnp.sum(group.waits, dtype=jnp.int32)
  last = (waiting <= slots) | (slots == 1)
  forks = jnp.minimum(waiting - last.astype(jnp.int32), slots - 1)
  order = queue.first_of(group.waits, rows)
  own = jnp.where(last, indexing.take(order, forks, fill=none), none)
  fresh = row < forks
  samples = jnp.where(fresh, order, none).at[-1].set(own)
  cache = group.cache
  if rows > 1:
    source = jnp.broadcast_to(group.slots[-1:], (rows - 1,))
    cache = share_prefix(cache, source, group.slots[:-1], fresh[:-1])
  return group._replace(
    cache=cache,
    samples=samples,
    fresh=fresh,
    waits=indexing.put(group.waits, samples, values=False),
  )


def _targets(group: Group, given: Given) -> Array:
  """Returns the tokens that each row must compute in total, int32[K]."""
  prompt = given.prompt_lengths[group.number] - 1
  more = indexing.take(given.lengths, group.number, group.samples)
  row = jnp.arange(group.slots.shape[0], dtype=jnp.int32)
  holds = group.holds & (row == row.shape[0] - 1)
  return jnp.where(group.runs() | holds, prompt + more, 0)


def _grow(group: Group, given: Given, widths: Widths) -> tuple[Group, Turn]:
  """Reserves pages for the tokens of this step, and returns the tokens.

  If the first row with missing tokens gets no page, nothing is computed: see
  `_scarce`.
  """
  cache, slots = group.cache, group.slots
  config, starts = cache.config, group.lengths()
  prefills = group.holds & ~jnp.any(group.runs())
  missing = jnp.maximum(_targets(group, given) - starts, 0)
  rank = jnp.cumsum(missing > 0, dtype=jnp.int32)
  now = jnp.where(rank <= widths.rows, jnp.minimum(missing, widths.row), 0)
  if recurrent.has_states(config):
    begun = elementwise.remainder(starts, config.page_size)
    now = jnp.minimum(now, config.page_size - begun)
  before = jnp.cumsum(now, dtype=jnp.int32) - now
  most = jnp.where(prefills, widths.prompt, widths.samples)
  counts = jnp.clip(most - before, 0, now)
  rows = rows_of(cache, slots, counts > 0)
  cache, _ = drop_behind(cache, rows, starts, counts > 0)
  cache, room = make_room(cache, rows, counts)
  lacks = (counts > 0) & ~room.ok
  scarce = lacks[jnp.argmax(missing > 0)]
  counts = jnp.where(lacks | scarce, 0, counts)
  forked = group.fresh & (counts > 0)
  fresh = group.fresh & ~forked
  # They copy a page of the prompt, which its own sample would write.
  counts = counts.at[-1].set(jnp.where(jnp.any(fresh), 0, counts[-1]))
  kv = group.kv
  if slots.shape[0] > 1:
    source = jnp.broadcast_to(slots[-1:], slots[:-1].shape)
    owed = owed_copies(cache, source, slots[:-1], forked[:-1])

    def some(kv: Pools) -> Pools:
      return copy_pages(kv, *owed)

    kv = loops.at_most_once(jnp.any(forked), some, kv)
  group = group._replace(cache=cache, kv=kv, fresh=fresh)
  group = loops.at_most_once(scarce, _scarce, group)
  return group, Turn(starts, counts, prefills & ~scarce)


def _scarce(group: Group) -> Group:
  """Requeues samples to be computed one by one; fails if they already are."""
  none, rows = group.waits.shape[0], group.slots.shape[0]
  others = jnp.any(group.runs()[:-1])
  fails = group.alone | ~others
  group = group._replace(
    waits=indexing.put(group.waits, group.samples, values=True),
    samples=jnp.full((rows,), none, jnp.int32),
    alone=group.alone | True,
    holds=group.holds & False,
  )
  return _given_up(group, jnp.where(fails, _OUT_OF_PAGES, 0))


def _finish(group: Group, turn: Turn, given: Given, widths: Widths) -> Group:
  """Commits the tokens, and frees the rows that no sample needs."""
  cache, slots = group.cache, group.slots
  rows, none = slots.shape[0], group.waits.shape[0]
  column = jnp.arange(widths.commit, dtype=jnp.int32)[None]
  positions = turn.starts[:, None] + column
  samples = jnp.broadcast_to(group.samples[:, None], positions.shape)
  tokens = given.tokens(group.number, samples, positions)
  some = turn.counts > 0
  cache, _ = commit(cache, tokens, turn.counts, slots=slots, mask=some)
  total = jnp.sum(turn.counts, dtype=jnp.int32)
  scored = group.scored
  ended = group.runs() & (turn.starts + turn.counts == _targets(group, given))
  row = jnp.arange(rows, dtype=jnp.int32)
  leads = row == rows - 1
  holds = group.holds & ~ended[-1]
  keeps = (group.runs() & ~ended) | (leads & holds)
  leaving = ~keeps & (slots < cache.config.num_slots)
  cache, _ = free(cache, slots=slots, mask=leaving & ~is_empty(cache, slots))
  # One that shares a prompt without a full page holds none, but has its length.
  place = indexing.where_valid(leaving, slots)
  cache = dataclasses.replace(
    cache, length=indexing.put(cache.length, place, values=0)
  )
  return group._replace(
    cache=cache,
    scored=dataclasses.replace(
      scored,
      computed_tokens=scored.computed_tokens.at[group.number].add(total),
    ),
    samples=jnp.where(ended, none, group.samples),
    fresh=group.fresh & keeps,
    holds=holds,
  )
