"""Broken caches, continued: groups that leave pages behind, mixed page sizes.

See `mutants.py`.
"""

from dataclasses import replace

from jaxkv._src.cache.groups import sizes
from tests.cache.mutation import CHUNKED
from tests.cache.mutation import DRAFTED
from tests.cache.mutation import HYBRID
from tests.cache.mutation import KEPT
from tests.cache.mutation import NARROW
from tests.cache.mutation import PUBLISHED
from tests.cache.mutation import SLIDING
from tests.cache.mutation import WINDOWS
from tests.cache.mutation import Mutant
from tests.cache.mutation import given
from tests.cache.mutation import returned
from tests.cache.mutation import text

LOOK = ("match",)
RECYCLE = ("recycle",)
COMMIT = ("commit",)
HOLES = (("evict", 12), ("new_epoch", 0), ("reset_prefix_cache", 0))

WINDOW_MUTANTS = {
  # --- what is left behind ---------------------------------------------------
  "a window loses its first token": Mutant(
    "groups.kinds:SlidingWindow.num_skipped",
    given(num_tokens=lambda g: g.num_tokens + 1),
    RECYCLE,
    SLIDING,
  ),
  "a chunk is over one token early": Mutant(
    "groups.kinds:ChunkedLocal.num_skipped",
    given(num_tokens=lambda g: g.num_tokens + 1),
    RECYCLE,
    CHUNKED,
  ),
  "a page left behind is no null page": Mutant(
    "verbs.recycle:drop_behind",
    text("cleared=0", "cleared=config.no_page"),
    RECYCLE,
    SLIDING,
  ),
  "more is left behind than there is": Mutant(
    "verbs.recycle:drop_behind",
    text(
      "skipped_pages(config, lengths), held)",
      "skipped_pages(config, lengths), 99)",
    ),
    RECYCLE,
    SLIDING,
  ),
  "what was left behind comes back": Mutant(
    "verbs.recycle:drop_behind",
    text("jnp.maximum(first, behind)", "jnp.maximum(0, behind)"),
    RECYCLE,
    SLIDING,
  ),
  "nobody notes what was left behind": Mutant(
    "verbs.recycle:drop_behind",
    text("first_page = behind.T", "first_page = state.first_page"),
    RECYCLE,
    SLIDING,
  ),
  "a freed slot keeps null pages": Mutant(
    "verbs.free:free", text("config.recycles", "False"), ("free_mask",), SLIDING
  ),
  "a fork has no null pages": Mutant(
    "verbs.fork:_shared",
    text("state.config.recycles", "False"),
    ("fork",),
    SLIDING,
  ),
  "a fork takes null pages for pages": Mutant(
    "verbs.fork:fork",
    text("jnp.minimum(first, full)", "full & 0"),
    ("fork",),
    SLIDING,
  ),
  "an admitted sequence has no null pages": Mutant(
    "verbs.admit:_attached",
    text("state.config.recycles", "False"),
    ("admit",),
    SLIDING,
  ),
  "null pages are published": Mutant(
    "prefix.publish:_insert", text("pages > 0", "pages >= 0"), COMMIT, SLIDING
  ),
  "truncate needs no page that is gone": Mutant(
    "verbs.free:_needs_recycled",
    text("needed = skipped_pages(config, lengths) < gone", "needed = gone < 0"),
    ("truncate",),
    SLIDING,
  ),
  "truncate reads keys that are gone": Mutant(
    "verbs.free:_needs_recycled",
    text("moved & lost)", "moved & lost & False)"),
    ("truncate",),
    NARROW,
    (("recycle", 12),),
  ),
  "a rolled back slot left as much behind": Mutant(
    "verbs.free:truncate",
    text("jnp.minimum(state.first_page, keep.T)", "state.first_page"),
    ("truncate",),
    SLIDING,
  ),
  # --- what is found ---------------------------------------------------------
  "a window is found without its first page": Mutant(
    "groups.kinds:SlidingWindow.num_skipped",
    given(num_tokens=lambda g: g.num_tokens + 1),
    LOOK,
    SLIDING,
  ),
  "the shortest prefix is found": Mutant(
    "groups.kinds:GroupKind.longest_hit",
    text(
      "jnp.max(jnp.where(whole, jnp.maximum(found, 0), 0)",
      "jnp.min(jnp.where(whole & (found > 0), found, 99)",
    ),
    LOOK,
    SLIDING,
  ),
  "the last token may be cached as well": Mutant(
    "groups.kinds:GroupKind.longest_hit",
    given(limit=lambda g: g.limit + g.page_size),
    LOOK,
    SLIDING,
  ),
  "a hit ends anywhere": Mutant(
    "groups.kinds:GroupKind.longest_hit",
    given(align=lambda g: 1),
    LOOK,
    PUBLISHED,
  ),
  "a hit needs the whole prefix": Mutant(
    "prefix.longest_prefix:find",
    text(
      "first = groups.skipped_pages(config, found)",
      "first = groups.skipped_pages(config, found & 0)",
    ),
    ("admit",),
    SLIDING,
  ),
  "nothing is a hit": Mutant(
    "prefix.longest_prefix:find",
    text("jnp.where(jnp.any(first < stop, axis=1), found, 0)", "found"),
    LOOK,
    CHUNKED,
  ),
  "a draft model gets no page to compute": Mutant(
    "groups.kinds:GroupKind.longest_hit",
    given(drop=lambda g: g.drop & False),
    LOOK,
    DRAFTED,
  ),
  "a draft model proves nothing behind a hit": Mutant(
    "prefix.longest_prefix:_round",
    text("jnp.minimum(length + spec.size, known)", "length"),
    LOOK,
    DRAFTED,
  ),
  "a page is left out in every round": Mutant(
    "prefix.longest_prefix:_round",
    text("& ~verified[number]", "& (length >= 0)"),
    LOOK,
    WINDOWS,
    HOLES,
  ),
  "every kind is asked once": Mutant(
    "prefix.longest_prefix:_agreed",
    text("len(specs) <= 2 and specs[0].is_full", "True"),
    LOOK,
    WINDOWS,
    HOLES,
  ),
  # --- what is published -----------------------------------------------------
  "pages that no hit can use are published": Mutant(
    "groups.sizes:reusable",
    returned(lambda out, g: g.pages >= 0),
    COMMIT,
    HYBRID,
  ),
  "a window is published with a page too many": Mutant(
    "groups.kinds:SlidingWindow._pages_back",
    returned(lambda out, g: out + 1),
    COMMIT,
    HYBRID,
  ),
  "the whole prompt is a prefix of itself": Mutant(
    "groups.sizes:_kept_prefixes",
    given(prompt=lambda g: g.prompt + 1),
    COMMIT,
    KEPT,
  ),
  "nobody keeps where sequences turned off": Mutant(
    "groups.sizes:_kept_prefixes",
    given(junction=lambda g: g.junction * 0),
    COMMIT,
    KEPT,
  ),
  "every aligned prefix is kept": Mutant(
    "groups.sizes:reusable",
    given(config=lambda g: replace(g.config, retention=None)),
    COMMIT,
    KEPT,
  ),
  "pages are published before all groups end one": Mutant(
    "groups.sizes:final_pages",
    returned(lambda out, g: sizes.full_pages(g.config, g.tokens)),
    COMMIT,
    HYBRID,
  ),
  "the page behind an aligned prefix is not published": Mutant(
    "groups.sizes:final_pages",
    given(config=lambda g: replace(g.config, draft_model=False)),
    COMMIT,
    DRAFTED,
  ),
  "a page shared before it had a key is published twice": Mutant(
    "prefix.publish:_insert",
    text("valid &= ~page_pool.is_cached(pool, pages)", "pass"),
    COMMIT,
    HYBRID,
  ),
  "two forks publish one page at once": Mutant(
    "prefix.publish:_insert",
    text("again = valid & named_before(pages, valid)", "pass"),
    COMMIT,
    HYBRID,
  ),
  # --- sizes -----------------------------------------------------------------
  "all groups have pages of one size": Mutant(
    "groups.sizes:pages_for",
    text(
      "kind.num_columns(tokens, size)",
      "kind.num_columns(tokens, config.page_size)",
    ),
    ("allocate",),
    HYBRID,
  ),
  "the largest room counts": Mutant(
    "groups.sizes:tokens_with_room",
    text("jnp.min(", "jnp.max("),
    COMMIT,
    HYBRID,
  ),
  "a small page holds the tokens behind it too": Mutant(
    "prefix.publish:_held",
    text("offset < step[:, None]", "offset >= 0"),
    COMMIT,
    HYBRID,
  ),
  "a page's key is that of its first tokens": Mutant(
    "prefix.publish:_publish", text("begin + step - 1", "begin"), COMMIT, HYBRID
  ),
  "a prompt gets all its pages at once": Mutant(
    "verbs.admit:admit",
    text("jnp.minimum(room, lengths - num_cached)", "lengths - num_cached"),
    ("admit",),
    SLIDING,
  ),
}
