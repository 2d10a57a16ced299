"""Prompts of an engine's caller as requests of few shapes."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.queue.requests import Requests
from jaxkv._src.engine.queue.requests import map_rows
from jaxkv._src.engine.queue.requests import take_prompts
from jaxkv._src.sampling import settings
from jaxkv._src.sampling.neutral import neutral
from jaxkv._src.sampling.settings import Sampling


def as_token_list(name: str, tokens: Any) -> np.ndarray:
  """Returns tokens as int32[L]; raises for other types and shapes."""
  ids = np.asarray(as_int32(name, tokens))
  if ids.ndim != 1:
    raise ValueError(
      f"`{name}` must be a list of token ids, got an array of shape "
      f"{list(ids.shape)}; write [ids] for one prompt."
    )
  return ids


def stacked(
  rows: list[np.ndarray], *, rounds_up: bool = True
) -> tuple[np.ndarray, np.ndarray]:
  """Returns lists of tokens as int32[P, L], and their lengths, int32[P].

  L is the length of the longest list, rounded up to a power of two.
  """
  lengths = np.asarray([len(row) for row in rows], np.int32)
  num_columns = int(lengths.max(initial=1))
  if rounds_up:
    num_columns = power_of_two(num_columns)
  tokens = np.zeros((len(rows), num_columns), np.int32)
  for padded_row, row in zip(tokens, rows, strict=True):
    padded_row[: len(row)] = row
  return tokens, lengths


def requests_of(
  rows: list[np.ndarray],
  config: RolloutConfig,
  *,
  sampling: Sampling | None,
  num_samples: int,
) -> Requests:
  """Makes requests for n samples of each prompt, in the order of the samples.

  A prompt with more samples than `RolloutConfig.num_samples` becomes several
  requests. `sampling` has one row, or P * n rows.
  """
  num_samples = as_count("num_samples", num_samples, 1)
  limit = config.num_samples
  num_parts = -(-num_samples // limit)
  tokens, lengths = stacked(rows, rounds_up=False)
  prompt = np.repeat(np.arange(len(rows)), num_parts)
  first_sample = np.tile(np.arange(num_parts) * limit, len(rows))
  counts = np.minimum(num_samples - first_sample, limit).astype(np.int32)
  sample = first_sample[:, None] + np.arange(limit)
  sample = prompt[:, None] * num_samples + np.minimum(sample, num_samples - 1)
  all_settings = settings.as_sampling(sampling, len(rows) * num_samples)
  strings = all_settings.stop_strings
  if strings is not None:
    # A start state for each sample, also if all have the same strings.
    start = strings.init(len(rows) * num_samples)
    strings = dataclasses.replace(strings, start=start)
    all_settings = dataclasses.replace(all_settings, stop_strings=strings)
  requests = Requests(tokens, lengths, sampling=all_settings)
  requests = map_rows(
    lambda array: np.asarray(array)[prompt],
    lambda array: np.asarray(array)[sample.reshape(-1)],
    requests,
  )
  return dataclasses.replace(requests, num_samples=counts)


def padded(requests: Requests, config: RolloutConfig, width: int) -> Requests:
  """Pads prompts and their tokens to powers of two; repeats the last prompt.

  So all calls together compile few programs. A queue of `width` columns takes
  prompts of at most `width` - 1 tokens.
  """
  num_prompts, columns = np.shape(requests.tokens)
  rows = padded_index(num_prompts)
  requests = take_prompts(requests, rows, config.num_samples)
  num_columns = min(power_of_two(columns), width - 1)
  tokens = np.asarray(requests.tokens)[:, :num_columns]
  tokens = np.pad(tokens, ((0, 0), (0, num_columns - tokens.shape[1])))
  return dataclasses.replace(requests, tokens=tokens)


def padded_index(count: int) -> np.ndarray:
  """Returns 0 .. count - 1, then the last index, up to a power of two."""
  return np.minimum(np.arange(power_of_two(count)), count - 1)


def power_of_two(count: int) -> int:
  return 1 << (count - 1).bit_length()


def without_samples(
  num_prompts: int,
  config: RolloutConfig,
  fields: Requests | None = None,
  queue: Queue | None = None,
) -> Requests:
  """Returns prompts without samples, for a queue that takes `fields`.

  The queue has the optional fields of `fields`, and the numbers and lists of
  `Sampling` of an earlier queue.
  """
  num_rows = num_prompts * config.num_samples
  earlier = [] if queue is None else [queue.sampling]
  sampling = neutral(num_rows, *earlier)
  extra = None
  if fields is not None:
    assert fields.sampling is not None
    sampling = neutral(num_rows, *earlier, fields.sampling)
    strings = fields.sampling.stop_strings
    if strings is not None:
      strings = dataclasses.replace(
        strings, start=np.zeros((num_rows,), np.int32)
      )
    sampling = dataclasses.replace(sampling, stop_strings=strings)
    extra = jax.tree.map(
      lambda leaf: np.zeros((num_rows, *leaf.shape[1:]), leaf.dtype),
      fields.extra,
    )
  optional = {
    "priority": np.zeros((num_rows,), np.int32),
    "log_probs_from": np.zeros((num_prompts,), np.int32),
    "salts": np.zeros((num_rows, hashing.KEY_WORDS), np.uint32),
  }
  return Requests(
    np.zeros((num_prompts, 1), np.int32),
    np.ones((num_prompts,), np.int32),
    sampling=sampling,
    num_samples=np.zeros((num_prompts,), np.int32),
    extra=extra,
    **{
      name: array
      for name, array in optional.items()
      if any(getattr(rows, name, None) is not None for rows in (fields, queue))
    },
  )


def fits(requests: Requests, queue: Queue) -> bool:
  """Returns True if a queue has the optional fields of `without_samples`."""

  def layout(rows: Any) -> Any:
    sampling = dataclasses.replace(rows.sampling, max_tokens=None, seed=None)
    leaves = sampling, rows.extra, rows.salts, rows.priority
    leaves = (*leaves, rows.log_probs_from)
    return jax.tree.map(lambda leaf: (leaf.shape[1:], leaf.dtype), leaves)

  assert requests.sampling is not None
  if layout(requests) != layout(queue):
    return False
  strings = requests.sampling.stop_strings
  if strings is None:
    return True
  old_strings = queue.sampling.stop_strings
  same = jax.tree.map(
    np.array_equal,
    dataclasses.replace(strings, start=0),
    dataclasses.replace(old_strings, start=0),
  )
  return all(jax.tree.leaves(same))


def with_salts(
  requests: Requests, queue: Queue, config: RolloutConfig
) -> Requests:
  """Adds salts of 0, which mean none, if the queue has salts."""
  if queue.salts is None or requests.salts is not None:
    return requests
  num_rows = len(requests.lengths) * config.num_samples
  salts = np.zeros((num_rows, hashing.KEY_WORDS), np.uint32)
  return dataclasses.replace(requests, salts=salts)
