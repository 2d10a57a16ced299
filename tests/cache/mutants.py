"""Broken caches: one small mistake each, such as people make.

A mutant is a function of the library with wrong arguments or a wrong result
(`mutation.py`). The tests must tell every one from the real cache
(`test_mutants.py`); one that they cannot tell shows a behaviour that nothing
checks.
"""

from dataclasses import replace

import jax.numpy as jnp

from jaxkv import Status
from tests.cache import mutation
from tests.tools.mistakes import given
from tests.tools.mistakes import returned

FREE = ("free_mask",)
SWEEPS = ("free_mask", "free_slots", "truncate", "unpin")
LOOK = ("match",)
# Many sequences come and go, and what they leave is cached.
SHARING = (("admit", 30), ("commit", 24), ("free_mask", 16), ("free_slots", 16))
SHARING += (("evict", 0), ("fork", 0), ("new_epoch", 0), ("pin", 0))
SHARING += (("touch", 0),)
RECYCLE = ("recycle",)
COMMIT = ("commit",)
# Many share a page that waits for its key.
FORKS = (("fork", 30), ("admit", 2))
HOLES = (("evict", 24), ("match", 24), ("new_epoch", 0))
HOLES += (("reset_prefix_cache", 0),)


def _with_popped_pages(out, g):
  """The count of free pages includes those that were popped."""
  num_free = g.pool.queue.num_free
  return replace(out[0], queue=replace(out[0].queue, num_free=num_free)), out[1]


def _every_item_leaves(out, g):
  """Items count as pages that leave the queue, also those named twice."""
  count = jnp.sum(g.valid, dtype=jnp.int32)
  return replace(out[0], num_free=g.queue.num_free - count), count


def _counted_twice(pool, g):
  """References that a call added count twice."""
  return replace(pool, ref_count=2 * pool.ref_count - g.pool.ref_count)


def each_page_alone(chain_keys):
  """Every page has the key that it would have as the first one."""

  def call(previous, digests):
    single_pages = digests.reshape(-1, 1, digests.shape[-1])
    root = jnp.zeros(
      (single_pages.shape[0], previous.shape[-1]), previous.dtype
    )
    return chain_keys(root, single_pages).reshape(digests.shape)

  return call


def _up_to_the_last(hits):
  """A page counts as cached if it or one behind it is."""
  counts = jnp.cumsum(hits[:, ::-1], axis=1, dtype=jnp.int32)[:, ::-1]
  return counts > 0


def _by_any_group(g):
  """A page counts as cached in all groups if it is in one."""
  is_in_a_group = jnp.any(g.cached, axis=1, keepdims=True)
  return jnp.broadcast_to(is_in_a_group, g.cached.shape)


def _a_page_more_than_held(room, g):
  """Slots that hold a page have room for a page more."""
  return jnp.where(room > 0, room + g.self.page_sizes[0], room)


def _is_length(array):
  """The lengths are the one array with a single number for each slot."""
  return array.ndim == 1


def _without_the_tail(out, g):
  """The hash goes back, the tokens behind it do not."""
  tail = g.state.hashes.tail
  return replace(out, hashes=replace(out.hashes, tail=tail))


def _served_up_to_the_first_refusal(granted, g):
  refused = g.asked & ~granted
  return granted & (jnp.cumsum(refused, dtype=jnp.int32) == 0)


def _pressure_stays(sticky):
  """Once pages ran out, no mistake is recorded any more."""

  def call(error, code):
    runs_out = (error == Status.OK) & jnp.any(code == Status.OUT_OF_PAGES)
    stays = runs_out | (error == Status.OUT_OF_PAGES)
    pressure = jnp.int32(Status.OUT_OF_PAGES)
    return jnp.where(stays, pressure, sticky(error, code))

  return call


def _as_much_behind(state, g):
  """The new state, with the leading columns of the old one."""
  return replace(state, num_skipped_pages=g.state.num_skipped_pages)


def _all_at_once(g):
  """Room for the whole prompt, however little was asked for."""
  asked = g.num_tokens
  return None if asked is None else jnp.where(asked > 0, g.lengths, asked)


MUTANTS = {
  # --- the free queue --------------------------------------------------------
  "pop does not count": mutation.Mutant(
    "cache.pool.page_pool:pop",
    returned(_with_popped_pages),
    ("allocate",),
  ),
  "a page touched twice leaves twice": mutation.Mutant(
    "cache.pool.free_queue:remove",
    returned(_every_item_leaves),
    ("touch", "admit"),
  ),
  "pushed to the back in the wrong order": mutation.Mutant(
    "cache.pool.free_queue:push_back",
    given(
      pages=lambda g: g.pages[::-1],
      valid=lambda g: g.valid[::-1],
      marks=lambda g: g.marks[::-1],
      marked=lambda g: g.marked[::-1],
    ),
    FREE,
    mutation.DUPLICATES,
  ),
  "the sweep turns the order around": mutation.Mutant(
    "cache.pool.free_queue:in_order",
    returned(lambda out, g: jnp.roll(out[::-1], g.queue.num_free[0])),
    SWEEPS,
    mutation.ONE_WINDOW,
  ),
  "the ring is never swept": mutation.Mutant(
    "cache.pool.free_queue:reserve",
    returned(lambda out, g: g.queue),
    SWEEPS,
    mutation.ONE_WINDOW,
  ),
  # --- the pool --------------------------------------------------------------
  "an evicted page keeps its key": mutation.Mutant(
    "cache.pool.page_pool:unpublish",
    returned(lambda out, g: (g.pool, out[1])),
    ("allocate", "admit"),
  ),
  "a hold counts twice": mutation.Mutant(
    "cache.pool.page_pool:hold",
    returned(lambda out, g: _counted_twice(out, g)),
    ("fork",),
  ),
  "a touched page stays in the queue": mutation.Mutant(
    "cache.pool.page_pool:hold",
    returned(lambda out, g: replace(out, queue=g.pool.queue)),
    ("touch", "admit"),
  ),
  "hashed pages go to the front": mutation.Mutant(
    "cache.pool.page_pool:is_cached", returned(lambda out, g: out & False), FREE
  ),
  # --- page tables -----------------------------------------------------------
  "the head of a sequence is released first": mutation.Mutant(
    "cache.pool.page_table:place_of",
    given(descending=lambda g: False),
    FREE,
    mutation.DUPLICATES,
  ),
  "the groups share one table": mutation.Mutant(
    "cache.pool.page_table:ranges",
    returned(lambda out, g: out._replace(group=out.group * 0)),
    ("allocate",),
  ),
  # --- the prefix index ------------------------------------------------------
  "tokens are not stored": mutation.Mutant(
    "cache.prefix.prefix_index:insert",
    given(tokens=lambda g: g.tokens * 0),
    ("commit",),
  ),
  "a lookup ends at the first bucket": mutation.Mutant(
    "cache.prefix.prefix_index:lookup",
    given(index=lambda g: replace(g.index, overflow=g.index.overflow * 0)),
    LOOK,
    mutation.DUPLICATES,
  ),
  "overflow is not counted down": mutation.Mutant(
    "cache.prefix.prefix_index:remove",
    returned(
      lambda out, g: (replace(out[0], overflow=g.index.overflow), out[1])
    ),
    ("evict", "allocate", "admit"),
    mutation.DUPLICATES,
  ),
  "a removed page stays in its bucket": mutation.Mutant(
    "cache.prefix.prefix_index:remove",
    returned(lambda out, g: (replace(out[0], buckets=g.index.buckets), out[1])),
    ("evict",),
  ),
  # --- keys ------------------------------------------------------------------
  "the salt is ignored": mutation.Mutant(
    "cache.prefix.hashing:root_key",
    given(salts=lambda g: None if g.salts is None else g.salts * 0),
    ("match", "admit"),
  ),
  "the epoch is ignored": mutation.Mutant(
    "cache.prefix.hashing:root_key",
    given(epoch=lambda g: g.epoch * 0),
    ("match", "admit", "allocate"),
  ),
  "the group is ignored": mutation.Mutant(
    "cache.prefix.hashing:group_key",
    returned(lambda out, g: g.chain),
    ("commit",),
  ),
  "the prefix is ignored": mutation.Mutant(
    "cache.prefix.hashing:chain_keys", each_page_alone, ("commit",)
  ),
  # --- match -----------------------------------------------------------------
  "one group is enough for a hit": mutation.Mutant(
    "cache.steps.longest_hit:agree", given(cached=_by_any_group), LOOK
  ),
  "hits go on after a miss": mutation.Mutant(
    "cache.group_kinds:GroupKind.longest_hit",
    given(hits=lambda g: _up_to_the_last(g.hits)),
    ("match", "admit"),
    mutation.DUPLICATES,
  ),
  # --- allocate and admit ----------------------------------------------------
  "a new sequence goes on from the old keys": mutation.Mutant(
    "cache.prefix.hashing:start_slots",
    given(starts=lambda g: g.starts & False),
    ("allocate",),
  ),
  "later rows are not served": mutation.Mutant(
    "cache.steps.reserve:in_order",
    returned(_served_up_to_the_first_refusal),
    ("allocate",),
  ),
  "a slot is given twice": mutation.Mutant(
    "arrays.indexing:any_earlier",
    returned(lambda out, g: out & False),
    ("admit",),
  ),
  "hits may use what others were promised": mutation.Mutant(
    "cache.steps.reserve:_grant_with_hits",
    given(keep_free=lambda g: g.keep_free * 0),
    ("admit",),
    mutation.SCARCE,
    SHARING,
  ),
  "a failed row moves the length": mutation.Mutant(
    "arrays.indexing:SlotRows.write",
    given(valid=lambda g: g.valid | _is_length(g.array)),
    ("admit",),
  ),
  # --- commit ----------------------------------------------------------------
  "room is not checked": mutation.Mutant(
    "cache.group_kinds:GroupSizes.tokens_with_room",
    returned(_a_page_more_than_held),
    ("commit",),
  ),
  "a merged page stays in the table": mutation.Mutant(
    "cache.steps.publish:_merge",
    returned(
      lambda out, g: (out[0]._replace(page_table=g.done.page_table), out[1])
    ),
    ("commit",),
  ),
  # --- fork ------------------------------------------------------------------
  "a fork shares the partial page": mutation.Mutant(
    "cache.steps.reserve:reservation", given(hit=lambda g: g.stop), ("fork",)
  ),
  "a fork forgets its keys": mutation.Mutant(
    "cache.prefix.hashing:copy_slots",
    returned(lambda out, g: g.hashes),
    ("fork",),
  ),
  "a copy goes the wrong way": mutation.Mutant(
    "cache.state:Copies",
    given(src=lambda g: g.dst, dst=lambda g: g.src),
    ("fork",),
  ),
  # --- truncate and free -----------------------------------------------------
  "truncate keeps a page": mutation.Mutant(
    "cache.pool.page_table:ranges",
    given(start=lambda g: jnp.minimum(g.start + 1, g.stop)),
    ("truncate",),
  ),
  "a page that is written again keeps its key": mutation.Mutant(
    "cache.steps.publish:roll_back",
    given(reopened=lambda g: g.reopened & False),
    ("truncate",),
  ),
  "the tail of an earlier page is forgotten": mutation.Mutant(
    "cache.steps.publish:roll_back", returned(_without_the_tail), ("truncate",)
  ),
  "a slot is freed twice": mutation.Mutant(
    "arrays.indexing:num_earlier",
    returned(lambda out, g: jnp.maximum(out - 1, 0)),
    ("free_slots",),
  ),
  "a freed slot keeps its length": mutation.Mutant(
    "arrays.indexing:SlotRows.write",
    returned(lambda out, g: g.array if _is_length(g.array) else out),
    FREE,
  ),
  # --- failures --------------------------------------------------------------
  "pressure hides a mistake": mutation.Mutant(
    "cache.state:sticky", _pressure_stays, ("allocate", "commit")
  ),
  # --- pins, evict, reset ----------------------------------------------------
  "a pin is not counted": mutation.Mutant(
    "cache.verbs.pin:_hold",
    returned(lambda out, g: replace(out, pin_count=g.pool.pin_count)),
    ("touch", "pin"),
  ),
  # --- what is left behind ---------------------------------------------------
  "a chunk is over one token early": mutation.Mutant(
    "cache.group_kinds:ChunkedLocal.num_skipped_tokens",
    given(num_tokens=lambda g: g.num_tokens + 1),
    RECYCLE,
    mutation.CHUNKED,
  ),
  "a fork has no null pages": mutation.Mutant(
    "cache.pool.page_table:fill_before",
    returned(lambda out, g: g.table),
    ("fork",),
    mutation.SLIDING,
  ),
  "a fork takes null pages for pages": mutation.Mutant(
    "cache.steps.reserve:reservation",
    given(first=lambda g: g.first * 0),
    ("fork",),
    mutation.SLIDING,
  ),
  "truncate needs no page that is gone": mutation.Mutant(
    "cache.group_kinds:GroupSizes.skipped_pages",
    returned(lambda out, g: out + 99),
    ("truncate",),
    mutation.SLIDING,
  ),
  "truncate reads keys that are gone": mutation.Mutant(
    "cache.verbs.truncate:_needs_recycled",
    given(state=lambda g: replace(g.state, hashes=None)),
    ("truncate",),
    mutation.NARROW,
    (("recycle", 12),),
  ),
  "a rolled back slot left as much behind": mutation.Mutant(
    "cache.verbs.truncate:truncate",
    returned(lambda out, g: (_as_much_behind(out[0], g), out[1])),
    ("truncate",),
    mutation.SLIDING,
  ),
  # --- what is found ---------------------------------------------------------
  "a window is found without its first page": mutation.Mutant(
    "cache.group_kinds:SlidingWindow.num_skipped_tokens",
    given(num_tokens=lambda g: g.num_tokens + 1),
    LOOK,
    mutation.SLIDING,
  ),
  "the last token may be cached as well": mutation.Mutant(
    "cache.group_kinds:GroupKind.longest_hit",
    given(limit=lambda g: g.limit + g.page_size),
    LOOK,
    mutation.SLIDING,
  ),
  "a hit ends anywhere": mutation.Mutant(
    "cache.group_kinds:GroupKind.longest_hit",
    given(align=lambda g: 1),
    LOOK,
    mutation.PUBLISHED,
  ),
  "a hit needs the whole prefix": mutation.Mutant(
    "cache.group_kinds:GroupSizes.skipped_pages",
    given(tokens=lambda g: g.tokens * 0),
    ("admit",),
    mutation.SLIDING,
  ),
  "a draft model gets no page to compute": mutation.Mutant(
    "cache.group_kinds:GroupKind.longest_hit",
    given(drop=lambda g: g.drop & False),
    LOOK,
    mutation.DRAFTED,
  ),
  "a draft model proves nothing behind a hit": mutation.Mutant(
    "cache.prefix.prefix_rules:lookup_bound",
    returned(lambda out, g: (g.length, out[1])),
    LOOK,
    mutation.DRAFTED,
  ),
  "a page is left out in every round": mutation.Mutant(
    "cache.prefix.prefix_rules:lookup_bound",
    given(dropped=lambda g: g.dropped & False),
    LOOK,
    mutation.WINDOWS,
    HOLES,
  ),
  # --- what is published -----------------------------------------------------
  "pages that no hit can use are published": mutation.Mutant(
    "cache.prefix.prefix_rules:published",
    returned(lambda out, g: g.pages >= 0),
    COMMIT,
    mutation.HYBRID,
  ),
  "nobody keeps where sequences diverged": mutation.Mutant(
    "cache.prefix.prefix_rules:_retained_prefixes",
    given(boundary=lambda g: g.boundary * 0),
    COMMIT,
    mutation.KEPT,
  ),
  "pages are published before all groups end one": mutation.Mutant(
    "cache.prefix.prefix_rules:final_pages",
    returned(lambda out, g: g.config.sizes.full_pages(g.tokens)),
    COMMIT,
    mutation.HYBRID,
  ),
  "the page behind an aligned prefix is not published": mutation.Mutant(
    "cache.prefix.prefix_rules:final_pages",
    given(config=lambda g: replace(g.config, use_eagle=False)),
    COMMIT,
    mutation.DRAFTED,
  ),
  "two forks publish one page at once": mutation.Mutant(
    "arrays.indexing:any_earlier",
    returned(lambda out, g: out & False),
    COMMIT,
    mutation.HYBRID,
    FORKS,
  ),
  # --- sizes -----------------------------------------------------------------
  "a small page holds the tokens behind it too": mutation.Mutant(
    "cache.steps.publish:_page_tokens",
    given(step=lambda g: g.step * 0 + 99),
    COMMIT,
    mutation.HYBRID,
  ),
  "a prompt gets all its pages at once": mutation.Mutant(
    "cache.verbs.admit:admit",
    given(num_tokens=_all_at_once),
    ("admit",),
    mutation.SLIDING,
  ),
  "pages of two pools are counted in each other's place": mutation.Mutant(
    "cache.steps.reserve:sum_by_pool",
    returned(lambda out, g: out[..., ::-1]),
    ("allocate", "admit"),
    mutation.POOLS,
  ),
  # --- recurrent states -------------------------------------------------------
  "a fork copies no state": mutation.Mutant(
    "cache.group_kinds:GroupSizes.open_pages",
    returned(lambda out, g: out & False),
    ("fork",),
    mutation.STATES,
  ),
  "a state is rolled back to inside a page": mutation.Mutant(
    "cache.pool.recurrent:can_continue",
    given(length=lambda g: g.tokens),
    ("truncate",),
    mutation.STATES,
  ),
}
