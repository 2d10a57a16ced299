"""Broken caches: one small mistake each, such as people make.

A mutant is a function of the library with a piece of its text replaced. The
tests must tell every one from the real cache (`test_mutants.py`); one that they
cannot tell shows a behaviour that nothing checks.
"""

from tests.cache.mutants_kinds import KIND_MUTANTS
from tests.cache.mutants_windows import WINDOW_MUTANTS
from tests.cache.mutation import DUPLICATES
from tests.cache.mutation import ONE_WINDOW
from tests.cache.mutation import SCARCE
from tests.cache.mutation import UNCACHED
from tests.cache.mutation import Mutant

FREE = ("free_mask",)
SWEEPS = ("free_mask", "free_slots", "truncate", "unpin")
LOOK = ("match",)
# Many sequences come and go, and what they leave is cached.
SHARING = (("admit", 20), ("commit", 12), ("free_mask", 16))
SHARING += (("evict", 0), ("new_epoch", 0), ("touch", 0), ("pin", 0))

MUTANTS = {
  # --- the free queue --------------------------------------------------------
  "pop does not count": Mutant(
    "pool.free_queue:pop",
    "queue.num_free - num_popped",
    "queue.num_free",
    ("allocate",),
  ),
  "head advances one too few": Mutant(
    "pool.free_queue:pop",
    "queue.head + passed",
    "queue.head + passed - 1",
    ("allocate",),
  ),
  "stale entries are popped": Mutant(
    "pool.free_queue:pop",
    "fill=NOWHERE) == place",
    "fill=NOWHERE) < NOWHERE",
    ("allocate",),
  ),
  "a page touched twice leaves twice": Mutant(
    "pool.free_queue:remove",
    "jnp.sum(last",
    "jnp.sum(valid",
    ("touch", "admit"),
  ),
  "pushed to the back in the wrong order": Mutant(
    "pool.free_queue:push_back",
    "+ rank - 1",
    "+ rank[-1] - rank",
    FREE,
    DUPLICATES,
  ),
  "pushed to the front in the wrong order": Mutant(
    "pool.free_queue:push_front",
    "place = _wrap(queue, queue.head - rank)",
    "place = _wrap(queue, queue.head - rank[-1] - 1 + rank)",
    FREE,
  ),
  "the sweep drops an entry": Mutant(
    "pool.free_queue:reserve",
    "span=queue.num_free",
    "span=queue.num_free - 1",
    SWEEPS,
    ONE_WINDOW,
  ),
  "the sweep turns the order around": Mutant(
    "pool.free_queue:reserve",
    "ring = in_order(queue)",
    "ring = jnp.roll(in_order(queue)[::-1], queue.num_free)",
    SWEEPS,
    ONE_WINDOW,
  ),
  "the ring is never swept": Mutant(
    "pool.free_queue:reserve",
    "tight = queue.span + count > capacity",
    "tight = queue.span + count < 0",
    SWEEPS,
    ONE_WINDOW,
  ),
  # --- the pool --------------------------------------------------------------
  "a popped page has two references": Mutant(
    "pool.page_pool:pop", "values=1", "values=2", ("allocate",)
  ),
  "an evicted page keeps its key": Mutant(
    "pool.page_pool:pop",
    "pool, taken =",
    "_, taken =",
    ("allocate", "admit"),
  ),
  "a hold counts twice": Mutant(
    "pool.page_pool:hold", "values=1", "values=2", ("fork",)
  ),
  "a touched page stays in the queue": Mutant(
    "pool.page_pool:hold",
    "free_queue.remove(\n    pool.queue, pages, valid & is_free(pool, pages)\n"
    "  )",
    "pool.queue, jnp.int32(0)",
    ("touch", "admit"),
  ),
  "free at one reference": Mutant(
    "pool.page_pool:drop", "fill=1) == 0", "fill=2) <= 1", FREE
  ),
  "un-hashed pages go to the back": Mutant(
    "pool.page_pool:drop", "left = last & ~is_cached(pool, pages)", "pass", FREE
  ),
  "hashed pages go to the front": Mutant(
    "pool.page_pool:drop", "last & ~is_cached(pool, pages)", "last", FREE
  ),
  "a page released twice is freed twice": Mutant(
    "pool.page_pool:drop",
    "pages, last & ~left,",
    "pages, unreferenced & ~left,",
    FREE,
    ONE_WINDOW,
  ),
  # --- page tables -----------------------------------------------------------
  "the head of a sequence is released first": Mutant(
    "pool.page_table:shrink",
    "where = place_of(rows, items, descending=True)\n    pages",
    "where = place_of(rows, items, descending=False)\n    pages",
    FREE,
    DUPLICATES,
  ),
  "the groups share one table": Mutant(
    "pool.page_table:rows_of",
    "jnp.arange(num_groups, dtype=jnp.int32)",
    "jnp.zeros((num_groups,), jnp.int32)",
    ("allocate",),
  ),
  # --- the prefix index ------------------------------------------------------
  "tokens are not stored": Mutant(
    "prefix.prefix_index:insert",
    "index.tokens, place, values=tokens",
    "index.tokens, place, values=tokens - tokens",
    ("commit",),
  ),
  "the newest duplicate is the hit": Mutant(
    "prefix.prefix_index:lookup",
    "index.clock - stamp",
    "stamp + jnp.uint32(1)",
    LOOK,
    DUPLICATES,
  ),
  "the clock stands still": Mutant(
    "prefix.prefix_index:insert",
    "index.clock + order[-1]",
    "index.clock",
    ("commit",),
    DUPLICATES,
  ),
  "a lookup ends at the first bucket": Mutant(
    "prefix.prefix_index:lookup",
    "(masked.take(index.overflow, bucket) > 0)",
    "False",
    LOOK,
    DUPLICATES,
  ),
  "overflow is not counted": Mutant(
    "prefix.prefix_index:insert",
    "slot, listed, 1)",
    "slot, listed, 0)",
    ("commit",),
    DUPLICATES,
  ),
  "overflow is not counted down": Mutant(
    "prefix.prefix_index:remove",
    "slot, valid, -1)",
    "slot, valid, 0)",
    ("evict", "allocate", "admit"),
    DUPLICATES,
  ),
  "a removed page stays in its bucket": Mutant(
    "prefix.prefix_index:remove",
    "way, values=0",
    "way, values=pages",
    ("evict",),
  ),
  "two pages take one place in a bucket": Mutant(
    "prefix.prefix_index:insert",
    "nth == turn[:, None]",
    "nth == 0",
    ("commit",),
  ),
  # --- keys ------------------------------------------------------------------
  "the salt is ignored": Mutant(
    "prefix.hashing:root_key",
    "_unstack(salts)",
    "_unstack(salts - salts)",
    ("match", "admit"),
  ),
  "the epoch is ignored": Mutant(
    "prefix.hashing:root_key",
    "(epoch, zero",
    "(zero, zero",
    ("match", "admit", "allocate"),
  ),
  "the group is ignored": Mutant(
    "prefix.hashing:group_key", "config.num_groups == 1", "True", ("commit",)
  ),
  "the prefix is ignored": Mutant(
    "prefix.hashing:chain_keys",
    "_mixed(key, _unstack(digest))",
    "_unstack(digest)",
    ("commit",),
  ),
  # --- match -----------------------------------------------------------------
  "the whole sequence may be cached": Mutant(
    "prefix.longest_prefix:find", "lengths - 1, 0", "lengths, 0", LOOK
  ),
  "one group is enough for a hit": Mutant(
    "prefix.longest_prefix:_agreed", "jnp.all(cached[", "jnp.any(cached[", LOOK
  ),
  "hits go on after a miss": Mutant(
    "groups.kinds:GroupKind.longest_hit",
    "whole = misses == jnp.take_along_axis(misses, begin, axis=1)",
    "whole = jnp.pad(hits, ((0, 0), (1, 0)))",
    ("match", "admit"),
    DUPLICATES,
  ),
  # --- allocate and admit ----------------------------------------------------
  "a slot is full one token early": Mutant(
    "verbs.allocate:_wanted",
    "num_tokens > config.slot_tokens",
    "num_tokens >= config.slot_tokens",
    ("allocate",),
  ),
  "a new sequence goes on from the old keys": Mutant(
    "verbs.allocate:allocate",
    "lead_group] == 0",
    "lead_group] < 0",
    ("allocate",),
  ),
  "later rows are not served": Mutant(
    "pool.reserve:in_order",
    "before | (need <= left - keep)",
    "before",
    ("allocate",),
  ),
  "a slot is given twice": Mutant(
    "verbs.admit:_static_code",
    "named_before(slots, code == Code.OK)",
    "False",
    ("admit",),
  ),
  "a hit shared in one call is paid twice": Mutant(
    "verbs.admit:_grant", "& ~touched", "", ("admit",), SCARCE, SHARING
  ),
  "hits may use what others were promised": Mutant(
    "verbs.admit:_grant",
    "cost <= left - keep[row]",
    "cost <= left",
    ("admit",),
    SCARCE,
    SHARING,
  ),
  "newcomers may use what others were promised": Mutant(
    "pool.reserve:in_order",
    "available - keep",
    "available",
    ("admit",),
    UNCACHED,
  ),
  "a promise counts for the first row only": Mutant(
    "verbs.admit:_grant", "most = jnp.max", "most = jnp.min", ("admit",), SCARCE
  ),
  "a failed row moves the length": Mutant(
    "verbs.admit:admit",
    "state.length, place,",
    "state.length, slots,",
    ("admit",),
  ),
  # --- commit ----------------------------------------------------------------
  "the first token of a page is lost": Mutant(
    "prefix.publish:_new_tail", "new >= 0", "new > 0", ("commit",)
  ),
  "room is not checked": Mutant(
    "verbs.commit:commit",
    "counts > room - length",
    "counts > room + config.page_size - length",
    ("commit",),
  ),
  "the chain stops after one page": Mutant(
    "prefix.publish:_publish",
    "moved * steps - 1, 0",
    "moved - moved, 0",
    ("commit",),
    DUPLICATES,
  ),
  "a merged page stays in the table": Mutant(
    "prefix.publish:_merged",
    "column, values=first",
    "column, values=pages",
    ("commit",),
  ),
  # --- fork ------------------------------------------------------------------
  "a fork shares the partial page": Mutant(
    "verbs.fork:_shared",
    "rows_of(src, first, full)",
    "rows_of(src, first, full + 1)",
    ("fork",),
  ),
  "a fork forgets its keys": Mutant(
    "verbs.fork:fork",
    "_copied(state.hashes, src, place)",
    "state.hashes",
    ("fork",),
  ),
  "a copy goes the wrong way": Mutant(
    "verbs.fork:_owed",
    "src[:, None], column",
    "dst[:, None], column",
    ("fork",),
  ),
  # --- truncate and free -----------------------------------------------------
  "truncate keeps a page": Mutant(
    "verbs.free:truncate",
    "full + partial.astype(jnp.int32), held",
    "full + 1, held",
    ("truncate",),
  ),
  "a page that is written again keeps its key": Mutant(
    "verbs.free:truncate",
    "reopens & ~shared\n",
    "shared & ~shared\n",
    ("truncate",),
  ),
  "a shared page is written again": Mutant(
    "verbs.free:truncate", "pages) > 1", "pages) > 9", ("truncate",)
  ),
  "the tail of an earlier page is forgotten": Mutant(
    "verbs.free:_rolled_back",
    "moved, tail",
    "moved & False, tail",
    ("truncate",),
  ),
  "a slot is freed twice": Mutant(
    "verbs.free:free",
    "num_earlier(slots) > 0",
    "num_earlier(slots) > 1",
    ("free_slots",),
  ),
  "a freed slot keeps its length": Mutant(
    "verbs.free:free",
    "state.length, place, values=0",
    "state.length, place - place - 1, values=0",
    FREE,
  ),
  # --- failures --------------------------------------------------------------
  "the last failure sticks": Mutant(
    "status:sticky",
    "open_ & jnp.any(mistake)",
    "jnp.any(mistake)",
    ("commit", "free_slots"),
  ),
  "pressure hides a mistake": Mutant(
    "status:sticky",
    "| (error == Code.OUT_OF_PAGES)",
    "",
    ("allocate", "commit"),
  ),
  # --- pins, evict, reset ----------------------------------------------------
  "a pin is not counted": Mutant(
    "verbs.pin:_pinned",
    "names), values=1",
    "names), values=0",
    ("touch", "pin"),
  ),
  "one pin too many is given back": Mutant(
    "verbs.pin:unpin", "earlier >= pins", "earlier > pins", ("unpin",)
  ),
  "a page nobody knows is pinned": Mutant(
    "verbs.pin:touch", "~known", "names < 0", ("touch",)
  ),
  "reset while pages are held": Mutant(
    "verbs.reset:reset_prefix_cache",
    "state.config.num_pages - 1",
    "0",
    ("reset_prefix_cache",),
  ),
}
MUTANTS |= WINDOW_MUTANTS | KIND_MUTANTS
