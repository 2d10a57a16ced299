"""Samples that a client asks for, as requests of an engine."""

import itertools
from typing import Any
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.kv import Batch
from jaxkv.rollout import Model
from jaxkv.rollout import Requests
from jaxkv.rollout import Rows
from jaxkv.rollout import Sampling

_MIN_STOP_TOKENS = 8
"""Shorter lists are padded, so that a longer one seldom compiles again."""


class Settings(NamedTuple):
  """Settings of a sample.

  Attributes:
    max_tokens: the maximum number of tokens to draw.
    temperature: the sampling temperature; 0 for greedy decoding.
    top_k: the number of most likely tokens to draw from; 0 for all tokens.
    top_p: the probability mass to draw from; 1 for all tokens.
    stop_tokens: tokens that end a sample.
    may_draw_pad: True if the sample may draw the padding token.
  """

  max_tokens: int
  temperature: float
  top_k: int
  top_p: float
  stop_tokens: tuple[int, ...]
  may_draw_pad: bool


class Sample(NamedTuple):
  """A sample; those with equal prompts and settings differ in their seeds."""

  prompt: tuple[int, ...]
  settings: Settings
  seed: int


def grouped(samples: list[Sample], limit: int | None = None) -> list[list[int]]:
  """Returns the indices of samples with equal prompts and settings.

  Each group has at most `limit` samples; None for no limit.
  """

  def key(index: int) -> tuple[Any, ...]:
    return samples[index][:2]

  groups = []
  for _, equals in itertools.groupby(sorted(range(len(samples)), key=key), key):
    indices = list(equals)
    most_samples = limit or len(indices)
    starts = range(0, len(indices), most_samples)
    groups += [indices[start : start + most_samples] for start in starts]
  return groups


def requests_of(
  samples: list[Sample],
  groups: list[list[int]],
  *,
  num_samples: int,
  num_columns: int,
) -> Requests:
  """Makes a request of each group, which has at most `num_samples` samples.

  The prompts are padded to `num_columns`.
  """
  tokens = np.zeros((len(groups), num_columns), np.int32)
  seeds = np.zeros((len(groups), num_samples), np.int32)
  group_samples = [samples[group[0]] for group in groups]
  for row, group in enumerate(groups):
    prompt = samples[group[0]].prompt
    tokens[row, : len(prompt)] = prompt
    seeds[row, : len(group)] = [samples[index].seed for index in group]

  def column(name: str, dtype: Any) -> np.ndarray:
    values = [getattr(sample.settings, name) for sample in group_samples]
    return np.repeat(np.asarray(values, dtype), num_samples, axis=0)

  temperature = column("temperature", np.float32)
  filters = {
    "top_k": column("top_k", np.int32),
    "top_p": column("top_p", np.float32),
  }
  has_filters = (filters["top_k"] > 0) | (filters["top_p"] < 1)
  if not np.any(has_filters & (temperature > 0)):
    # A filter that no call has used is not compiled.
    filters = {}
  lists = [sample.settings.stop_tokens for sample in group_samples]
  stop_tokens = np.full(
    (len(groups), max(_MIN_STOP_TOKENS, *map(len, lists))), -1, np.int32
  )
  for row, stops in zip(stop_tokens, lists, strict=True):
    row[: len(stops)] = stops
  return Requests(
    tokens,
    np.asarray([len(sample.prompt) for sample in group_samples], np.int32),
    num_samples=np.asarray([len(group) for group in groups], np.int32),
    sampling=Sampling(
      # The model divides the logits by the temperature, so the draw must not
      # divide them again.
      temperature=(temperature > 0).astype(np.float32),
      max_tokens=column("max_tokens", np.int32),
      stop_tokens=np.repeat(stop_tokens, num_samples, axis=0),
      seed=seeds.reshape(-1),
      **filters,
    ),
    extra={
      "temperature": np.where(temperature > 0, temperature, 1),
      "may_draw_pad": column("may_draw_pad", np.bool_),
    },
  )


def seeds(root: Any, count: int) -> tuple[int, ...]:
  """Derives seeds for `count` samples from the entropy `root`.

  Examples:
    >>> seeds(7, 2) == seeds(7, 3)[:2], len(set(seeds([7, 1], 100)))
    (True, 100)
  """
  words = np.random.SeedSequence(root).generate_state(count, np.uint32)
  # Seeds have 31 bits, because `Sampling` ignores a negative int32 seed.
  return tuple((words >> np.uint32(1)).tolist())


def scaled_model(
  params: Any, batch: Batch, kv: Any, *, model: Model
) -> tuple[Array, Any]:
  """Calls a model, and divides logits by their sequence's temperature.

  So `raw_log_probs` are at the temperature, before `no_pad`.
  """
  logits, kv = model(params, batch, kv)
  temperature = batch.rows.extra["temperature"]
  temperature = temperature.at[batch.columns].get(mode="clip")[:, None]
  # Columns without a sequence have temperature 0.
  temperature = jnp.where(temperature > 0, temperature, 1)
  return logits.astype(jnp.float32) / temperature, kv


def no_pad(
  logits: Array, rows: Rows, extra: Any, *, pad: int
) -> tuple[Array, Any]:
  """Excludes the token `pad` where it may not be drawn; a `Process`."""
  del rows
  column = jnp.where(extra["may_draw_pad"], logits[:, pad], -jnp.inf)
  return logits.at[:, pad].set(column), extra
