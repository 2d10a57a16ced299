"""Mistakes about encoders, states, the ages of pages, and events."""

from tests.cache.mutation import AGED
from tests.cache.mutation import ENCODER
from tests.cache.mutation import LOGGED
from tests.cache.mutation import SCRATCH
from tests.cache.mutation import Mutant

KIND_MUTANTS = {
  # --- encoders --------------------------------------------------------------
  "an encoder's pages are counted by the decoder's tokens": Mutant(
    "groups.sizes:pages_for",
    "if not kind.holds_encoder:",
    "if True:",
    ("allocate_slots",),
    ENCODER,
  ),
  "an encoder's pages bound the sequence": Mutant(
    "groups.sizes:tokens_with_room",
    "if config.holds_encoder:",
    "if False:",
    ("commit",),
    ENCODER,
  ),
  "a fork gets pages of an encoder by its own length": Mutant(
    "groups.sizes:or_encoder",
    "if not config.holds_encoder:",
    "if True:",
    ("fork",),
    ENCODER,
  ),
  "rolling back gives an encoder's pages back": Mutant(
    "groups.sizes:or_encoder",
    "if not config.holds_encoder:",
    "if True:",
    ("truncate",),
    ENCODER,
  ),
  "an encoder's pages outlive the sequence": Mutant(
    "verbs.free:truncate",
    "keep = jnp.where((lengths > 0)",
    "keep = jnp.where((lengths >= 0)",
    ("truncate",),
    ENCODER,
  ),
  "an encoder may be of any length": Mutant(
    "verbs.admit:admit",
    "jnp.maximum(lengths, encoder)",
    "lengths",
    ("admit",),
    ENCODER,
  ),
  "a slot without an encoder's pages is empty": Mutant(
    "state:is_empty",
    "state.num_pages[lead]",
    "state.num_pages[0]",
    ("free_mask",),
    ENCODER,
  ),
  # --- states ----------------------------------------------------------------
  "a fork copies no state": Mutant(
    "groups.sizes:open_pages",
    "tokens % size > 0",
    "tokens < 0",
    ("fork",),
    SCRATCH,
  ),
  "a fork holds the null page": Mutant(
    "verbs.fork:_shared", "& (pages > 0)", "", ("fork",), SCRATCH
  ),
  "states can be had at any token": Mutant(
    "groups.recurrent:can_go_on",
    "if not config.holds_states:",
    "if True:",
    ("fork", "truncate"),
    SCRATCH,
  ),
  "a state is rolled back to inside a page": Mutant(
    "groups.recurrent:can_go_on", "& ~inside", "", ("truncate",), SCRATCH
  ),
  "scratch pages stay behind": Mutant(
    "groups.recurrent:drawn_back",
    "if not config.holds_states:",
    "if True:",
    ("truncate",),
    SCRATCH,
  ),
  "scratch pages are given back": Mutant(
    "groups.recurrent:num_scratch",
    "jnp.clip(held - keep, 0, scratch)",
    "scratch * 0",
    ("truncate",),
    SCRATCH,
  ),
  "null pages between states are given back": Mutant(
    "verbs.recycle:_num_held",
    "if config.holds_states:",
    "if False:",
    ("recycle",),
    SCRATCH,
  ),
  "scratch pages do not move along": Mutant(
    "groups.recurrent:_growth",
    "jnp.where(moves, moved, 0)",
    "moved * 0",
    ("allocate",),
    SCRATCH,
  ),
  # --- ages ------------------------------------------------------------------
  "age is counted from the first page on": Mutant(
    "telemetry.residency:evicted",
    "clock - stamps",
    "clock",
    ("allocate",),
    AGED,
  ),
  "pages are idle from when they were published": Mutant(
    "telemetry.residency:evicted",
    "clock - since",
    "clock - stamps",
    ("allocate",),
    AGED,
  ),
  "pages without a key have an age": Mutant(
    "pool.page_pool:_aged", "taken.valid", "pages > 0", ("allocate",), AGED
  ),
  "it is not noted when pages are given back": Mutant(
    "telemetry.residency:released",
    "ages.released, place",
    "ages.released, place * 0 - 1",
    ("free_mask",),
    AGED,
  ),
  # --- events ----------------------------------------------------------------
  "it is not noted in which group a page was stored": Mutant(
    "telemetry.event_log:stored",
    "masked.put(log.group_of, place, values=group)",
    "log.group_of",
    ("commit",),
    LOGGED,
  ),
  "a later window of events is written over the first": Mutant(
    "telemetry.event_log:_pushed",
    "log.count + rank - 1",
    "rank - 1",
    ("commit",),
    LOGGED,
  ),
  "events of a later window are not counted": Mutant(
    "telemetry.event_log:_pushed",
    "masked.NOWHERE - rank[-1]) + rank[-1]",
    "masked.NOWHERE - rank[-1]) | rank[-1]",
    ("commit",),
    LOGGED,
  ),
  "pages that were never cached are told to be taken out": Mutant(
    "pool.page_pool:_unpublished",
    "events, taken.valid, pages",
    "events, valid, pages",
    ("allocate",),
    LOGGED,
  ),
  "pages of no use are told of": Mutant(
    "prefix.publish:_insert",
    "listed & ~again,\n      pages,",
    "valid & ~again,\n      pages,",
    ("commit",),
    LOGGED,
  ),
  "a refused reset is told as done": Mutant(
    "telemetry.event_log:cleared",
    "done[None]",
    "done[None] | True",
    ("reset_prefix_cache",),
    LOGGED,
  ),
  "a page is its own parent": Mutant(
    "prefix.publish:_insert",
    "parent=settled.parents",
    "parent=settled.keys",
    ("commit",),
    LOGGED,
  ),
  "all sequences have one root": Mutant(
    "prefix.publish:_insert",
    "root=settled.roots",
    "root=settled.roots * 0",
    ("commit",),
    LOGGED,
  ),
}
