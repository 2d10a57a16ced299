"""Times training on samples of one prompt, with the prompt computed once.

Compares `models.grouped_log_probs` with the plain form, which is
`forward_uncached` over whole sequences and `log_softmax` of all logits. The
model has four float32 layers of SmolLM2's width. A prompt of 512 tokens has 8
completions of 64 tokens.

| row | meaning |
|---|---|
| CPU s | minimum over calls of `value_and_grad`, ours and plain in turns |
| MiB | size of temporary arrays, as the compiler reports it |
| times | CPU s of the plain form, divided by our CPU s |
| share | our MiB, divided by MiB of the plain form |
| apart | the largest difference between the two gradients of a parameter,
  relative to the largest element of its gradient |

With a vocabulary of 512 the layers take nearly all of the time. With 49,152, as
SmolLM2 has, the plain form computes the logits of 4,608 positions.

  python benchmarks/grouped_training.py [--quick] [--json FILE]
"""

import functools
import time
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import command
import jax
import jax.numpy as jnp
import numpy as np
from rows import Row
from rows import alternated
from rows import at_least
from rows import at_most
from rows import report

from jaxkv import models


class Work(NamedTuple):
  """The sizes of a workload.

  Attributes:
    vocab: the size of the vocabulary.
    width: E, the width of nine heads.
    samples: G, the number of completions.
    prompt: P, tokens of the prompt.
    answer: R, tokens of each completion.
  """

  vocab: int
  width: int = 576
  samples: int = 8
  prompt: int = 512
  answer: int = 64

  def config(self) -> models.Decoder:
    return models.llama(
      vocab_size=self.vocab,
      num_layers=4,
      embed_dim=self.width,
      num_heads=9,
      num_kv_heads=3,
      head_dim=self.width // 9,
      mlp_dim=self.width * 8 // 3,
    )


class Data(NamedTuple):
  """Tokens, and a factor of the loss for each sample.

  Attributes:
    prompts: int32[1, P].
    completions: int32[1, G, R].
    factors: float32[1, G, 1].
  """

  prompts: jax.Array
  completions: jax.Array
  factors: jax.Array


def _data(work: Work) -> Data:
  draw = np.random.default_rng(0)
  shapes = (1, work.prompt), (1, work.samples, work.answer)
  prompts, completions = (
    jnp.asarray(draw.integers(0, work.vocab, shape), jnp.int32)
    for shape in shapes
  )
  factors = draw.normal(size=(1, work.samples, 1))
  return Data(prompts, completions, jnp.asarray(factors, jnp.float32))


def _ours(params: Any, data: Data, *, work: Work) -> jax.Array:
  lengths = jnp.full(data.completions.shape[:2], work.answer, jnp.int32)
  log_probs = models.grouped_log_probs(
    params,
    data.prompts,
    jnp.full((1,), work.prompt, jnp.int32),
    data.completions,
    lengths,
    config=work.config(),
  )
  return jnp.mean(log_probs * data.factors)


def _plain(params: Any, data: Data, *, work: Work) -> jax.Array:
  prompts = jnp.repeat(data.prompts, work.samples, axis=0)
  tokens = jnp.concatenate([prompts, data.completions[0]], axis=1)
  positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
  positions = jnp.broadcast_to(positions, tokens.shape)
  logits = models.forward_uncached(
    params, tokens, positions, config=work.config()
  )
  log_probs = jax.nn.log_softmax(logits[:, :-1])
  values = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=2)[..., 0]
  return jnp.mean(values[:, work.prompt - 1 :] * data.factors[0])


def _rows(quick: bool, rounds: int) -> Iterator[Row]:
  small = {"width": 72, "samples": 4, "prompt": 64, "answer": 8}
  for vocab in (512, 49_152):
    work = Work(vocab, **small) if quick else Work(vocab)
    params = models.init_params(jax.random.key(0), work.config())
    data = _data(work)
    yield from _compared(work, params, data, rounds)


def _compared(
  work: Work, params: Any, data: Data, rounds: int
) -> Iterator[Row]:
  """Yields the rows of our form and of the plain form."""
  sides, gradients = [], []
  for side in (_ours, _plain):
    run = jax.value_and_grad(functools.partial(side, work=work))
    sides.append(jax.jit(run).lower(params, data).compile())
    gradients.append(jax.block_until_ready(sides[-1](params, data))[1])
  name = f"vocabulary {work.vocab}"
  differences = jax.tree.map(
    lambda x, y: float(jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y))),
    *gradients,
  )
  worst = max(jax.tree.leaves(differences))
  del gradients
  calls = {
    side: functools.partial(run, params, data)
    for side, run in zip(("ours", "plain"), sides, strict=True)
  }
  seconds = alternated(calls, rounds, time.process_time)
  grouped_seconds, plain_seconds = min(seconds["ours"]), min(seconds["plain"])
  memory = [run.memory_analysis().temp_size_in_bytes / 2**20 for run in sides]
  yield Row(name, "CPU s", grouped_seconds)
  yield Row(name, "CPU s, plain", plain_seconds)
  yield at_least(name, "times", plain_seconds / grouped_seconds, 2.8)
  yield Row(name, "MiB", memory[0])
  yield Row(name, "MiB, plain", memory[1])
  yield at_most(name, "share", memory[0] / memory[1], 0.4)
  yield at_most(name, "gradient apart, millionths", worst * 1e6, 3)


def measured(quick: bool, rounds: int) -> dict[str, Any]:
  """Measures and prints all rows."""
  return report(_rows(quick, rounds))


if __name__ == "__main__":
  command.run(
    __doc__,
    measured,
    rounds=3,
    quick_rounds=1,
    not_measured="compilation, accelerators, other dtypes, ragged lengths",
  )
