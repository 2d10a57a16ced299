"""Mistakes in the K/V memory: one each, and the test that notices it."""

import jax.numpy as jnp

from jaxkv import Status
from jaxkv.kv import FreshView
from tests.tools.mistakes import given
from tests.tools.mistakes import returned
from tests.tools.mistakes import table

_MEMORY = "test_memory.py::"
_ELSEWHERE = _MEMORY + "TestWrite::test_invalid_entries_write_nothing[{}]"
_ONE_COLUMN = _MEMORY + "TestAttend::test_one_column_equals_the_first_of_two"
_SHARE = "test_shared_prefix.py::TestShare::"
_MISUSE = "test_offload_memory.py::TestMisuse::"
_REFRESH = "test_shared_prefix.py::TestRefreshShared::"
_POOLS = "test_pools.py::"
_STATES = "test_recurrent_pages.py::TestReadAndWrite::"


def _in_another_pool(name):
  """Shifts page numbers by the size of the first pool of the test."""
  return lambda g: jnp.where(vars(g)[name] > 5, vars(g)[name] - 5, 0)


_TABLE = {
  "pages of the next layer are written": (
    "kv_pages:page_index",
    returned(lambda out, g: g.page_ids + g.layer * g.kv.num_pages),
    _ELSEWHERE.format("27-0"),
  ),
  "idle rows see a token": (
    "view:decode_lengths",
    returned(lambda out, g: g.view.starts + 1),
    _ONE_COLUMN,
  ),
  "a refreshed view is as before": (
    "share:refresh_shared",
    returned(lambda out, g: FreshView(view=g.view)),
    _REFRESH + "test_idle_rows_leave_their_cluster",
  ),
  "moves are made twice": (
    "offload_memory:misuse_of",
    returned(lambda out, g: out * (out == Status.MOVES_FORGOTTEN)),
    _MISUSE + "test_repeated_moves_are_reported",
  ),
  "no moves are forgotten": (
    "offload_memory:misuse_of",
    returned(lambda out, g: out * (out == Status.MOVES_REPEATED)),
    _MISUSE + "test_forgotten_moves_are_reported",
  ),
  "a pool begins at its second page": (
    "kv_pages:in_memory",
    given(page_ids=lambda g: g.page_ids + (g.page_ids > 0)),
    _POOLS + "test_numbers_of_a_pool_are_rows_of_its_memory",
  ),
  "page numbers of a later pool are rows": (
    "kv_pages:in_memory",
    returned(lambda out, g: g.page_ids),
    _POOLS + "test_numbers_of_a_pool_are_rows_of_its_memory",
  ),
  "a copy is made in another pool": (
    "pools:_copy_in_pool",
    given(src=_in_another_pool("src"), dst=_in_another_pool("dst")),
    _POOLS + "test_copies_stay_in_their_pools",
  ),
  "a state is read and written a page late": (
    "recurrent_pages:_state_rows",
    given(tokens=lambda g: g.tokens + g.pages.page_size),
    _STATES + "test_state_is_in_the_page_of_the_last_token",
  ),
  "clusters cannot be given": (
    "share:share",
    given(clusters=lambda g: None),
    _SHARE + "test_clusters_may_be_given",
  ),
}

MUTANTS = table("jaxkv._src.kv", "tests/kv", _TABLE)
