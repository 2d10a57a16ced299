"""Times scoring of, and training on, samples of a prompt computed once.

A model of four float32 layers of SmolLM2-135M's width computes a prompt of P
tokens and its G = 8 completions of R tokens.

Scoring calls `rollout.score` in chunks of 256 tokens. The workload "P + 8 x R"
has a vocabulary of 1,024.

| side   | computes                                                           |
|--------|--------------------------------------------------------------------|
| group  | the prompt and its completions, nothing cached                     |
| cached | the same with the prompt cached, as after a rollout                |
| whole  | 8 groups of one completion, without sharing                        |

Rows are the tokens that the model computes. Seconds are medians.

Training calls `value_and_grad` of `models.grouped_log_probs`, and of the plain
form, which is `forward_uncached` over whole sequences and `log_softmax` of all
logits. P is 512 and R is 64. With a vocabulary of 512 the layers take nearly
all of the time. With 49,152, as SmolLM2 has, the plain form computes the logits
of 4,608 positions.

| row | meaning |
|---|---|
| CPU s | minimum over the calls |
| MiB | size of temporary arrays, as the compiler reports it |
| times | CPU s of the plain form, divided by our CPU s |
| share | our MiB, divided by MiB of the plain form |
| apart | the largest difference between the two gradients of a parameter,
  relative to the largest element of its gradient |

Sides take turns. CPU seconds are those of all threads.

  python benchmarks/groups.py [--quick] [--json FILE]
"""

import functools
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rows
from rows import Row

import jaxkv
from jaxkv import models
from jaxkv import rollout

_PAGE = 16

Group = tuple[jax.Array, ...]
"""Prompts and completions with their lengths, as `score` takes them."""


def small_llama(
  vocab: int, width: int, dtype: Any = jnp.float32
) -> models.Decoder:
  """Returns a model of four layers; with a width of 576, SmolLM2-135M's."""
  return models.llama(
    vocab_size=vocab,
    num_layers=4,
    embed_dim=width,
    num_heads=9,
    num_kv_heads=3,
    head_dim=width // 9,
    mlp_dim=width * 8 // 3,
    dtype=dtype,
  )


class Work(NamedTuple):
  """The sizes of a workload.

  Attributes:
    vocab: the size of the vocabulary.
    prompt: P, tokens of the prompt.
    answer: R, tokens of each completion.
    width: the width of the model.
    samples: G, the number of completions.
  """

  vocab: int
  prompt: int
  answer: int
  width: int = 576
  samples: int = 8

  def config(self) -> models.Decoder:
    return small_llama(self.vocab, self.width)


SCORED = (Work(1024, 2048, 128), Work(1024, 512, 512))
TRAINED = (Work(512, 512, 64), Work(49_152, 512, 64))


def _draw(work: Work) -> tuple[Group, jax.Array]:
  """Draws a group, and a factor of the loss per sample, float32[1, G, 1]."""
  rng = np.random.default_rng(0)
  prompt = rng.integers(0, work.vocab, (1, work.prompt))
  completions = rng.integers(0, work.vocab, (1, work.samples, work.answer))
  factors = rng.normal(size=(1, work.samples, 1))
  group = (
    jnp.asarray(prompt, jnp.int32),
    jnp.full((1,), work.prompt, jnp.int32),
    jnp.asarray(completions, jnp.int32),
    jnp.full((1, work.samples), work.answer, jnp.int32),
  )
  return group, jnp.asarray(factors, jnp.float32)


def _separate(group: Group) -> Group:
  """Makes a group of each completion."""
  prompt, prompt_length, completions, lengths = group
  samples = completions.shape[1]
  return (
    jnp.repeat(prompt, samples, axis=0),
    jnp.repeat(prompt_length, samples),
    completions.swapaxes(0, 1),
    lengths.T,
  )


def _empty_memory(work: Work, shares: bool) -> rollout.Memory:
  pages = -(-(work.prompt + work.answer) // _PAGE)
  cache_config = jaxkv.CacheConfig(
    num_pages=(work.samples + 1) * pages,
    page_size=_PAGE,
    num_slots=work.samples,
    pages_per_slot=pages,
    prefix_caching=shares,
  )
  return rollout.Memory(
    cache=jaxkv.init(cache_config, jax.random.key(0)),
    kv=models.init_kv(work.config(), cache_config),
  )


def _score_rows(work: Work, rounds: int) -> Iterator[Row]:
  """Yields the rows of `rollout.score`."""
  group, _ = _draw(work)
  program = jax.jit(
    functools.partial(
      rollout.score,
      model=functools.partial(models.forward, config=work.config()),
    ),
    donate_argnums=1,
    compiler_options=jaxkv.CPU_COMPILER_OPTIONS,
  )
  params = models.init_params(jax.random.key(0), work.config())
  score = functools.partial(program, params)
  empty = _empty_memory(work, shares=True)
  cached, _ = score(jax.tree.map(jnp.copy, empty), *group)
  calls = {
    "group": (score, empty, *group),
    "cached": (score, cached, *group),
    "whole": (score, _empty_memory(work, shares=False), *_separate(group)),
  }
  samples, results = rows.alternated(calls, rounds)
  computed = {
    side: int(scored.computed_tokens) for side, (_, scored) in results.items()
  }
  name = f"{work.prompt} + {work.samples} x {work.answer}"
  new = work.samples * work.answer
  bound = work.prompt - 1 + new
  # Each further completion computes the tokens after the last full page again.
  bound += (work.samples - 1) * ((work.prompt - 1) % _PAGE)
  yield rows.at_most(name, "group: rows, P - 1 + G R", computed["group"], bound)
  bound = _PAGE + new
  yield rows.at_most(
    name, "cached: rows, a page and G R", computed["cached"], bound
  )
  yield Row(name, "whole: rows, G (P - 1 + R)", computed["whole"])
  for index, unit in enumerate(("seconds", "CPU seconds")):
    medians = {
      side: float(np.median(samples[side][:, index])) for side in calls
    }
    for side, median in medians.items():
      yield Row(name, f"{side}: {unit}", median)
    metric, ratio = (
      f"whole / group, {unit}",
      medians["whole"] / medians["group"],
    )
    if work == SCORED[0]:
      yield rows.at_least(name, metric, ratio, 4)
    else:
      yield Row(name, metric, ratio)


def _ours(params: Any, group: Group, factors: Any, *, work: Work) -> jax.Array:
  log_probs = models.grouped_log_probs(params, *group, config=work.config())
  return jnp.mean(log_probs * factors)


def _plain(params: Any, group: Group, factors: Any, *, work: Work) -> jax.Array:
  prompts, _, completions, _ = _separate(group)
  tokens = jnp.concatenate([prompts, completions[:, 0]], axis=1)
  positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
  positions = jnp.broadcast_to(positions, tokens.shape)
  config = work.config()
  logits = models.forward_uncached(params, tokens, positions, config=config)
  log_probs = jax.nn.log_softmax(logits[:, :-1])
  values = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=2)[..., 0]
  return jnp.mean(values[:, work.prompt - 1 :] * factors[0])


def _train_rows(work: Work, rounds: int) -> Iterator[Row]:
  """Yields the rows of our gradient and of the plain form's."""
  params = models.init_params(jax.random.key(0), work.config())
  inputs = _draw(work)
  calls, memory = {}, {}
  for side, loss in (("ours", _ours), ("plain", _plain)):
    gradient = jax.jit(jax.value_and_grad(functools.partial(loss, work=work)))
    program = gradient.lower(params, *inputs).compile()
    calls[side] = (functools.partial(program, params), *inputs)
    analysis: Any = program.memory_analysis()
    memory[side] = analysis.temp_size_in_bytes / 2**20
  samples, results = rows.alternated(calls, rounds)
  seconds = {side: float(samples[side][:, 1].min()) for side in calls}
  differences = jax.tree.map(
    lambda x, y: float(jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y))),
    *(gradient for _, gradient in results.values()),
  )
  worst = max(jax.tree.leaves(differences))
  name = f"vocabulary {work.vocab}"
  yield Row(name, "CPU s", seconds["ours"])
  yield Row(name, "CPU s, plain", seconds["plain"])
  yield rows.at_least(name, "times", seconds["plain"] / seconds["ours"], 2.8)
  yield Row(name, "MiB", memory["ours"])
  yield Row(name, "MiB, plain", memory["plain"])
  yield rows.at_most(name, "share", memory["ours"] / memory["plain"], 0.4)
  yield rows.at_most(name, "gradient apart, millionths", worst * 1e6, 3)


def rows_of(quick: bool, rounds: int) -> Iterator[Row]:
  """Yields all rows."""
  small = {"prompt": 64, "answer": 8, "width": 72, "samples": 4}
  # All small workloads of scoring would be the same.
  for work in SCORED[:1] if quick else SCORED:
    yield from _score_rows(work._replace(**small) if quick else work, rounds)
  for work in TRAINED:
    yield from _train_rows(work._replace(**small) if quick else work, rounds)


if __name__ == "__main__":
  rows.run(
    __doc__,
    rows_of,
    rounds=3,
    quick_rounds=1,
    not_measured="compilation, accelerators, other models, ragged lengths",
  )
