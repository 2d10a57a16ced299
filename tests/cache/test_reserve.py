"""Reservations: rows are served in order, all-or-nothing."""

import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv import Status
from jaxkv._src.cache.steps import reserve
from tests.cache.by_hand import ints
from tests.cache.by_hand import pages
from tests.cache.by_hand import tiny
from tests.cache.by_hand import write


@pytest.mark.parametrize(
  ("need", "keep_free", "available", "granted"),
  [
    ((3, 2, 2), (0, 0, 0), 7, (True, True, True)),
    ((3, 5, 2), (0, 0, 0), 7, (True, False, True)),
    ((9, 9, 7), (0, 0, 0), 7, (False, False, True)),
    ((3, 2, 0), (0, 3, 0), 7, (True, False, True)),
    ((0, 0, 0), (0, 0, 1), 0, (True, True, False)),
  ],
)
def test_rows_that_do_not_fit_are_passed_over(
  need, keep_free, available, granted
):
  out = reserve.in_order(
    ints(*need)[:, None],
    jnp.ones((3,), bool),
    ints(available),
    ints(*keep_free)[:, None],
  )
  assert tuple(out.tolist()) == granted


def test_rows_without_demand_take_nothing():
  asked = jnp.asarray([False, True])
  out = reserve.in_order(ints((7,), (7,)), asked, ints(7), ints((0,), (0,)))
  assert out.tolist() == [False, True]


def test_a_row_must_fit_in_every_pool():
  """The first row takes what the second one lacks, but not all pages."""
  need = ints((3, 1), (1, 2), (0, 1))
  asked = jnp.ones((3,), bool)
  out = reserve.in_order(need, asked, ints(4, 2), jnp.zeros_like(need))
  assert out.tolist() == [True, False, True]
  out = reserve.in_order(need, asked, ints(4, 2), ints((0, 0), (0, 0), (2, 0)))
  assert out.tolist() == [True, False, False]


@pytest.mark.slow
def test_a_page_hit_by_two_rows_counts_once():
  """Page 1 is free and cached: of 5 free pages, 1 + 2 and 2 are taken."""
  state = write(tiny(num_pages=6), 0, 1, 2)
  state, _ = jaxkv.free(state)
  prompts = ints((1, 2, 3, 4, 5), (1, 2, 6, 7, 8))
  state, out = jaxkv.admit(state, ints(0, 1), prompts, ints(5, 5))
  assert out.ok.tolist() == [True, True]
  assert pages(state, 0)[0] == pages(state, 1)[0] == 1
  assert jaxkv.free_pages(state) == []


@pytest.mark.slow
def test_hits_count_by_their_queue_position():
  """Of 4 free pages, one is hit and three more are needed, one kept free."""
  state = write(tiny(num_pages=5), 0, 1, 2)
  state, _ = jaxkv.free(state)
  prompt = ints((1, 2, 3, 4, 5, 6, 7))
  _, out = jaxkv.admit(state, ints(0), prompt, ints(7), keep_free=ints(1))
  assert out.code.tolist() == [Status.OUT_OF_PAGES]
  _, out = jaxkv.admit(state, ints(0), prompt, ints(7))
  assert out.ok.tolist() == [True]
