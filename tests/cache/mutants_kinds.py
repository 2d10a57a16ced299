"""Mistakes about recurrent states."""

from tests.cache.mutation import STATES
from tests.cache.mutation import Mutant
from tests.tools.mistakes import given
from tests.tools.mistakes import returned

KIND_MUTANTS = {
  "a fork copies no state": Mutant(
    "cache.group_kinds:GroupSizes.open_pages",
    returned(lambda out, g: out & False),
    ("fork",),
    STATES,
  ),
  "a state is rolled back to inside a page": Mutant(
    "cache.pool.recurrent:can_continue",
    given(length=lambda g: g.tokens),
    ("truncate",),
    STATES,
  ),
}
