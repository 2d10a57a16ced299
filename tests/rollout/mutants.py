"""Broken rollouts: one small mistake each, such as people make."""

from dataclasses import replace

import jax.numpy as jnp

from tests.rollout.test_arguments import TestNumbersOfACall
from tests.rollout.test_by_hand import check_counters
from tests.rollout.test_by_hand import check_hopeless
from tests.rollout.test_by_hand import check_pause
from tests.rollout.test_by_hand import check_preemption
from tests.rollout.test_by_hand import check_scarce_pages
from tests.rollout.test_by_hand import check_sequences
from tests.tools.mistakes import FailsCheck
from tests.tools.mistakes import given
from tests.tools.mistakes import returned
from tests.tools.mistakes import text


def _tokens(_):
  check_sequences(60, 4)


def _greedy(_):
  check_sequences(60, 4, temperatures=(0.0,))


def _scarce(_):
  check_scarce_pages()


def _counters(_):
  check_counters()


def _preemption(_):
  check_preemption()


def _pause(_):
  check_pause()


def _hopeless(_):
  check_hopeless()


def _negative_steps(_):
  TestNumbersOfACall().test_steps(
    -1, ValueError, "must be at least 0, got -1; use 0 for no limit"
  )


def _keys_of_prompts(out, g):
  """All samples of a prompt have one key."""
  samples = g.config.num_samples
  return replace(out, keys=jnp.repeat(out.keys[::samples], samples, axis=0))


def _rollout(place, wrong, check):
  return FailsCheck(f"jaxkv._src.rollout.{place}", wrong, check)


MUTANTS = {
  # --- sampling --------------------------------------------------------------
  "temperature multiplies": _rollout(
    "sampling:sample", text("below / jnp", "below * jnp"), _tokens
  ),
  "greedy takes the worst": _rollout(
    "sampling:sample", text("jnp.argmax(logits", "jnp.argmin(logits"), _greedy
  ),
  "all draws of a sequence are one": _rollout(
    "sampling:sample", given(counts=lambda g: g.counts * 0), _tokens
  ),
  "a draw depends on the place in the batch": _rollout(
    "sampling:sample", given(keys=lambda g: g.keys[::-1]), _tokens
  ),
  "log-probabilities of another temperature": _rollout(
    "sampling:sample", text("softmax(scaled", "softmax(logits"), _tokens
  ),
  # --- sequences -------------------------------------------------------------
  "a token less": _rollout(
    "sequences:append", text("generated + 1 >=", "generated + 2 >="), _tokens
  ),
  "nothing stops": _rollout(
    "sequences:append",
    given(config=lambda g: replace(g.config, stop_token=-1)),
    _tokens,
  ),
  "log-probabilities are a place late": _rollout(
    "sequences:append",
    text("place, generated, values", "place, generated + 1, values"),
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
    "loop:_leaders",
    text("prompt[:, None] == prompt", "0 == 0 * prompt"),
    _tokens,
  ),
  "nobody follows": _rollout(
    "loop:_leaders",
    text("jnp.argmax(same", "jnp.argmax(jnp.eye(*same.shape)"),
    _counters,
  ),
  "the last token of a prompt is computed twice": _rollout(
    "loop:_prefill",
    given(target=lambda g: jnp.where(g.target > 0, g.target + 1, 0)),
    _tokens,
  ),
  "one chunk of a prompt": _rollout(
    "loop:_prefill", text("missing - counts", "missing * 0"), _tokens
  ),
  "the first page of a fork is not copied": _rollout(
    "loop:_admit_waiting",
    text("kv = kv_memory.copy(kv, *forked.copies)", "pass"),
    _tokens,
  ),
  "those that can never run wait": _rollout(
    "loop:_admit_waiting", text("idle | (admitted", "(admitted"), _hopeless
  ),
  "forks are not counted": _rollout(
    "loop:_admit_waiting",
    text("jnp.sum(forked.ok", "jnp.sum(~forked.ok"),
    _counters,
  ),
  # --- decoding --------------------------------------------------------------
  "the ended keep their pages": _rollout(
    "loop:_decode", text("mask=ended | victim", "mask=victim"), _tokens
  ),
  "the preempted keep their pages": _rollout(
    "loop:_decode", text("mask=ended | victim", "mask=ended"), _preemption
  ),
  "a pause has no end": _rollout(
    "loop:_decode",
    text(" & ~jnp.any(ended) & jnp.any(running < none)", ""),
    _preemption,
  ),
  "nobody pauses": _rollout(
    "loop:_preempt",
    returned(lambda out, g: (replace(out[0], paused=g.state.paused), out[1])),
    _pause,
  ),
  "the oldest is preempted": _rollout(
    "loop:_preempt",
    text("jnp.argmax(age)", "jnp.argmin(jnp.where(age < 0, none, age))"),
    _preemption,
  ),
  "one that is alone waits for pages": _rollout(
    "loop:_preempt",
    text("victim & alone, code", "victim & ~victim, code"),
    _hopeless,
  ),
  "steps of earlier calls count": _rollout(
    "loop:generate", text("steps - begin <", "steps <"), _preemption
  ),
  "the last number of pages is the peak": _rollout(
    "loop:_count",
    text("jnp.maximum(counters.peak_pages, in_use)", "in_use"),
    _counters,
  ),
  "the null page is shared": _rollout(
    "loop:_count", text("num_pages - 1 -", "num_pages -"), _counters
  ),
  "a negative number of steps": _rollout(
    "arguments:as_max_steps",
    text("int(value) < 0", "int(value) < -1"),
    _negative_steps,
  ),
}
