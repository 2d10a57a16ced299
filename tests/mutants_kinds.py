"""Mistakes about encoders, and about the ages of pages."""

from tests.mutation import AGED
from tests.mutation import ENCODER
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
    "(granted & (lengths > 0))",
    "(granted & (lengths >= 0))",
    ("truncate",),
    ENCODER,
  ),
  "an encoder may be of any length": Mutant(
    "admitting:_static_code",
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
}
