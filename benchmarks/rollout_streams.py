"""Prompts that come while a rollout runs, and groups that are not awaited.

The model costs nothing: it gives each answer its length, and draws its other
tokens at random. So what is counted is the loop's.
"""

import functools
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rollout_rows import Row
from rollout_rows import at_least
from rollout_rows import at_most

import jaxkv
from jaxkv import rollout

# Busy slots, against those of a list schedule.
BUSY = 0.99
# Steps to the first half of the groups, against half of them launched.
FIRST_GROUPS = 0.75

_VOCABULARY, _PAGE, _SLOTS = 32, 16, 64
_STOP = _VOCABULARY - 1


class Stream(NamedTuple):
  """Prompts and the lengths of their answers, in the order of arrival."""

  prompts: np.ndarray
  lengths: np.ndarray
  answers: np.ndarray


def stream(count: int, seed: int = 0, longest: int = 2048) -> Stream:
  """Prompts of 8 to 64 tokens, answers lognormal: median 200, sigma 1."""
  rng = np.random.default_rng(seed)
  prompts = rng.integers(0, _STOP, (count, 64)).astype(np.int32)
  lengths = rng.integers(8, 65, count).astype(np.int32)
  answers = rng.lognormal(np.log(min(200, longest / 4)), 1.0, count)
  answers = np.clip(answers, 1, longest).astype(np.int32)
  return Stream(prompts, lengths, answers)


def list_schedule(answers: np.ndarray, slots: int) -> int:
  """Steps, if each answer takes the slot that is empty first."""
  free = np.zeros(slots, np.int64)
  for answer in answers.tolist():
    free[int(np.argmin(free))] += answer
  return int(free.max())


def _model(
  table: jax.Array,
  tokens: Any,
  positions: Any,
  kv: Any,
  views: Any,
  at: Any,
  rows: rollout.Rows,
) -> tuple[jax.Array, Any]:
  """Random tokens; the stop token where an answer has its length."""
  del views
  token = tokens[0].at[at].get(mode="clip")
  position = positions[0].at[at].get(mode="clip")
  end = rows.user["end"].at[at].get(mode="clip")
  stops = jnp.arange(_VOCABULARY, dtype=jnp.int32) == _STOP
  ends = (position + 2 >= end)[:, None] == stops[None]
  return jnp.where(ends, table[token], -jnp.inf), kv


_generate: Any = jax.jit(
  functools.partial(rollout.generate, model=_model),
  donate_argnums=1,
  compiler_options=jaxkv.CPU_COMPILER_OPTIONS,
)


def _table() -> jax.Array:
  return jax.random.normal(jax.random.key(3), (_VOCABULARY, _VOCABULARY))


def _begun(
  work: Stream, rows: int, samples: int = 1, seed: int = 0
) -> rollout.RolloutState:
  """A rollout of the first prompts; those that are missing have no samples."""
  count = min(rows, len(work.lengths))
  longest = int(work.answers.max())
  sizes = jaxkv.CacheConfig(
    num_pages=1 + 2 * _SLOTS * (-(-(64 + longest) // _PAGE)),
    page_size=_PAGE,
    num_slots=_SLOTS,
    pages_per_slot=-(-(64 + longest) // _PAGE),
  )
  config = rollout.RolloutConfig(
    num_samples=samples,
    max_new_tokens=longest,
    stop_token=_STOP,
    admissions=_SLOTS,
  )
  lengths = np.repeat(work.lengths[:count], samples)
  ends = lengths + work.answers[: count * samples]
  return rollout.init(
    jaxkv.init(sizes, jax.random.key(1)),
    jaxkv.kv.init(sizes, num_layers=1, num_kv_heads=1, head_dim=1),
    jnp.asarray(work.prompts[:count]),
    jnp.asarray(work.lengths[:count]),
    jax.random.key(seed),
    config,
    user={"end": ends},
  )


def streaming(quick: bool) -> Iterator[Row]:
  """Many prompts through few rows, beside one call that has them all."""
  count, rows, batch = (640, 128, 32) if quick else (10_000, 512, 64)
  work = stream(count, longest=256 if quick else 2048)
  state, table = _begun(work, rows), _table()
  compiled = [_generate._cache_size()]
  given, answers = rows, {}
  while len(answers) < count:
    left = given < count
    until = rollout.Until(sequences=batch if left else rows + 1)
    state = _generate(table, state, until)
    state, out = rollout.harvest(state)
    done = jax.device_get(out.results)
    for row in np.flatnonzero(done.valid):
      answers[int(done.ids[row])] = done.tokens[row]
    if left:
      some = np.arange(given, given + batch) % count
      mask = np.arange(given, given + batch) < count
      state, out = rollout.submit(
        state,
        jnp.asarray(work.prompts[some]),
        jnp.asarray(work.lengths[some]),
        user={"end": (work.lengths + work.answers)[some]},
        mask=jnp.asarray(mask),
      )
      given += int(np.asarray(out.ok).sum())
    compiled.append(_generate._cache_size())
  steps, drawn = int(state.counters.steps), int(work.answers.sum())
  busy = drawn / steps / _SLOTS
  name = f"streaming, {count:,} through {rows}"
  best = drawn / list_schedule(work.answers, _SLOTS) / _SLOTS
  yield at_most(name, "programs compiled", compiled[-1] - compiled[0], 1)
  yield Row(name, "busy", busy)
  yield Row(name, "busy, list schedule", best)
  yield at_least(name, "busy against it", busy / best, BUSY)
  whole = _generate(table, _begun(work, count), rollout.Until())
  tokens = np.asarray(whole.sequences.tokens)
  different = sum(
    not np.array_equal(tokens[number], answers[number])
    for number in range(count)
  )
  yield at_most(name, "answers unlike those of one call", different, 0)


def first_groups(quick: bool) -> Iterator[Row]:
  """Half of the groups launched are awaited; the others finish later."""
  wanted, samples = (4, 4) if quick else (16, 8)
  longest, ratios, different = (128 if quick else 2048), [], 0
  for seed in range(1 if quick else 5):
    work = stream(2 * wanted * samples, seed, longest)
    work = work._replace(
      prompts=work.prompts[: 2 * wanted], lengths=work.lengths[: 2 * wanted]
    )
    few = work._replace(
      prompts=work.prompts[:wanted], lengths=work.lengths[:wanted]
    )
    table = _table()
    all_of_few = _generate(table, _begun(few, wanted, samples), rollout.Until())
    first = _generate(
      table, _begun(work, 2 * wanted, samples), rollout.Until(groups=wanted)
    )
    steps = int(first.counters.steps)
    ratios.append(steps / int(all_of_few.counters.steps))
    end = _generate(table, first, rollout.Until())
    whole = _generate(table, _begun(work, 2 * wanted, samples), rollout.Until())
    different += int(
      np.any(
        np.asarray(end.sequences.tokens) != np.asarray(whole.sequences.tokens)
      )
    )
  name = f"first {wanted} of {2 * wanted} groups"
  yield at_most(
    name, "steps against all of half", float(np.mean(ratios)), FIRST_GROUPS
  )
  yield Row(name, "lowest", min(ratios))
  yield Row(name, "highest", max(ratios))
  yield at_most(name, "runs that end otherwise", different, 0)
