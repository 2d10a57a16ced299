"""Caches for random calls with a shadow memory.

All caches of the state machine, and caches with pages of other sizes.
"""

from tests.cache.setups import CLASSIC
from tests.cache.setups import CLASSIC_PREFIXES
from tests.cache.setups import DRAFT
from tests.cache.setups import LONG
from tests.cache.setups import MERGE
from tests.cache.setups import SETUPS
from tests.cache.setups import Chunk
from tests.cache.setups import Full
from tests.cache.setups import Setup
from tests.cache.setups import State
from tests.cache.setups import Window
from tests.cache.setups import small

SHADOWED: dict[str, Setup] = SETUPS | {
  "pages_of_16": small(401, 16, num_pages=14, **MERGE),
  "pages_of_4_8_16": small(
    402,
    4,
    (Full(page_size=16), Window(6), State(page_size=8)),
    num_pages=60,
    pages_per_slot=16,
  ),
  "pages_of_1": small(403, 1, num_pages=9, **CLASSIC),
  "few_pages": small(404, 4, num_pages=5),
  "merged_windows": small(405, 2, (Full(), Window(3)), **LONG, **MERGE),
  "states_and_full": small(406, 2, (State(), Full(page_size=4)), **LONG),
  "draft_states": small(
    407, 1, (State(page_size=2), Window(4), Full()), **LONG, **DRAFT
  ),
  "published_chunks": small(
    408, 2, (Chunk(4), Full()), **LONG, **CLASSIC_PREFIXES, **MERGE
  ),
  "kept_of_16": small(
    409,
    16,
    (Window(20), Full()),
    prefix_retention_interval=32,
    num_pages=24,
    **CLASSIC,
  ),
}
