"""match, admit: find cached prefixes, and start sequences that share them."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays.indexing import SlotRows
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Outcome
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import first_code
from jaxkv._src.cache.state import in_range
from jaxkv._src.cache.state import is_empty
from jaxkv._src.cache.state import mask_or_all
from jaxkv._src.cache.state import verb
from jaxkv._src.cache.stats import counted
from jaxkv._src.cache.steps.longest_hit import Prefix
from jaxkv._src.cache.steps.longest_hit import find_prefix
from jaxkv._src.cache.steps.reserve import reservation
from jaxkv._src.cache.steps.reserve import reserve


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Matched:
  """The result of `match`; P = T // S, the number of whole pages in T tokens.

  Attributes:
    num_cached_tokens: tokens of the longest cached prefix.  # int32[R]
    pages: the cached page of each column; NO_PAGE past the end of the prefix,
      and in columns that a group does not need. Offload page h has the number
      NO_PAGE + 1 + h.  # int32[R, G, P]
  """

  num_cached_tokens: Array
  pages: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Admitted(Outcome):
  """The result of `admit`; a row is OK if its slot got the sequence.

  Attributes:
    code: a `Status` for each sequence.  # int32[R]
    num_cached_tokens: the number of leading tokens whose K/V is cached. Prefill
      starts after these tokens.  # int32[R]
  """

  num_cached_tokens: Array


@verb
def match(
  state: CacheState,
  tokens: Array,
  lengths: Array,
  *,
  salts: Array | None = None,
  mask: Array | None = None,
) -> Matched:
  """Finds the longest cached prefix of every sequence.

  Only full pages are cached. A prefix has at most `length - 1` tokens, since
  the last token must be computed for its logits. All groups must be able to
  continue from the prefix. For this, a sliding-window group needs only the
  pages of the last window. Does not change the state or its counters.

  Args:
    state: the cache.
    tokens: int32[R, T], padded at the end.
    lengths: int32[R]; no prefix is found for a length outside of 1 .. T.
    salts: uint32[R, 4], see `salt`; sequences with different salts share no
      pages. None for no salt.
    mask: bool[R], the rows to process; None for all.

  Returns:
    The lengths of the prefixes, and their pages.

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> state, _ = jaxkv.allocate(state, [4])
    >>> state, _ = jaxkv.commit(state, [[7, 8, 9, 10]], [4])
    >>> jaxkv.match(state, [[7, 8, 9, 10]], [4]).num_cached_tokens.tolist()
    [2]
  """
  config = state.config
  prefix = find_prefix(state, tokens, lengths, mask_or_all(mask, tokens), salts)
  pages = prefix.attached_pages(config, tokens.shape[1] // config.page_size)
  return Matched(num_cached_tokens=prefix.num_cached_tokens, pages=pages)


@verb
def admit(
  state: CacheState,
  slots: Array,
  tokens: Array,
  lengths: Array,
  *,
  salts: Array | None = None,
  mask: Array | None = None,
  num_tokens: Array | None = None,
  keep_free: Array | None = None,
  shared_tokens: Array | None = None,
) -> tuple[CacheState, Admitted]:
  """Starts sequences in empty slots, each after its longest cached prefix.

  Attaches the pages of the prefix, which are shared and not copied, and
  allocates pages for the other tokens. Each hit in offload memory returns to a
  free page of the device. `length` becomes the number of cached tokens. The
  caller computes the K/V of the other tokens and commits them.

  Rows are served in order, each completely or not at all. A row that does not
  fit changes nothing, and a later row that needs fewer pages can still be
  served. A batch equals one call for each row in turn, except that:

  - all lookups see the cache as it was before the call;
  - the hits of all served sequences are attached before any page is popped, so
    no sequence evicts the hit of another sequence;
  - the second row with the same slot is refused, even if the first row is
    refused with OUT_OF_PAGES.

  Args:
    state: the cache.
    slots: int32[R], empty slots.
    tokens: int32[R, T], padded at the end.
    lengths: int32[R], 1 .. T.
    salts: uint32[R, 4], see `salt`; None for no salt.
    mask: bool[R], the rows to process; None for all.
    num_tokens: int32[R], at least 1. Pages are allocated for this number of
      tokens after the cached prefix, such as the first chunk of a prompt.
      `allocate` makes room for later chunks. None for all tokens.
    keep_free: int32[R], pages that must stay free in each pool after the row
      is served, as a reserve for running sequences (a watermark) or for later
      chunks of the prompt. None for 0.
    shared_tokens: int32[R, 2], tokens of two heads of the prompt that later
      prompts share, such as the shortest and the longest one. With a
      `StateRetention`, states are kept at their last page ends. 0 for no head;
      None for 0.

  Returns:
    The cache, and per row OK, SKIPPED, BAD_SLOT, SLOT_IN_USE (also for a
    repeated slot), BAD_LENGTH (`lengths`, `num_tokens`, `keep_free` or
    `shared_tokens` is out of range), SLOT_FULL or OUT_OF_PAGES.

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=2, pages_per_slot=4))
    >>> state, out = jaxkv.admit(state, [1], [[7, 8, 9, 10]], [4])
    >>> out.ok.tolist(), out.num_cached_tokens.tolist()
    ([True], [0])
    >>> state.page_table[1, 0].tolist()  # 8 is NO_PAGE
    [1, 2, 8, 8]
  """

  def find(asked: Array) -> Prefix:
    return find_prefix(state, tokens, lengths, asked, salts)

  return admit_found(
    state,
    slots,
    lengths,
    find,
    max_length=tokens.shape[1],
    skipped=~mask_or_all(mask, tokens),
    num_tokens=num_tokens,
    keep_free=None if keep_free is None else keep_free[:, None],
    shared_tokens=shared_tokens,
  )


def admit_found(
  state: CacheState,
  slots: Array,
  lengths: Array,
  find: Callable[[Array], Prefix],
  *,
  max_length: int,
  skipped: Array,
  pops: bool = True,
  num_tokens: Array | None = None,
  keep_free: Array | None = None,
  shared_tokens: Array | None = None,
) -> tuple[CacheState, Admitted]:
  """Admits sequences as `admit` does; `find` looks up their cached prefixes.

  Args:
    state: the cache.
    slots: int32[R].
    lengths: int32[R], 1 .. `max_length`.
    find: maps the rows to look up, bool[R], to the prefixes of all rows.
    max_length: the maximal number of tokens of a sequence.
    skipped: bool[R], the rows that are masked out.
    pops: False to attach the hits and to check that enough other pages are
      free, but not to pop these. A later `allocate.make_room` pops them. Until
      then, all other calls must leave this number of pages free.
    num_tokens: see `admit`.
    keep_free: int32[R, 1 or P], pages that must stay free in each pool after
      the row is served; None for 0.
    shared_tokens: see `admit`.
  """
  config = state.config
  num_tokens = lengths if num_tokens is None else num_tokens
  if keep_free is None:
    keep_free = jnp.zeros_like(lengths)[:, None]
  keep_free = jnp.broadcast_to(keep_free, (*lengths.shape, config.num_pools))
  bad_length = (jnp.minimum(lengths, num_tokens) < 1) | (lengths > max_length)
  bad_length |= jnp.any(keep_free < 0, axis=1)
  if shared_tokens is not None:
    bad_length |= jnp.any(shared_tokens < 0, axis=1)
  # A row reports the first case that applies. So the order is part of the API.
  code = first_code(
    (skipped, Status.SKIPPED),
    (~in_range(state, slots), Status.BAD_SLOT),
    (~is_empty(state, slots), Status.SLOT_IN_USE),
    (bad_length, Status.BAD_LENGTH),
    (lengths > config.slot_tokens, Status.SLOT_FULL),
  )
  # If a row is refused above, a later row can still get the same slot.
  repeated = ~skipped & indexing.any_earlier(slots, code == Status.OK)
  code = jnp.where(repeated, jnp.int32(Status.SLOT_IN_USE), code)
  asked = code == Status.OK
  prefix = find(asked)
  cached = prefix.num_cached_tokens
  # This is `min(cached + num_tokens, lengths)`, but the sum cannot overflow.
  room = cached + jnp.minimum(num_tokens, lengths - cached)
  # The arguments of refused rows can be out of range, so they are set to 0.
  plan = reservation(
    state,
    first=prefix.first,
    hit=prefix.stop,
    stop=config.sizes.columns_for(jnp.where(asked, room, 0)),
    begins=jnp.ones_like(asked),
  )
  rows = SlotRows(slots, False, skipped, repeated)
  state, code = reserve(
    state, rows, plan, code, hits=prefix.pages, keep_free=keep_free, pops=pops
  )
  is_served = code == Status.OK
  # A refused row reports 0 cached tokens; `write` leaves its slot unchanged.
  cached = jnp.where(is_served, cached, 0)
  state = dataclasses.replace(
    state,
    length=rows.write(state.length, is_served, cached),
    hashes=hashing.start_slots(
      state.hashes,
      rows,
      is_served,
      prefix.root,
      chain=prefix.chain,
      prompt_length=lengths,
      boundary=prefix.boundary,
      shared_tokens=shared_tokens,
    ),
    counts=counted(
      state.counts,
      queried_tokens=jnp.where(is_served, lengths, 0),
      hit_tokens=cached,
      unusable_tokens=jnp.where(
        is_served, jnp.maximum(prefix.boundary - cached, 0), 0
      ),
    ),
  )
  return state, Admitted(code=code, num_cached_tokens=cached)
