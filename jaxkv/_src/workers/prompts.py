"""Splits requests into single prompts, and joins them again."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.queue.requests import Requests
from jaxkv._src.engine.queue.requests import as_requests
from jaxkv._src.engine.queue.requests import check_extra
from jaxkv._src.engine.queue.requests import check_lengths
from jaxkv._src.engine.queue.requests import check_stop_strings
from jaxkv._src.engine.queue.requests import map_rows
from jaxkv._src.engine.queue.requests import take_prompts
from jaxkv._src.sampling import padding
from jaxkv._src.transfer.exported import Exported

BLOCK = 16
"""The number of tokens in a block; prefixes are compared by whole blocks."""


class Prompt(NamedTuple):
  """One prompt of a pool.

  Attributes:
    id: the id of its first sample.
    requests: the prompt and the settings of its samples, see `split`.
    prefixes: a hash of each prefix of whole blocks, the shortest first.
    exported: the sequences of the removed worker that had the prompt; None if
      the prompt begins at its start.
  """

  id: int
  requests: Requests
  prefixes: tuple[int, ...]
  exported: Exported | None = None

  @property
  def num_samples(self) -> int:
    """The number of samples of the prompt."""
    return int(self.requests.num_samples[0])


def split(requests: Requests, config: RolloutConfig) -> list[Requests]:
  """Splits requests into a `Requests` for each prompt.

  All arrays are NumPy arrays, except the tables of stop strings, which the
  prompts share.
  """
  requests = as_requests(requests, config)
  samples = config.num_samples
  # Here, because `join` adds columns.
  check_lengths(requests)
  if requests.num_samples is None:
    counts = np.full(requests.lengths.shape, samples, np.int32)
    requests = dataclasses.replace(requests, num_samples=counts)
  requests = map_rows(np.asarray, np.asarray, requests)
  rows = np.arange(len(requests.lengths))[:, None]
  return [take_prompts(requests, row, samples) for row in rows]


def prefixes_of(prompt: Requests) -> tuple[int, ...]:
  """Returns `Prompt.prefixes` of one prompt."""
  tokens = prompt.tokens[0, : prompt.lengths[0]]
  salts = prompt.salts
  value = 0 if salts is None else hash(salts[0].tobytes())
  hashes = []
  # The last token is never part of a hit.
  for end in range(BLOCK, len(tokens), BLOCK):
    value = hash((value, tokens[end - BLOCK : end].tobytes()))
    hashes.append(value)
  return tuple(hashes)


def join_like(
  prompts: list[Prompt], first: Requests, config: RolloutConfig
) -> Requests:
  """Joins prompts, with lists of the sizes that those of `first` have.

  An engine takes longer lists only while it has no sequences.
  """
  rows = np.arange(len(prompts))
  joined = join([*(prompt.requests for prompt in prompts), first])
  return take_prompts(joined, rows, config.num_samples)


def join(prompts: list[Requests]) -> Requests:
  """Joins prompts from `split`; pads tokens and the lists of `Sampling`."""

  def padded(
    array: np.ndarray, sizes: tuple[int, ...], fill: int
  ) -> np.ndarray:
    if array.shape[1:] == sizes:
      return array
    return padding.pad_to(array, sizes, fill)

  def joined(fill: int, arrays: tuple[np.ndarray, ...]) -> np.ndarray:
    sizes = tuple(np.max([array.shape[1:] for array in arrays], axis=0))
    return np.concatenate([padded(array, sizes, fill) for array in arrays])

  def of_samples(*arrays: np.ndarray) -> np.ndarray:
    # Lists hold tokens, or the biases of tokens, which are floats.
    is_bias = arrays[0].dtype == np.float32
    return joined(0 if is_bias else padding.PADDING, arrays)

  return map_rows(lambda *arrays: joined(0, arrays), of_samples, *prompts)


def check_joinable(requests: Requests, first: Requests) -> None:
  """Raises ValueError unless prompts can be joined with the first prompt."""

  def fields(prompt: Requests) -> set[str]:
    leaves = jax.tree_util.tree_leaves_with_path(prompt)
    return {jax.tree_util.keystr(path[:2]) for path, _ in leaves}

  first_names = fields(first)
  for name in sorted(fields(requests) ^ first_names):
    rule = "be None"
    presence = "a value"
    if name in first_names:
      rule = "have a value"
      presence = "None"
    raise ValueError(
      f"`requests{name}` must {rule}, as in the first prompt of the pool, got "
      f"{presence}; give all prompts the same optional fields."
    )
  assert requests.sampling is not None and first.sampling is not None
  new_lists, first_lists = (
    jax.tree_util.tree_leaves_with_path(
      dataclasses.replace(sampling, stop_strings=None)
    )
    for sampling in (requests.sampling, first.sampling)
  )
  for (path, new), (_, old) in zip(new_lists, first_lists, strict=True):
    if new.shape[1:] > old.shape[1:]:
      raise ValueError(
        f"`requests.sampling{jax.tree_util.keystr(path)}` must have at most "
        f"{old.shape[1]} entries, as in the first prompt of the pool, got "
        f"{new.shape[1]}; pad the lists of the first prompt with -1."
      )
  origin = "in the first prompt of the pool"
  check_extra(requests.extra, first.extra, origin)
  check_stop_strings(
    requests.sampling.stop_strings, first.sampling.stop_strings, origin
  )
