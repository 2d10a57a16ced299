"""Splits requests into single prompts, and joins them again."""

import dataclasses
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.requests import Requests
from jaxkv._src.engine.requests import as_requests
from jaxkv._src.engine.requests import check_extra
from jaxkv._src.engine.requests import check_stop_strings
from jaxkv._src.engine.requests import map_rows
from jaxkv._src.sampling import padding

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

  @property
  def num_samples(self) -> int:
    """The number of samples of the prompt."""
    return int(self.requests.num_samples[0])


def split(requests: Requests, config: RolloutConfig) -> list[Requests]:
  """Splits requests into a `Requests` for each prompt.

  All arrays are NumPy arrays, except the tables of stop strings, which the
  prompts share.
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
  """Joins prompts from `split`, padded to at least `columns` columns.

  Shorter lists of `Sampling` are padded too.
  """
  columns = max(columns, *(prompt.tokens.shape[1] for prompt in prompts))
  samplings = _pad_lists([prompt.sampling for prompt in prompts])

  def padded(prompt: Requests, sampling: Any) -> Requests:
    missing = columns - prompt.tokens.shape[1]
    tokens = np.pad(prompt.tokens, ((0, 0), (0, missing)))
    return dataclasses.replace(prompt, tokens=tokens, sampling=sampling)

  def joined(*rows: np.ndarray) -> np.ndarray:
    return np.concatenate(rows)

  return map_rows(joined, joined, *map(padded, prompts, samplings))


def _pad_lists(samplings: Sequence[Any]) -> list[Any]:
  """Pads the lists of several settings to the same lengths."""

  def largest(*arrays: Any) -> np.ndarray:
    return np.max([array.shape[1:] for array in arrays], axis=0)

  def padded(array: Any, sizes: np.ndarray) -> Any:
    if array.shape[1:] == tuple(sizes):
      return array
    # Lists hold tokens, or the biases of tokens, which are floats.
    fill = 0 if array.dtype == np.float32 else padding.PADDING
    return padding.pad_to(array, tuple(sizes), fill)

  sizes = jax.tree.map(largest, *samplings)
  return [jax.tree.map(padded, sampling, sizes) for sampling in samplings]


def check_joinable(requests: Requests, first: Requests) -> None:
  """Raises ValueError unless prompts can be joined with those of a pool.

  Args:
    requests: a prompt from `split`.
    first: the first prompt of the pool.
  """

  def fields(prompt: Requests) -> set[str]:
    leaves = jax.tree_util.tree_leaves_with_path(prompt)
    return {jax.tree_util.keystr(path[:2]) for path, _ in leaves}

  expected_names = fields(first)
  for name in sorted(fields(requests) ^ expected_names):
    rule, presence = "be None", "a value"
    if name in expected_names:
      rule, presence = "have a value", "None"
    raise ValueError(
      f"`requests{name}` must {rule}, as in the first prompt of the pool, got "
      f"{presence}; give all prompts the same optional fields."
    )
  origin = "in the first prompt of the pool"
  check_extra(requests.extra, first.extra, origin)
  assert requests.sampling is not None and first.sampling is not None
  check_stop_strings(
    requests.sampling.stop_strings, first.sampling.stop_strings, origin
  )
