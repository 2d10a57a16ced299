"""Broken settings, processors, filters and draws: one small mistake each."""

import contextlib

import jax.numpy as jnp
import pytest

from jaxkv._src.sampling import sample
from tests.rollout import test_filters
from tests.rollout import test_observed
from tests.rollout import test_processors
from tests.rollout import test_sampling
from tests.rollout import test_settings
from tests.tools.mistakes import FailsCheck
from tests.tools.mistakes import given
from tests.tools.mistakes import returned
from tests.tools.mistakes import text


def _cutoffs(_):
  tests = test_filters.TestByHand()
  for top_k, tokens in ((1, [1]), (2, [1, 3]), (3, [1, 2, 3, 4])):
    tests.test_top_k(top_k, tokens)
  for top_p, tokens in ((0.47, [1]), (0.471, [1, 3]), (0.705, [1, 3])):
    tests.test_top_p(top_p, tokens)
  tests.test_min_p(0.4, [1, 3])
  tests.test_top_p_is_about_what_top_k_leaves()
  tests.test_top_p_is_about_what_min_p_leaves()
  tests.test_weights_that_differ_in_the_last_bit()


def _changed(_):
  tests = test_processors.TestByHand()
  for name in dir(tests):
    if name.startswith("test_"):
      getattr(tests, name)()


def _seen(_):
  tests = test_processors.TestSeen()
  tests.test_by_hand()
  tests.test_one_more_token()
  tests.test_counts_end_at_the_largest()


def _last_tokens(_):
  test_processors.TestLastTokens().test_by_hand()


def _rows(_):
  test_settings.TestRows().test_a_row_without_a_sequence(3)


def _put(_):
  tests = test_settings.TestPut()
  tests.test_what_is_left_out_has_no_effect()
  tests.test_shorter_lists_are_padded()
  tests.test_rows_out_of_range_change_nothing()


@contextlib.contextmanager
def _not_compiled():
  """So that the mistake is there, which a program of before does not have."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(test_sampling, "_compiled", sample.draw)
    yield


def _mixed(_):
  tests = test_sampling.TestMixed()
  with _not_compiled():
    tests.test_by_hand()
    tests.test_nothing_is_drawn_from_masked_tokens()


def _own(_):
  with _not_compiled():
    test_sampling.TestTheModelsOwn().test_by_hand()


def _top(_):
  test_observed.TestMostLikely().test_by_hand()


def _mistake(place, wrong, check):
  return FailsCheck(f"jaxkv._src.rollout.{place}", wrong, check)


MUTANTS = {
  # --- filters ---------------------------------------------------------------
  "top-k keeps a token more": _mistake(
    "filters:_keep_count", given(top_k=lambda g: g.top_k + 1), _cutoffs
  ),
  "top-p is about all tokens": _mistake(
    "filters:_keep_mass",
    text("_weight(least)[:, None]", "0"),
    _cutoffs,
  ),
  "min-p is forgotten": _mistake(
    "filters:cutoff", given(min_p=lambda g: None), _cutoffs
  ),
  "the search ends early": _mistake(
    "filters:_search", text("total - own(low) <", "total // 2 <"), _cutoffs
  ),
  "the search is in quarters of powers of two": _mistake(
    "filters:_search",
    text("loop[0] + 1 < loop[1]", "loop[0] + 2**21 < loop[1]"),
    _cutoffs,
  ),
  # --- processors ------------------------------------------------------------
  "what is in the prompt is drawn": _mistake(
    "processors:_penalized",
    text("(seen & _MOST)", "(seen > 0)"),
    _changed,
  ),
  "repetitions of the prompt are none": _mistake(
    "processors:_penalized",
    text("jnp.where(seen > 0,", "jnp.where((seen & _MOST) > 0,"),
    _changed,
  ),
  "negative logits are divided": _mistake(
    "processors:_penalized",
    text("logits * penalty)", "logits / penalty)"),
    _changed,
  ),
  "a stop token comes a token late": _mistake(
    "processors:_additions", text("counts <", "counts <="), _changed
  ),
  "the stop token of all is allowed": _mistake(
    "processors:_additions",
    given(history=lambda g: g.history._replace(stop_token=-1)),
    _changed,
  ),
  "every bad word is begun": _mistake(
    "processors:_begun", returned(lambda out, g: out | True), _changed
  ),
  "counts overflow into the prompt's bit": _mistake(
    "processors:see", text("mask & ~full", "mask"), _seen
  ),
  "rows that draw nothing count a token": _mistake(
    "processors:see", given(mask=lambda g: g.mask | True), _seen
  ),
  "padding is seen": _mistake(
    "processors:seen_in",
    given(lengths=lambda g: jnp.full_like(g.lengths, g.tokens.shape[1])),
    _seen,
  ),
  "the last tokens are a place early": _mistake(
    "processors:last_tokens_of",
    given(lengths=lambda g: g.lengths - 1),
    _last_tokens,
  ),
  # --- settings --------------------------------------------------------------
  "rows without a sequence have that of the last": _mistake(
    "settings:rows",
    given(numbers=lambda g: jnp.clip(g.numbers, 0, 2)),
    _rows,
  ),
  "what is left out stays": _mistake(
    "settings:put",
    text("values = jnp.asarray(fill, array.dtype)", "return array"),
    _put,
  ),
  "words are padded behind": _mistake(
    "settings:_widened", text("(count, 0)", "(0, count)"), _put
  ),
  # --- draws -----------------------------------------------------------------
  "all tokens are drawn from": _mistake(
    "sampling:_weights",
    returned(lambda out, g: out._replace(cutoff=out.cutoff * 0)),
    _mixed,
  ),
  "greedy rows are filtered": _mistake(
    "sampling:_weights",
    text("jnp.where(heat == 0, jnp.asarray", "jnp.where(heat < 0, jnp.asarray"),
    _mixed,
  ),
  "the model's own distribution is the changed one": _mistake(
    "sampling:draw", given(raw_logits=lambda g: None), _own
  ),
  "the entropy has another sign": _mistake(
    "observed:observe", text("- mean", "+ mean"), _own
  ),
  "of equal tokens the last is first": _mistake(
    "observed:_is_behind", text("columns > token", "columns < token"), _top
  ),
}
