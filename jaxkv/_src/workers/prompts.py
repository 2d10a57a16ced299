"""Splits requests into single prompts, and joins them again."""

import dataclasses
from typing import Any
from typing import NamedTuple

import numpy as np

from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.requests import Requests
from jaxkv._src.engine.requests import as_requests
from jaxkv._src.engine.requests import map_rows

BLOCK = 16
"""Tokens of a block, by which prefixes of prompts are compared."""


class Prompt(NamedTuple):
  """One prompt.

  Attributes:
    id: the id of its first sample.
    requests: the prompt and the settings of its samples, as arrays of numpy;
      only the tables of stop strings, which all prompts share, may be on a
      device.
    prefixes: a hash of each prefix of whole blocks, the shortest first.
  """

  id: int
  requests: Requests
  prefixes: tuple[int, ...]


def split(
  requests: Requests, ids: list[int], config: RolloutConfig
) -> list[Prompt]:
  """Returns the prompts of requests.

  Raises:
    TypeError: see `as_requests`.
    ValueError: see `as_requests`.
  """
  requests, samples = as_requests(requests, config), config.num_samples
  if requests.num_samples is None:
    counts = np.full((len(ids),), samples, np.int32)
    requests = dataclasses.replace(requests, num_samples=counts)
  requests = map_rows(np.asarray, np.asarray, requests)
  prompts = []
  for row, number in enumerate(ids):
    one = map_rows(
      lambda array, row=row: array[row : row + 1],
      lambda array, row=row: array[row * samples : (row + 1) * samples],
      requests,
    )
    prefixes = _prefix_hashes(one.tokens[0, : one.lengths[0]], one.salts)
    prompts.append(Prompt(number, one, prefixes))
  return prompts


def _prefix_hashes(tokens: np.ndarray, salts: Any) -> tuple[int, ...]:
  value = 0 if salts is None else hash(salts[0].tobytes())
  hashes = []
  # The last token is never part of a hit.
  for end in range(BLOCK, len(tokens), BLOCK):
    value = hash((value, tokens[end - BLOCK : end].tobytes()))
    hashes.append(value)
  return tuple(hashes)


def join(prompts: list[Prompt], columns: int = 0) -> Requests:
  """Returns the requests of prompts, padded to at least `columns` tokens."""
  parts = [prompt.requests for prompt in prompts]
  columns = max(columns, *(part.tokens.shape[1] for part in parts))

  def widened(part: Requests) -> Requests:
    missing = columns - part.tokens.shape[1]
    tokens = np.pad(part.tokens, ((0, 0), (0, missing)))
    return dataclasses.replace(part, tokens=tokens)

  def joined(*rows: np.ndarray) -> np.ndarray:
    return np.concatenate(rows)

  return map_rows(joined, joined, *map(widened, parts))
