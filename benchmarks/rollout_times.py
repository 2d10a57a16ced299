"""Wall times of the rollout loop: a small model, and the loop without one.

A call is timed with `time.perf_counter` after a call that is not timed. The
calls that are compared alternate in every round.
"""

import functools
import statistics
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rows import Row
from rows import at_most

import jaxkv
from jaxkv import models
from jaxkv import rollout
from jaxkv._src.commands import characters as character_models

# Microseconds of a step without a model: greedy of 2 tokens, drawn of 513.
STEP = 110
STEP_WITH_SAMPLER = 400

SLOTS = 64
SHORT, LONG = 8, 248

_CHARACTER_SLOTS = 16
_CHARACTER_PAGE = 16
_LONGEST_PROMPT = 400
_MEAN_ANSWER = 128


def timed(call: Callable[..., Any], *inputs: Any) -> tuple[float, Any]:
  """Seconds of a call with inputs that are ready, and its result."""
  jax.block_until_ready(inputs)
  begin = time.perf_counter()
  result = jax.block_until_ready(call(*inputs))
  return time.perf_counter() - begin, result


def all_rows(quick: bool, rounds: int) -> Iterator[Row]:
  """All rows that are timed."""
  if not quick:
    yield from step(0.0, 2, STEP, rounds)
  yield from step(1.0, 513, STEP_WITH_SAMPLER, rounds)
  yield from characters(*(6, 16) if quick else (48, 512), rounds=rounds)


def stub(
  params: jax.Array,
  tokens: Any,
  positions: Any,
  kv: Any,
  views: Any,
  at: Any,
  rows: Any,
) -> tuple[jax.Array, Any]:
  """Logits that a compiler cannot know before the step."""
  del tokens, views, rows
  position = positions[0].at[at].get(mode="clip").astype(jnp.float32)
  return params + position[:, None] * 1e-3, kv


def step(
  temperature: float, vocabulary: int, bound: float, rounds: int
) -> Iterator[Row]:
  """A step of the loop in which all slots decode, and nothing else happens."""
  state = decoding(rollout.Sampling(temperature=temperature))
  params = jax.random.normal(jax.random.key(1), (SLOTS, vocabulary))
  program = jax.jit(
    functools.partial(rollout.generate, model=stub),
    donate_argnums=1,
    compiler_options=jaxkv.CPU_COMPILER_OPTIONS,
  )
  _, state = timed(program, params, state, rollout.Until(steps=SHORT))

  def span(steps: int) -> float:
    mine = jax.tree.map(jnp.copy, state)
    before = int(mine.counters.generated)
    seconds, end = timed(program, params, mine, rollout.Until(steps=steps))
    assert int(end.counters.generated) - before == SLOTS * steps
    return seconds

  for steps in (SHORT, LONG):
    span(steps)
  samples = [(span(SHORT), span(LONG)) for _ in range(rounds)]
  short, long = zip(*samples, strict=True)
  name = f"step, {SLOTS} slots, {vocabulary} tokens"
  for metric, pick in (("us, minimum", min), ("us, median", statistics.median)):
    us = (pick(long) - pick(short)) * 1e6 / (LONG - SHORT)
    yield at_most(name, metric, us, bound)


def decoding(sampling: rollout.Sampling) -> rollout.RolloutState:
  """A rollout of random prompts, one a slot, that never end."""
  longest = SHORT + LONG + 8
  sizes = jaxkv.CacheConfig(
    num_pages=1 + SLOTS * (2 + longest // 16),
    page_size=16,
    num_slots=SLOTS,
    pages_per_slot=2 + longest // 16,
  )
  rng = np.random.default_rng(0)
  return rollout.init(
    jaxkv.init(sizes),
    jaxkv.kv.init(sizes, num_layers=1, num_kv_heads=1, head_dim=1),
    jnp.asarray(rng.integers(0, 2**31 - 1, (SLOTS, 4)), jnp.int32),
    jnp.full((SLOTS,), 4, jnp.int32),
    jax.random.key(0),
    rollout.RolloutConfig(max_new_tokens=longest, admissions=SLOTS),
    sampling=sampling,
  )


class _Job(NamedTuple):
  """Prompts of the character model, and how long their answers may be."""

  model: models.Pretrained
  prompts: jax.Array
  lengths: jax.Array
  config: rollout.RolloutConfig

  @property
  def slot_tokens(self) -> int:
    """The most tokens of a sequence."""
    return _LONGEST_PROMPT + self.config.max_new_tokens


def characters(count: int, most: int, rounds: int) -> Iterator[Row]:
  """The speed of the character model.

  Prompts are 100 to 400 characters of the reference text. An answer ends at
  every token with the same probability, so answers have geometric lengths.

  Args:
    count: sequences.
    most: tokens after which an answer ends in any case.
    rounds: samples.
  """
  job = _job(count, most)
  run = _paged(job)
  run()
  seconds, found = zip(*[run() for _ in range(rounds)], strict=True)
  generated = np.asarray(found[0].length - found[0].prompt_length)
  name = f"characters, {count} in {_CHARACTER_SLOTS}"
  yield Row(name, "tokens of an answer, mean", float(generated.mean()))
  yield Row(name, "tokens of an answer, most", int(generated.max()))
  for metric, pick in (("median", statistics.median), ("best", min)):
    speed = float(generated.sum() / pick(seconds))
    yield Row(name, f"paged, tokens a second, {metric}", speed)


def _job(count: int, most: int) -> _Job:
  model = character_models.character_model()
  text = model.tokenizer.encode(character_models.reference_text())
  rng = np.random.default_rng(0)
  lengths = rng.integers(100, _LONGEST_PROMPT + 1, count)
  begins = rng.integers(0, len(text) - _LONGEST_PROMPT, count)
  prompts = np.zeros((count, _LONGEST_PROMPT), np.int32)
  for row, begin, length in zip(prompts, begins, lengths, strict=True):
    row[:length] = text[begin : begin + length]
  config = rollout.RolloutConfig(
    max_new_tokens=most, stop_token=model.stop_tokens[0]
  )
  return _Job(
    model, jnp.asarray(prompts), jnp.asarray(lengths, jnp.int32), config
  )


def _ending(logits: jax.Array, stop_token: int) -> jax.Array:
  """Logits [..., V] that end an answer after `_MEAN_ANSWER` tokens on average.

  The probability of the stop token is the same at every token.
  """
  column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
  column = column == stop_token
  others = jnp.where(column, -jnp.inf, logits)
  total = jax.nn.logsumexp(others, axis=-1, keepdims=True)
  return jnp.where(column, total - np.float32(np.log(_MEAN_ANSWER - 1)), logits)


def _paged(job: _Job) -> Callable[[], tuple[float, rollout.Sequences]]:
  """A run of the loop; its state is made before the time is taken."""
  columns = -(-job.slot_tokens // _CHARACTER_PAGE)
  model = job.model.config
  sizes = jaxkv.CacheConfig(
    num_pages=1 + _CHARACTER_SLOTS * columns,
    page_size=_CHARACTER_PAGE,
    num_slots=_CHARACTER_SLOTS,
    pages_per_slot=columns,
  )
  forward = functools.partial(models.forward, config=model)

  def ending(params, tokens, positions, kv, views, at, rows):
    logits, kv = forward(params, tokens, positions, kv, views, at, rows)
    return _ending(logits, job.config.stop_token), kv

  program = jax.jit(
    functools.partial(rollout.generate, model=ending), donate_argnums=1
  )

  def run() -> tuple[float, rollout.Sequences]:
    kv = models.init_kv(model, sizes)
    state = rollout.init(
      jaxkv.init(sizes),
      kv,
      job.prompts,
      job.lengths,
      jax.random.key(0),
      job.config,
    )
    inputs = (job.model.params, state)
    seconds, end = timed(program, *inputs)
    assert bool(rollout.is_done(end))
    return seconds, end.sequences

  return run
