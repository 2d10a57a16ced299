"""Broken verbs, and broken parts of the loop: one small mistake each."""

import importlib
from dataclasses import replace

from tests.rollout import test_replayed_experts as replayed
from tests.rollout.test_parts import check_drafts
from tests.rollout.test_parts import check_endings
from tests.rollout.test_parts import check_guesses
from tests.rollout.test_parts import check_pages_of_guesses
from tests.rollout.test_parts import check_rows
from tests.rollout.test_parts import check_until
from tests.rollout.test_verbs import check_extend
from tests.rollout.test_verbs import check_find
from tests.rollout.test_verbs import check_harvest
from tests.rollout.test_verbs import check_ids
from tests.rollout.test_verbs import check_leaving
from tests.rollout.test_verbs import check_old_keys
from tests.rollout.test_verbs import check_submit
from tests.rollout.test_verbs import check_update_weights
from tests.rollout.test_verbs import check_versions
from tests.tools.mistakes import FailsCheck
from tests.tools.mistakes import given
from tests.tools.mistakes import returned
from tests.tools.mistakes import text

_VERBS = [
  value
  for name in ("abort", "extend", "harvest", "submit", "update_weights")
  for value in vars(
    importlib.import_module(f"jaxkv._src.rollout.verbs.{name}")
  ).values()
  if hasattr(value, "clear_cache")
]


def _compiled_anew(check):
  """A check of what is compiled once for all, of which nothing is kept."""

  def anew(_):
    for verb in _VERBS:
      verb.clear_cache()
    try:
      check()
    finally:
      for verb in _VERBS:
        verb.clear_cache()

  return anew


_find = _compiled_anew(check_find)
_leaving = _compiled_anew(check_leaving)
_extend = _compiled_anew(check_extend)
_submit = _compiled_anew(check_submit)
_ids = _compiled_anew(check_ids)
_harvest = _compiled_anew(check_harvest)
_update = _compiled_anew(check_update_weights)


def _experts(check):
  def anew():
    replayed.runner.cache_clear()
    try:
      check()
    finally:
      replayed.runner.cache_clear()

  return _compiled_anew(anew)


_experts_in_pages = _experts(replayed.check_scarce_pages)
_experts_of_verbs = _experts(replayed.check_verbs)
_experts_of_weights = _experts(replayed.check_new_weights)


def _versions(_):
  check_versions()


def _old_keys(_):
  check_old_keys()


def _until(_):
  check_until()


def _endings(_):
  check_endings()


def _guesses(_):
  check_guesses()


def _drafts(_):
  check_drafts()


def _pages_of_guesses(_):
  check_pages_of_guesses()


def _rows(_):
  check_rows()


def _rollout(place, wrong, check):
  return FailsCheck(f"jaxkv._src.rollout.{place}", wrong, check)


MUTANTS = {
  # --- verbs -----------------------------------------------------------------
  "a sequence that was harvested is found": _rollout(
    "verbs.find:find", text(" & there[None]", ""), _find
  ),
  "a sequence can be named twice": _rollout(
    "verbs.find:find", text(" & ~ops.any_earlier(ids, mask)", ""), _find
  ),
  "rows that do not count name sequences": _rollout(
    "verbs.find:find",
    text("any_earlier(ids, mask)", "any_earlier(ids, mask | ~mask)"),
    _find,
  ),
  "the aborted keep their slots": _rollout(
    "verbs.abort:_leave",
    text("slots_of(state, place)", "slots_of(state, place * 0 + 99)"),
    _leaving,
  ),
  "those that leave keep their pages": _rollout(
    "verbs.find:leave_slots",
    text("mask=holds", "mask=holds & ~holds"),
    _leaving,
  ),
  "samples wait for one that left": _rollout(
    "verbs.find:leave_slots",
    text("ops.take(leaving, state.leader, fill=False)", "False"),
    _leaving,
  ),
  "those that ended wait again": _rollout(
    "verbs.abort:_leave",
    text("status >= queue.DONE", "status >= queue.EMPTY"),
    _leaving,
  ),
  "a turn begins where the first one did": _rollout(
    "verbs.extend:_extend",
    text("start=ops.put(sequences.start, place, values=length),", ""),
    _extend,
  ),
  "a turn ends where the last one did": _rollout(
    "verbs.extend:_extend",
    text("limit=ops.put(sequences.limit, place, values=length + budget),", ""),
    _extend,
  ),
  "a turn is as long as the first one": _rollout(
    "verbs.extend:_extend",
    text("length + budget", "length + 4 + 0 * budget"),
    _extend,
  ),
  "a turn has any length": _rollout(
    "verbs.extend:_extend",
    text("bad |= budget > width", "bad |= budget > 99 + width"),
    _extend,
  ),
  "what was said has no keys": _rollout(
    "verbs.extend:_extend", text("rehashed(state, place)", "state"), _extend
  ),
  "what was said is part of the loss": _rollout(
    "verbs.harvest:_rows",
    text(
      "mask=versions != queue.NOT_DRAWN",
      "mask=column >= ops.take(sequences.prompt_length, rows)[:, None]",
    ),
    _extend,
  ),
  "a row that is EMPTY is a group": _rollout(
    "verbs.submit:_submit",
    text("jnp.all(empty, axis=1)", "jnp.any(empty, axis=1)"),
    _submit,
  ),
  "numbers are used again": _rollout(
    "verbs.submit:_submit",
    text("jnp.maximum(state.next_id, last)", "state.next_id"),
    _submit,
  ),
  "rows keep the keys of others": _rollout(
    "verbs.submit:_put",
    text("return rehashed(", "return (lambda x, _: x)("),
    _submit,
  ),
  "rows keep what others computed": _rollout(
    "verbs.submit:_put",
    text("computed=ops.put(state.computed, place, values=0),", ""),
    _submit,
  ),
  "rows were overtaken before": _rollout(
    "verbs.submit:_put",
    text("overtaken=ops.put(state.overtaken, place, values=0),", ""),
    _submit,
  ),
  "new sequences are in the order of their rows": _rollout(
    "verbs.submit:_put", text("order=order,", ""), _submit
  ),
  "the second sample's number is another's": _rollout(
    "verbs.submit:_taken", text("apart < samples", "apart < 1"), _ids
  ),
  "two prompts have one number": _rollout(
    "verbs.submit:_taken",
    text("near & earlier", "near & ~near & earlier"),
    _ids,
  ),
  "the unfinished are harvested": _rollout(
    "verbs.harvest:_harvest",
    text("early = ~ops.take(ready, rows, fill=False)", "early = rows < 0"),
    _harvest,
  ),
  "groups are harvested in parts": _rollout(
    "verbs.harvest:harvest", given(groups=lambda g: False), _harvest
  ),
  "what was harvested stays": _rollout(
    "verbs.harvest:_harvest",
    text("served, queue.EMPTY)", "served, queue.DONE)"),
    _harvest,
  ),
  # --- weights ---------------------------------------------------------------
  "those that run on have new keys": _rollout(
    "verbs.update_weights:_update_weights",
    text("ops.where_valid(waits, rows)", "rows"),
    _update,
  ),
  "what is dropped stays": _rollout(
    "verbs.update_weights:_begun_again",
    returned(lambda out, g: g.sequences),
    _update,
  ),
  "what is dropped ends where it would have": _rollout(
    "verbs.update_weights:_begun_again",
    returned(lambda out, g: replace(out, limit=g.sequences.limit)),
    _update,
  ),
  "old K/V is kept": _rollout(
    "verbs.update_weights:_update_weights",
    text('how != "keep"', 'how == "drop"'),
    _update,
  ),
  "new weights have the old version": _rollout(
    "verbs.update_weights:_update_weights",
    text("cache, _ = new_epoch(state.cache)", "cache = state.cache"),
    _update,
  ),
  "tokens have the first version": _rollout(
    "sequences:append", given(version=lambda g: g.version * 0), _versions
  ),
  "those that begin anew have old keys": _rollout(
    "slots:_begin_anew",
    text(
      "ops.where_valid(stale, numbers)",
      "ops.where_valid(stale & ~stale, numbers)",
    ),
    _old_keys,
  ),
  # --- until, endings, rows --------------------------------------------------
  "groups end with their first sample": _rollout(
    "until:ended_groups",
    text("& jnp.all(status >= queue.DONE, axis=1)", ""),
    _until,
  ),
  "failed sequences never ended": _rollout(
    "until:has_ended", returned(lambda out, g: g.status == 2), _until
  ),
  "rows without a sequence have ended": _rollout(
    "until:has_ended", returned(lambda out, g: g.status >= 2), _until
  ),
  "stop strings count at once": _rollout(
    "endings:ending",
    given(own=lambda g: replace(g.own, min_tokens=None)),
    _endings,
  ),
  "stop tokens of other sequences": _rollout(
    "endings:ending",
    given(own=lambda g: replace(g.own, stop_tokens=g.own.stop_tokens[::-1])),
    _endings,
  ),
  "a stop string has no index": _rollout(
    "endings:ending",
    text("stop = jnp.where(found >= 0, found, stop)", "pass"),
    _endings,
  ),
  "stop strings begin in the middle": _rollout(
    "endings:ending", text("rows.counts == 0", "rows.counts < 0"), _endings
  ),
  "a model is told of other sequences": _rollout(
    "model:call",
    text(
      "numbers = ops.take(state.running, owners,",
      "numbers = ops.take(state.running, owners[::-1],",
    ),
    _rows,
  ),
  "a process is told of other sequences": _rollout(
    "drawing:_one",
    text(
      "process(changed, rows,",
      "process(changed, rows._replace(ids=rows.ids[::-1]),",
    ),
    _rows,
  ),
  "a process writes where nothing is drawn": _rollout(
    "drawing:_one",
    text("place = ops.where_valid(draws, numbers)", "place = numbers"),
    _rows,
  ),
  # --- drafts ----------------------------------------------------------------
  "the table of drafts is believed": _rollout(
    "drafts:propose",
    text("jnp.all(there == own, axis=1)", "jnp.any(there == there, axis=1)"),
    _guesses,
  ),
  "guesses beyond the last token": _rollout(
    "drafts:limited",
    text("jnp.minimum(likely, room)", "likely"),
    _guesses,
  ),
  "tokens behind a wrong guess": _rollout(
    "drawing:draw", text("(tokens == guess)", "(guess == guess)"), _drafts
  ),
  "rejected tokens are committed": _rollout(
    "loop:_compute",
    text("jnp.maximum(counts, steps.counts)", "counts + guesses.counts"),
    _drafts,
  ),
  "guesses take the last pages": _rollout(
    "guessing:_fit", returned(lambda out, g: out | ~out), _pages_of_guesses
  ),
  # --- experts ---------------------------------------------------------------
  "experts of those that end are lost": _rollout(
    "loop:_compute",
    text("kv, cache, leaving)", "kv, cache, preempted)"),
    _experts_in_pages,
  ),
  "experts are read before they are written": _rollout(
    "loop:_compute",
    text(
      "sequences, kv, cache, leaving)", "sequences, before.kv, cache, leaving)"
    ),
    _experts_in_pages,
  ),
  "a token that never ran has experts": _rollout(
    "routing:with_experts",
    text("cache.length[slot][None]", "cache.length[slot][None] + 1"),
    _experts_in_pages,
  ),
  "experts of those that leave are lost": _rollout(
    "verbs.find:leave_slots",
    text("jnp.where(holds, state.running, none)", "jnp.full_like(slot, none)"),
    _experts_of_verbs,
  ),
  "experts known before are forgotten": _rollout(
    "routing:with_experts",
    text("jnp.where(found < 0, before, found)", "found"),
    _experts_of_weights,
  ),
  "those that begin again keep their experts": _rollout(
    "verbs.update_weights:_begun_again",
    text("experts=experts", "experts=sequences.experts"),
    _experts_of_weights,
  ),
}
