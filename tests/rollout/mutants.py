"""Broken rollouts: one small mistake each, such as people make."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxkv._src.rollout import invariants
from tests.rollout import sampling_mutants
from tests.rollout.test_arguments import TestNumbersOfACall
from tests.rollout.test_by_hand import check_chunks
from tests.rollout.test_by_hand import check_counters
from tests.rollout.test_by_hand import check_first_come
from tests.rollout.test_by_hand import check_groups
from tests.rollout.test_by_hand import check_num_samples
from tests.rollout.test_by_hand import check_order
from tests.rollout.test_by_hand import check_preemption
from tests.rollout.test_by_hand import check_priority
from tests.rollout.test_by_hand import check_room
from tests.rollout.test_by_hand import check_scarce_pages
from tests.rollout.test_by_hand import check_sequences
from tests.rollout.test_by_hand import check_shared
from tests.rollout.test_by_hand import check_victim
from tests.rollout.test_devices import TestPlaces
from tests.rollout.test_encoder import check_few_pages
from tests.rollout.test_encoder import check_refused
from tests.rollout.test_encoder import check_samples
from tests.rollout.test_hopeless import check_hopeless
from tests.rollout.test_packing import check_widths
from tests.rollout.test_states import check_states
from tests.tools.mistakes import FailsCheck
from tests.tools.mistakes import given
from tests.tools.mistakes import returned
from tests.tools.mistakes import text


def _tokens(_):
  check_sequences(60, 4)


def _chunks(_):
  check_chunks((1, 16))


def _greedy(_):
  check_sequences(60, 4, temperatures=(0.0,))


def _with_new_laws(check):
  """A check whose invariants are traced with the mistake, and not kept."""
  invariants._check_invariants.clear_cache()
  try:
    check()
  finally:
    invariants._check_invariants.clear_cache()


def _encoder(_):
  _with_new_laws(check_few_pages)


def _encoder_refused(_):
  _with_new_laws(check_refused)


def _encoder_shared(_):
  _with_new_laws(check_samples)


def _scarce(_):
  check_scarce_pages()


def _counters(_):
  check_counters()


def _preemption(_):
  check_preemption()


def _room(_):
  check_room()


def _shared(_):
  check_shared()


def _order(_):
  check_order()


def _first_come(_):
  check_first_come()


def _victim(_):
  check_victim()


def _hopeless(_):
  check_hopeless()


def _states(_):
  check_states(6, 100, 1.0)


def _ends_of_pages(_):
  check_states(2, 30, 1.0)


def _widths(_):
  check_widths()


def _priority(_):
  check_priority()


def _groups(_):
  check_groups((90, 18))


def _num_samples(_):
  check_num_samples()


def _negative_steps(_):
  TestNumbersOfACall().test_steps(
    -1, ValueError, "must be at least 0, got -1; use None for no limit"
  )


def _places(_):
  TestPlaces().test_on_one_device()


def _keys_of_prompts(out, g):
  """All samples of a prompt have one key."""
  samples = g.config.num_samples
  return replace(out, keys=jnp.repeat(out.keys[::samples], samples, axis=0))


def _least_likely(g):
  """The distributions turned round."""
  logits = -g.weights.logits
  return g.weights._replace(
    logits=logits, best=jnp.max(logits, axis=1, keepdims=True)
  )


def _at_temperature_1(out, g):
  """Log-probabilities of the model's own distribution."""
  scores = jax.nn.log_softmax(g.logits, axis=1)
  own = jnp.take_along_axis(scores, out.tokens[:, None], axis=1)
  return out._replace(log_probs=own[:, 0])


def _rollout(place, wrong, check):
  return FailsCheck(f"jaxkv._src.rollout.{place}", wrong, check)


MUTANTS = {
  # --- sampling --------------------------------------------------------------
  "temperature multiplies": _rollout(
    "sampling:_weights",
    returned(lambda out, g: out._replace(divisor=1 / out.divisor)),
    _tokens,
  ),
  "greedy takes the least likely": _rollout(
    "sampling:_most_likely", given(weights=_least_likely), _greedy
  ),
  "both choices have one number": _rollout(
    "sampling:_uniforms", returned(lambda out, g: (out[0], out[0])), _tokens
  ),
  "all draws of a sequence are one": _rollout(
    "sampling:draw", given(counts=lambda g: g.counts * 0), _tokens
  ),
  "a draw depends on the place in the batch": _rollout(
    "sampling:draw", given(keys=lambda g: g.keys[::-1]), _tokens
  ),
  "log-probabilities of another temperature": _rollout(
    "sampling:draw", returned(_at_temperature_1), _tokens
  ),
  # --- sequences -------------------------------------------------------------
  "a token less": _rollout(
    "endings:ending",
    given(rows=lambda g: g.rows._replace(lengths=g.rows.lengths + 1)),
    _tokens,
  ),
  "nothing stops": _rollout(
    "endings:ending",
    given(config=lambda g: replace(g.config, stop_token=-1)),
    _tokens,
  ),
  "log-probabilities are a place late": _rollout(
    "sequences:append",
    text("log_probs, place, length,", "log_probs, place, length + 1,"),
    _tokens,
  ),
  "samples of a prompt are equal": _rollout(
    "sequences:samples_of", returned(_keys_of_prompts), _tokens
  ),
  "padding stays": _rollout(
    "sequences:samples_of", text("column < lengths[:, None]", "True"), _tokens
  ),
  "the last that waits is first": _rollout(
    "sequences:first_of",
    given(condition=lambda g: g.condition & ~jnp.roll(g.condition, -1)),
    _preemption,
  ),
  "a failure has no code": _rollout(
    "sequences:fail", given(code=lambda g: g.code * 0), _hopeless
  ),
  # --- admission -------------------------------------------------------------
  "every prompt leads all others": _rollout(
    "admission:_siblings",
    text("== (others // samples)[None]", ">= 0 * (others // samples)[None]"),
    _tokens,
  ),
  "nobody follows": _rollout(
    "admission:choose", text("joins = ok &", "joins = ~ok & ok &"), _counters
  ),
  "what others compute is computed too": _rollout(
    "admission:candidates",
    text(
      "jnp.any(blocked, axis=1) & wants", "jnp.any(blocked, axis=1) & False"
    ),
    _shared,
  ),
  "those who enter together share nothing": _rollout(
    "admission:choose",
    text("(ok & waiting.same", "(~ok & ok & waiting.same"),
    _shared,
  ),
  "the shortest cached prefix first": _rollout(
    "admission:choose",
    text("NOWHERE), cached)", "NOWHERE), 99 - cached)"),
    _order,
  ),
  "overtaken without end": _rollout(
    "admission:choose",
    text("passed >= config.max_overtaken", "passed < 0"),
    _order,
  ),
  "nobody is overtaken": _rollout(
    "slots:_enter", text("values=passed", "values=passed * 0"), _order
  ),
  "priorities are the other way round": _rollout(
    "sequences:order_of",
    given(
      sequences=lambda g: replace(g.sequences, priority=-g.sequences.priority)
    ),
    _priority,
  ),
  "the highest priority is preempted": _rollout(
    "slots:_preempt",
    text("jnp.max(priority)", "jnp.min(priority + 0 * 1)"),
    _priority,
  ),
  "all samples of every prompt": _rollout(
    "sequences:samples_of",
    given(num_samples=lambda g: g.num_samples + 1),
    _num_samples,
  ),
  "windows keep all their pages": _rollout(
    "slots:recycle_windows",
    text("not state.cache.config.skips_pages", "True"),
    _groups,
  ),
  "a prompt gets all its pages at once": _rollout(
    "slots:tokens_at_once",
    text("if sizes.skips_pages", "if sizes is None"),
    _groups,
  ),
  "computed pages have no keys": _rollout(
    "loop:_commit",
    text("place, last, values", "place, last + 9, values"),
    _victim,
  ),
  "no room to grow": _rollout(
    "slots:_enter",
    text("runners + row > 0, reserve", "runners < 0, reserve"),
    _room,
  ),
  "those that can never run wait": _rollout(
    "slots:_enter", text("alone | (admitted", "(admitted"), _hopeless
  ),
  # --- forks -----------------------------------------------------------------
  "the first page of a fork is not copied": _rollout(
    "slots:_finish_forks",
    text("kv_memory.copy(kv, *owed)", "kv"),
    _tokens,
  ),
  "forks are not counted": _rollout(
    "slots:_finish_forks",
    text("jnp.sum(forked,", "jnp.sum(refused,"),
    _counters,
  ),
  "a fork waits for one more token": _rollout(
    "slots:share_prompts",
    text("== lengths(state) - 1)", "== lengths(state))"),
    _tokens,
  ),
  # --- packing ---------------------------------------------------------------
  "prompts have no places of slots": _rollout(
    "packing:schedule", text("size + idle)", "size)"), _counters
  ),
  "the largest width always": _rollout(
    "packing:schedule",
    text("jnp.maximum(width, 1)", "jnp.int32(len(sizes) - 1)"),
    _widths,
  ),
  "the youngest first": _rollout(
    "packing:schedule",
    text("jnp.where(prefills, turns,", "jnp.where(prefills, -turns,"),
    _first_come,
  ),
  "the last token is a column late": _rollout(
    "packing:schedule",
    text("first + final,", "first + final + 1,"),
    _chunks,
  ),
  "tokens of prompts are at the place of the first": _rollout(
    "packing:single_views", text(" + work.offsets", ""), _tokens
  ),
  # --- encoders --------------------------------------------------------------
  "an encoder's tokens are not written": _rollout(
    "encoding:write_encoded",
    text("(held == 0)", "(held > 0)"),
    _encoder,
  ),
  "the input is that of another prompt": _rollout(
    "encoding:write_encoded",
    text(
      "ops.take(state.running, slot), state.config.num_samples",
      "ops.take(state.running, slot), 1",
    ),
    _encoder,
  ),
  "encoders have the lengths of others": _rollout(
    "encoder:lengths_of", given(num_samples=lambda g: 1), _encoder
  ),
  "an encoder is seen up to the sequence's length": _rollout(
    "packing:views", given(encoder=lambda g: None), _encoder
  ),
  "forks find out too late that there is no page": _rollout(
    "slots:_with_pages",
    text("refused = ready &", "refused = ~ready & ready &"),
    _encoder_refused,
  ),
  "samples of a single token have encoders of their own": _rollout(
    "admission:_siblings",
    text("1 if state.encoder is None else 0", "1"),
    _encoder_shared,
  ),
  # --- decoding --------------------------------------------------------------
  "the ended keep their pages": _rollout(
    "loop:_compute",
    text("mask=leaving < none", "mask=preempted < none"),
    _tokens,
  ),
  "the preempted keep their pages": _rollout(
    "loop:_compute",
    text("mask=leaving < none", "mask=steps.ended"),
    _preemption,
  ),
  "a page of each slot is committed": _rollout(
    "loop:_commit", text("left - now", "left * 0"), _counters
  ),
  "the oldest is preempted": _rollout(
    "slots:_preempt",
    text(
      "jnp.where(fewest, turns(state), -1)",
      "jnp.where(fewest, none - turns(state), -1)",
    ),
    _preemption,
  ),
  "the longest is preempted": _rollout(
    "slots:_preempt",
    text(
      "jnp.where(last, state.cache.length,",
      "jnp.where(last, -state.cache.length,",
    ),
    _victim,
  ),
  "one that is alone waits for pages": _rollout(
    "slots:_preempt",
    text("victim & alone, code", "victim & ~victim, code"),
    _hopeless,
  ),
  "steps of earlier calls count": _rollout(
    "until:goes_on", given(begin=lambda g: g.begin * 0), _preemption
  ),
  "the last number of pages is the peak": _rollout(
    "loop:_count",
    text("jnp.maximum(before.peak_pages, in_use)", "in_use"),
    _counters,
  ),
  "the null page is shared": _rollout(
    "loop:_count", text("num_pages - 1 -", "num_pages -"), _counters
  ),
  "a negative number of steps": _rollout(
    "until:_as_count",
    text("int(number) < 0", "int(number) < -1"),
    _negative_steps,
  ),
  "a step goes past the end of a page with a state": _rollout(
    "slots:tokens_now",
    text("sizes.page_size - begun", "sizes.page_size"),
    _ends_of_pages,
  ),
  "tokens of a recurrent sequence are in two parts": _rollout(
    "loop:_compute",
    text("one_part=recurrent.has_states(state.cache.config)", "one_part=False"),
    _states,
  ),
  "a rollout is not brought to its memory": _rollout(
    "placement:beside", returned(lambda out, g: g.tree), _places
  ),
}

MUTANTS |= sampling_mutants.MUTANTS
