"""The room of an engine, and its results as NumPy arrays."""

import functools
from collections.abc import Callable
from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np

from jaxkv._src.engine.queue.queue import Finish
from jaxkv._src.engine.queue.requests import Requests
from jaxkv._src.engine.results.generated import Generated


class Room(NamedTuple):
  """Room for further prompts in an engine.

  Attributes:
    prompts: the number of prompts that fit into its queue.
    needed: the number of further samples that keep all slots busy, also after
      the running sequences have ended.
    slots: the number of samples that it computes at the same time.
  """

  prompts: int
  needed: int
  slots: int


class PromptSamples(NamedTuple):
  """All samples of a prompt, which have ended.

  Attributes:
    id: the id of the prompt's first sample.
    results: the samples, as NumPy arrays with G rows.
  """

  id: int
  results: Generated


class NewTokens(NamedTuple):
  """The tokens that a sequence got since they were last read.

  Attributes:
    id: the id of the sequence.
    tokens: int32[X], in order.
  """

  id: int
  tokens: np.ndarray


class Samples(NamedTuple):
  """The samples of a list of prompts, in order.

  Attributes:
    results: tokens, masks and log-probs for a loss, as NumPy arrays. With n
      samples of each prompt, sample g of prompt p has row p * n + g. The
      columns end with the longest sequence.
    texts: for each prompt, the texts of its samples, without the prompt, and
      without a stop string that ended them and what follows it in the same
      token; None if the engine has no tokenizer.
  """

  results: Generated
  texts: list[list[str]] | None


def with_texts(
  ended: list[PromptSamples],
  num_prompts: int,
  read_texts: Callable[[list[np.ndarray]], list[str] | None],
  requests: Requests,
) -> Samples:
  """Returns the samples of prompts in order, with texts of the new tokens."""
  ended = sorted(ended, key=lambda out: out.id)
  results = joined(ended)
  rows = zip(results.tokens, results.mask, strict=True)
  tokens = [row[mask] for row, mask in rows]
  texts = read_texts(tokens)
  if texts is None:
    return Samples(results, None)
  assert requests.sampling is not None  # The reader of prompts sets it.
  strings = requests.sampling.stop_strings
  if strings is not None:
    stopped_rows = np.flatnonzero(results.finish == Finish.STOP_STRING).tolist()
    earlier_texts = read_texts([tokens[row][:-1] for row in stopped_rows]) or []
    is_valid = np.concatenate([out.results.valid for out in ended])
    starts = np.asarray(strings.start)[is_valid].tolist()
    # Most samples end at one of few strings.
    read_string = functools.cache(strings.string)
    for row, earlier_text in zip(stopped_rows, earlier_texts, strict=True):
      string = read_string(starts[row], int(results.stop[row]))
      texts[row] = _cut(texts[row], string, len(earlier_text))
  counts = np.asarray([out.results.valid.sum() for out in ended])
  # A prompt with many samples has ended in several parts.
  stops = np.cumsum(counts.reshape(num_prompts, -1).sum(axis=1)).tolist()
  pairs = zip([0, *stops], stops, strict=False)
  return Samples(
    results, [texts[first_row:stop_row] for first_row, stop_row in pairs]
  )


def _cut(text: str, string: bytes, num_earlier: int) -> str:
  """Cuts a text at the stop string that its last token completed.

  `num_earlier` is the length of the text without its last token.
  """
  # Bytes that are not UTF-8 are in no text.
  string_text = string.decode("utf-8", "replace")
  # An earlier occurrence ended nothing, because of `min_tokens`.
  first_column = max(num_earlier - len(string_text) + 1, 0)
  column = text.find(string_text, first_column)
  return text if column < 0 else text[:column]


def split(results: Generated, num_samples: int) -> list[PromptSamples]:
  """Splits rows into the prompts that they belong to, in order.

  `results`, NumPy arrays, have `num_samples` rows for each prompt.
  """
  is_valid = results.valid.reshape(-1, num_samples).any(axis=1)
  prompts = []
  for first_row in (np.flatnonzero(is_valid) * num_samples).tolist():
    rows = np.arange(first_row, first_row + num_samples)
    # Copies, because a slice would keep the results of all rows in memory.
    of_prompt = jax.tree.map(lambda array, rows=rows: array[rows], results)
    prompts.append(PromptSamples(int(of_prompt.ids[0]), of_prompt))
  return prompts


def joined(prompts: Iterable[PromptSamples]) -> Generated:
  """Joins the samples that exist, without columns that no sequence has."""
  parts = [prompt.results for prompt in prompts]
  longest = max(int(part.lengths.max()) for part in parts)

  def join(*arrays: np.ndarray) -> np.ndarray:
    valid_rows = [
      array[part.valid] for array, part in zip(arrays, parts, strict=True)
    ]
    array = np.concatenate(valid_rows)
    return array if array.ndim == 1 else array[:, :longest]

  return jax.tree.map(join, *parts)
