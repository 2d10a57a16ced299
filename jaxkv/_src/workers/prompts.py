"""Splits requests into single prompts, and joins them again."""

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.requests import Requests
from jaxkv._src.engine.requests import as_requests
from jaxkv._src.engine.requests import map_rows

BLOCK = 16
"""The number of tokens in a block; prefixes are compared by whole blocks."""


class Prompt(NamedTuple):
  """One prompt of a pool.

  Attributes:
    id: the id of its first sample.
    requests: the prompt and the settings of its samples, see `split`.
    prefixes: a hash of each prefix of whole blocks, the shortest first.
  """

  id: int
  requests: Requests
  prefixes: tuple[int, ...]


def split(requests: Requests, config: RolloutConfig) -> list[Requests]:
  """Splits requests into a `Requests` for each prompt.

  All arrays are NumPy arrays, except the tables of stop strings, which the
  prompts share.

  Raises:
    TypeError: see `as_requests`.
    ValueError: see `as_requests`.
  """
  requests, samples = as_requests(requests, config), config.num_samples
  if requests.num_samples is None:
    counts = np.full(requests.lengths.shape, samples, np.int32)
    requests = dataclasses.replace(requests, num_samples=counts)
  requests = map_rows(np.asarray, np.asarray, requests)
  return [
    map_rows(
      lambda array, row=row: array[row : row + 1],
      lambda array, row=row: array[row * samples : (row + 1) * samples],
      requests,
    )
    for row in range(len(requests.lengths))
  ]


def prefixes_of(prompt: Requests) -> tuple[int, ...]:
  """Returns `Prompt.prefixes` of one prompt."""
  tokens, salts = prompt.tokens[0, : prompt.lengths[0]], prompt.salts
  value = 0 if salts is None else hash(salts[0].tobytes())
  hashes = []
  # The last token is never part of a hit.
  for end in range(BLOCK, len(tokens), BLOCK):
    value = hash((value, tokens[end - BLOCK : end].tobytes()))
    hashes.append(value)
  return tuple(hashes)


def join(prompts: list[Requests], columns: int = 0) -> Requests:
  """Joins prompts from `split`, padded to at least `columns` columns."""
  columns = max(columns, *(prompt.tokens.shape[1] for prompt in prompts))

  def widened(prompt: Requests) -> Requests:
    missing = columns - prompt.tokens.shape[1]
    tokens = np.pad(prompt.tokens, ((0, 0), (0, missing)))
    return dataclasses.replace(prompt, tokens=tokens)

  def joined(*rows: np.ndarray) -> np.ndarray:
    return np.concatenate(rows)

  return map_rows(joined, joined, *map(widened, prompts))
