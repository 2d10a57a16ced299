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
from rollout_rows import Row
from rollout_rows import at_most

import jaxkv
from jaxkv import models
from jaxkv import rollout
from jaxkv._src.commands import characters as character_models

# Microseconds of a step without a model: greedy of 2 tokens, drawn of 513.
STEP = 110
STEP_WITH_SAMPLER = 400
# The sampler, against `jax.nn.log_softmax` of the same logits.
SAMPLER = 1.3

SLOTS = 64
SHORT, LONG = 8, 248

_CHARACTER_SLOTS = 16
_CHARACTER_PAGE = 16
_LONGEST_PROMPT = 400
_MEAN_ANSWER = 128


def alternated(
  calls: dict[str, Callable[[], Any]], rounds: int
) -> dict[str, list[float]]:
  """Seconds of each call, by name, after a round that is not counted."""
  samples: dict[str, list[float]] = {name: [] for name in calls}
  for number in range(rounds + 1):
    for name, call in calls.items():
      seconds = call()
      if number:
        samples[name].append(seconds)
  return samples


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
  yield from sampler(rounds, 4096 if quick else 49_152)
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

  samples = alternated(
    {"short": lambda: span(SHORT), "long": lambda: span(LONG)}, rounds
  )
  name = f"step, {SLOTS} slots, {vocabulary} tokens"
  for metric, pick in (("us, minimum", min), ("us, median", statistics.median)):
    seconds = pick(samples["long"]) - pick(samples["short"])
    us = seconds * 1e6 / (LONG - SHORT)
    yield at_most(name, metric, us, bound)


def decoding(
  sampling: rollout.Sampling, most: int = 2**31 - 1
) -> rollout.RolloutState:
  """A rollout of prompts of tokens below `most`, one a slot, that never end."""
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
    jnp.asarray(rng.integers(0, most, (SLOTS, 4)), jnp.int32),
    jnp.full((SLOTS,), 4, jnp.int32),
    jax.random.key(0),
    rollout.RolloutConfig(max_new_tokens=longest, admissions=SLOTS),
    sampling=sampling,
  )


def sampler(rounds: int, vocabulary: int) -> Iterator[Row]:
  """A draw for each slot beside `jax.nn.log_softmax` of the same logits.

  Compiled as by default, and with the options of the loop, under which an
  operation on a CPU has one thread.
  """
  logits = jax.random.normal(jax.random.key(0), (SLOTS, vocabulary))
  keys = jax.random.split(jax.random.key(1), SLOTS)
  counts = jnp.arange(SLOTS, dtype=jnp.int32)
  ways = {"": None, ", one thread": jaxkv.CPU_COMPILER_OPTIONS}
  for way, options in ways.items():
    draw = jax.jit(rollout.sample, compiler_options=options)
    softmax = jax.jit(jax.nn.log_softmax, compiler_options=options)
    samples = alternated(
      {
        "sampler": lambda draw=draw: timed(
          draw, keys, counts, logits, jnp.float32(1)
        )[0],
        "log_softmax": lambda softmax=softmax: timed(softmax, logits)[0],
      },
      8 * rounds,
    )
    name = f"sampler{way}"
    yield Row(name, "tokens of the vocabulary", vocabulary)
    for side, seconds in samples.items():
      yield Row(name, f"{side}, ms, minimum", min(seconds) * 1e3)
      yield Row(name, f"{side}, ms, median", statistics.median(seconds) * 1e3)
    for word, pick in (("minimum", min), ("median", statistics.median)):
      ratio = pick(samples["sampler"]) / pick(samples["log_softmax"])
      yield at_most(name, f"against log_softmax, {word}", ratio, SAMPLER)


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
  """The character model, paged beside dense.

  Prompts are 100 to 400 characters of the reference text. An answer ends at
  every token with the same probability, so answers are geometric; both sides
  draw with the same keys, so their answers are equal.

  Args:
    count: sequences.
    most: tokens after which an answer ends in any case.
    rounds: samples of each side.
  """
  job = _job(count, most)
  paged, dense = _paged(job), _dense(job)
  found: dict[str, rollout.Sequences] = {}

  def side(name: str, run: Callable[[], tuple[float, Any]]) -> float:
    seconds, found[name] = run()
    return seconds

  samples = alternated(
    {
      "paged": lambda: side("paged", paged),
      "dense": lambda: side("dense", dense),
    },
    rounds,
  )
  generated = {
    name: np.asarray(one.length - one.prompt_length)
    for name, one in found.items()
  }
  name = f"characters, {count} in {_CHARACTER_SLOTS}"
  yield Row(name, "tokens of an answer, mean", float(generated["paged"].mean()))
  yield Row(name, "tokens of an answer, most", int(generated["paged"].max()))
  equal = np.asarray(
    jnp.all(found["paged"].tokens == found["dense"].tokens, axis=1)
  )
  yield Row(name, "sequences with equal tokens", float(equal.mean()))
  speeds = {
    side: generated[side].sum() / statistics.median(seconds)
    for side, seconds in samples.items()
  }
  for side_name, speed in speeds.items():
    yield Row(name, f"{side_name}, tokens a second, median", float(speed))
    fastest = generated[side_name].sum() / min(samples[side_name])
    yield Row(name, f"{side_name}, tokens a second, best", float(fastest))
  ratio = float(speeds["paged"] / speeds["dense"])
  yield Row(name, "paged over dense, medians", ratio)


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


def _dense(job: _Job) -> Callable[[], tuple[float, rollout.Sequences]]:
  """One static batch after the other."""
  model = job.model.config
  forward = functools.partial(models.forward_dense, config=model, logits="last")

  def ending(*inputs):
    logits, memory = forward(*inputs)
    return _ending(logits, job.config.stop_token), memory

  program = jax.jit(
    functools.partial(
      rollout.generate_dense,
      batch_size=_CHARACTER_SLOTS,
      model=ending,
      config=job.config,
    )
  )
  memory = models.init_dense(
    model, batch_size=_CHARACTER_SLOTS, max_len=job.slot_tokens
  )
  sequences = rollout.from_prompts(
    job.prompts, job.lengths, jax.random.key(0), job.config
  )
  inputs = (job.model.params, memory, sequences, jnp.float32(1))
  return lambda: timed(program, *inputs)
