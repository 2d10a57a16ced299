"""Splits requests into single prompts, and joins them again."""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.requests import Requests
from jaxkv._src.engine.requests import as_requests
from jaxkv._src.guides.stop_strings import StopStrings

BLOCK = 16
"""Tokens of a block, by which prefixes of prompts are compared."""


class Prompt(NamedTuple):
  """One prompt.

  Attributes:
    id: the id of its first sample.
    requests: the prompt and the settings of its samples, as arrays of numpy. In
      place of stop strings they have the first states alone.
    prefixes: a hash of each prefix of whole blocks, the shortest first.
  """

  id: int
  requests: Requests
  prefixes: tuple[int, ...]


def split(
  requests: Requests, ids: list[int], config: RolloutConfig
) -> tuple[list[Prompt], StopStrings | None]:
  """Returns the prompts of requests, and their stop strings.

  Raises:
    TypeError: see `as_requests`.
    ValueError: see `as_requests`.
  """
  requests, samples = as_requests(requests, config), config.num_samples
  sampling, counts = requests.sampling, requests.num_samples
  assert sampling is not None  # `as_requests` sets it.
  strings: Any = sampling.stop_strings
  if strings is not None:
    sampling = dataclasses.replace(sampling, stop_strings=strings.start)
  if counts is None:
    counts = np.full((len(ids),), samples, np.int32)
  of_prompts = requests.tokens, requests.lengths, counts
  of_samples = sampling, requests.priority, requests.salts, requests.extra
  of_prompts, of_samples = jax.device_get((of_prompts, of_samples))
  prompts = []
  for row, number in enumerate(ids):
    rows = slice(row * samples, (row + 1) * samples)
    tokens, lengths, counts = (array[row : row + 1] for array in of_prompts)
    sampling, priority, salts, extra = jax.tree.map(
      lambda array, rows=rows: array[rows], of_samples
    )
    one = Requests(
      tokens,
      lengths,
      sampling=sampling,
      num_samples=counts,
      priority=priority,
      salts=salts,
      extra=extra,
    )
    prefixes = _prefix_hashes(tokens[0, : lengths[0]], salts)
    prompts.append(Prompt(number, one, prefixes))
  return prompts, strings


def _prefix_hashes(tokens: np.ndarray, salts: Any) -> tuple[int, ...]:
  value = 0 if salts is None else hash(salts[0].tobytes())
  hashes = []
  # The last token is never part of a hit.
  for end in range(BLOCK, len(tokens), BLOCK):
    value = hash((value, tokens[end - BLOCK : end].tobytes()))
    hashes.append(value)
  return tuple(hashes)


def join(
  prompts: list[Prompt], strings: StopStrings | None, columns: int = 0
) -> Requests:
  """Returns the requests of prompts, padded to at least `columns` tokens."""
  parts = [prompt.requests for prompt in prompts]
  columns = max(columns, *(part.tokens.shape[1] for part in parts))

  def widened(part: Requests) -> Requests:
    missing = columns - part.tokens.shape[1]
    tokens = np.pad(part.tokens, ((0, 0), (0, missing)))
    return dataclasses.replace(part, tokens=tokens)

  joined = jax.tree.map(
    lambda *rows: np.concatenate(rows), *map(widened, parts)
  )
  if strings is None:
    return joined
  strings = dataclasses.replace(strings, start=joined.sampling.stop_strings)
  sampling = dataclasses.replace(joined.sampling, stop_strings=strings)
  return dataclasses.replace(joined, sampling=sampling)
