"""Broken ways to score: one small mistake each."""

from tests.rollout.by_forward import traced_anew
from tests.rollout.test_score import check_groups
from tests.rollout.test_score import test_salts
from tests.rollout.test_score import test_scarce_pages
from tests.rollout.test_score import test_what_the_model_is_told
from tests.rollout.test_score_failures import check_short_slots
from tests.rollout.test_score_failures import check_small_temperatures
from tests.tools.mistakes import FailsCheck
from tests.tools.mistakes import text


def _plain(_):
  check_groups()


def _recurrent(_):
  check_groups("delta_net")


def _rows(_):
  test_what_the_model_is_told()


def _salts(_):
  test_salts()


def _scarce(_):
  test_scarce_pages()


def _failed(_):
  check_short_slots(traced_anew(entropy=True, top_log_probs=3))


def _cold(_):
  check_small_temperatures(traced_anew(entropy=True, top_log_probs=3))


def _scoring(place, wrong, check):
  return FailsCheck(f"jaxkv._src.rollout.scoring.{place}", wrong, check)


MUTANTS = {
  "a completion lacks the prompt's last page": _scoring(
    "group:_grow", text("kv_memory.copy(kv, *owed)", "kv"), _plain
  ),
  "a recurrence goes past the end of a page": _scoring(
    "group:_grow",
    text("jnp.minimum(now, config.page_size - begun)", "now"),
    _recurrent,
  ),
  "the scored token is the one that is computed": _scoring(
    "calls:_Packed.scored",
    text("after = self._positions + 1", "after = self._positions"),
    _plain,
  ),
  "a model is told too many tokens": _scoring(
    "calls:_Packed._rows", text("length - prompt", "length"), _rows
  ),
  "salts are forgotten": _scoring(
    "group:_begin", text("asked, salts)", "asked, None)"), _salts
  ),
  "scarce pages are never enough": _scoring(
    "group:_scarce", text("group.alone | ~others", "others | ~others"), _scarce
  ),
  "ended completions keep their pages": _scoring(
    "group:_finish",
    text("keeps = (group.runs() & ~ended)", "keeps = group.runs()"),
    _plain,
  ),
  "a group that fails keeps its prompt": _scoring(
    "group:_scarce",
    text("holds=group.holds & False", "holds=group.holds"),
    _scarce,
  ),
  "entropies of a group that fails are 0": _scoring(
    "score:_without_failed",
    text("(scored.entropy, jnp.nan)", "(scored.entropy, 0)"),
    _failed,
  ),
  "logits are divided before their maximum is subtracted": _scoring(
    "calls:_Packed.scored",
    text("(logits - best) / heat", "logits / heat"),
    _cold,
  ),
}
