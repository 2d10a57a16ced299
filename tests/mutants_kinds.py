"""Mistakes about encoders, states, the ages of pages, and events."""

from tests.mutation import AGED
from tests.mutation import ENCODER
from tests.mutation import LOGGED
from tests.mutation import SCRATCH
from tests.mutation import Mutant

KIND_MUTANTS = {
  # --- encoders --------------------------------------------------------------
  "an encoder's pages are counted by the decoder's tokens": Mutant(
    "groups:pages_for",
    "if not kind.holds_encoder:",
    "if True:",
    ("allocate_slots",),
    ENCODER,
  ),
  "an encoder's pages bound the sequence": Mutant(
    "groups:tokens_with_room",
    "if config.holds_encoder:",
    "if False:",
    ("commit",),
    ENCODER,
  ),
  "a fork gets pages of an encoder by its own length": Mutant(
    "groups:or_encoder",
    "if not config.holds_encoder:",
    "if True:",
    ("fork",),
    ENCODER,
  ),
  "rolling back gives an encoder's pages back": Mutant(
    "groups:or_encoder",
    "if not config.holds_encoder:",
    "if True:",
    ("truncate",),
    ENCODER,
  ),
  "an encoder's pages outlive the sequence": Mutant(
    "releasing:truncate",
    "keep = jnp.where((lengths > 0)",
    "keep = jnp.where((lengths >= 0)",
    ("truncate",),
    ENCODER,
  ),
  "an encoder may be of any length": Mutant(
    "admitting:admit",
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
    "groups:open_pages", "tokens % size > 0", "tokens < 0", ("fork",), SCRATCH
  ),
  "a fork holds the null page": Mutant(
    "forking:_shared", "& (pages > 0)", "", ("fork",), SCRATCH
  ),
  "states can be had at any token": Mutant(
    "snapshots:can_go_on",
    "if not config.holds_states:",
    "if True:",
    ("fork", "truncate"),
    SCRATCH,
  ),
  "a state is rolled back to inside a page": Mutant(
    "snapshots:can_go_on", "& ~inside", "", ("truncate",), SCRATCH
  ),
  "scratch pages stay behind": Mutant(
    "snapshots:drawn_back",
    "if not config.holds_states:",
    "if True:",
    ("truncate",),
    SCRATCH,
  ),
  "scratch pages are given back": Mutant(
    "snapshots:num_scratch",
    "jnp.clip(held - keep, 0, scratch)",
    "scratch * 0",
    ("truncate",),
    SCRATCH,
  ),
  "null pages between states are given back": Mutant(
    "recycling:_num_held",
    "if config.holds_states:",
    "if False:",
    ("recycle",),
    SCRATCH,
  ),
  "scratch pages do not move along": Mutant(
    "snapshots:_growth",
    "jnp.where(moves, moved, 0)",
    "moved * 0",
    ("allocate",),
    SCRATCH,
  ),
  # --- ages ------------------------------------------------------------------
  "age is counted from the first page on": Mutant(
    "residency:evicted", "clock - stamps", "clock", ("allocate",), AGED
  ),
  "pages are idle from when they were published": Mutant(
    "residency:evicted", "clock - since", "clock - stamps", ("allocate",), AGED
  ),
  "pages without a key have an age": Mutant(
    "page_pool:_aged", "taken.valid", "pages > 0", ("allocate",), AGED
  ),
  "it is not noted when pages are given back": Mutant(
    "residency:released",
    "ages.released, place",
    "ages.released, place * 0 - 1",
    ("free_mask",),
    AGED,
  ),
  # --- events ----------------------------------------------------------------
  "it is not noted in which group a page was stored": Mutant(
    "event_log:stored",
    "indexing.put(log.group_of, place, values=group)",
    "log.group_of",
    ("commit",),
    LOGGED,
  ),
  "a later window of events is written over the first": Mutant(
    "event_log:_pushed", "log.count + rank - 1", "rank - 1", ("commit",), LOGGED
  ),
  "events of a later window are not counted": Mutant(
    "event_log:_pushed",
    "indexing.NOWHERE - rank[-1]) + rank[-1]",
    "indexing.NOWHERE - rank[-1]) | rank[-1]",
    ("commit",),
    LOGGED,
  ),
  "pages that were never cached are told to be taken out": Mutant(
    "page_pool:_unpublished",
    "events, taken.valid, pages",
    "events, valid, pages",
    ("allocate",),
    LOGGED,
  ),
  "pages of no use are told of": Mutant(
    "publishing:_insert",
    "listed & ~again,\n      pages,",
    "valid & ~again,\n      pages,",
    ("commit",),
    LOGGED,
  ),
  "a refused reset is told as done": Mutant(
    "event_log:cleared",
    "done[None]",
    "done[None] | True",
    ("reset_prefix_cache",),
    LOGGED,
  ),
  "a page is its own parent": Mutant(
    "publishing:_insert",
    "parent=settled.parents",
    "parent=settled.keys",
    ("commit",),
    LOGGED,
  ),
  "all sequences have one root": Mutant(
    "publishing:_insert",
    "root=settled.roots",
    "root=settled.roots * 0",
    ("commit",),
    LOGGED,
  ),
}
