"""Mistakes about encoders, states, the ages of pages, and events."""

from dataclasses import replace

import jax.numpy as jnp

from jaxkv._src.arrays import indexing
from tests.cache.mutation import AGED
from tests.cache.mutation import ENCODER
from tests.cache.mutation import LOGGED
from tests.cache.mutation import SCRATCH
from tests.cache.mutation import Mutant
from tests.tools.mistakes import given
from tests.tools.mistakes import returned


def _written_from_the_start(pushed):
  """Events of a call are written over those of earlier calls."""

  def call(log, valid, **fields):
    out = pushed(replace(log, count=log.count * 0), valid, **fields)
    return replace(out, count=log.count + out.count)

  return call


def _first_group_is_empty(empty, g):
  """Whether slots hold no page of the first group, an encoder's."""
  return indexing.take(g.state.num_pages, g.slots, jnp.int32(0)) == 0


KIND_MUTANTS = {
  # --- encoders --------------------------------------------------------------
  "an encoder's pages are counted by the decoder's tokens": Mutant(
    "cache.group_kinds:GroupSizes.columns_for",
    given(encoder_tokens=lambda g: g.tokens),
    ("allocate_slots",),
    ENCODER,
  ),
  "an encoder's pages bound the sequence": Mutant(
    "cache.group_kinds:GroupSizes.holds_encoder",
    returned(lambda out, g: out & False),
    ("commit",),
    ENCODER,
  ),
  "rolling back gives an encoder's pages back": Mutant(
    "cache.group_kinds:GroupSizes.keep_encoder",
    returned(lambda out, g: g.columns),
    ("truncate",),
    ENCODER,
  ),
  "a slot without an encoder's pages is empty": Mutant(
    "cache.state:is_empty",
    returned(_first_group_is_empty),
    ("free_mask",),
    ENCODER,
  ),
  # --- states ----------------------------------------------------------------
  "a fork copies no state": Mutant(
    "cache.group_kinds:GroupSizes.open_pages",
    returned(lambda out, g: out & False),
    ("fork",),
    SCRATCH,
  ),
  "a state is rolled back to inside a page": Mutant(
    "cache.pool.recurrent:can_continue",
    given(length=lambda g: g.tokens),
    ("truncate",),
    SCRATCH,
  ),
  "scratch pages are given back": Mutant(
    "cache.pool.recurrent:num_scratch",
    returned(lambda out, g: out * 0),
    ("truncate",),
    SCRATCH,
  ),
  "scratch pages do not move along": Mutant(
    "cache.pool.recurrent:_growth",
    returned(lambda out, g: (out[0], out[1] * 0)),
    ("allocate",),
    SCRATCH,
  ),
  # --- ages ------------------------------------------------------------------
  "pages without a key have an age": Mutant(
    "cache.telemetry:count_evicted",
    given(valid=lambda g: g.pages > 0),
    ("allocate",),
    AGED,
  ),
  "it is not noted when pages are given back": Mutant(
    "cache.telemetry:stamp_released",
    returned(lambda out, g: g.ages),
    ("free_mask",),
    AGED,
  ),
  # --- events ----------------------------------------------------------------
  "it is not noted in which group a page was stored": Mutant(
    "cache.telemetry:log_stored",
    returned(lambda out, g: replace(out, group_of=g.log.group_of)),
    ("commit",),
    LOGGED,
  ),
  "a later window of events is written over the first": Mutant(
    "cache.telemetry:_push", _written_from_the_start, ("commit",), LOGGED
  ),
  "a refused reset is told as done": Mutant(
    "cache.telemetry:log_cleared",
    given(done=lambda g: g.done | True),
    ("reset_prefix_cache",),
    LOGGED,
  ),
  "a page is its own parent": Mutant(
    "cache.telemetry:log_stored",
    given(fields=lambda g: g.fields | {"parent": g.fields["key"]}),
    ("commit",),
    LOGGED,
  ),
}
