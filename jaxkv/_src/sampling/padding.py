"""Converts nested lists of different lengths to padded arrays."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.arrays.arguments import check_shape

PADDING = -1
"""The id of padding, which no token has."""

_ONE_EACH = ", one list for each sequence"


def as_lists(
  name: str, value: Any, num_sequences: int, depth: int
) -> list[Any]:
  """Returns Q lists, one for each sequence; repeats a single list Q times.

  The list of one sequence has the nesting `depth`. Raises TypeError for a list
  that is nested neither so deep nor one level deeper, and ValueError unless
  there are Q lists. `name` is the argument's name in the message.
  """
  if _is_nested(value, depth + 1) and len(value):
    if len(value) != num_sequences:
      raise ValueError(
        f"`{name}` must have {num_sequences} lists, one for each sequence, got "
        f"{len(value)}."
      )
    return list(value)
  if _is_nested(value, depth):
    return [value] * num_sequences
  items = " of lists" * (depth - 1)
  raise TypeError(
    f"`{name}` must be a list{items} of ints for all sequences, or a list of "
    f"such lists with one for each, got {value!r}."
  )


def _is_nested(value: Any, depth: int) -> bool:
  """Returns True if all leaves are inside `depth` levels of lists."""
  if not isinstance(value, list | tuple | np.ndarray):
    return depth == 0
  return depth > 0 and all(_is_nested(item, depth - 1) for item in value)


def padded_tokens(name: str, lists: list[Any]) -> np.ndarray:
  """Pads Q lists of at most X tokens with -1 at the end, to int32[Q, X].

  X is at least 1. Raises TypeError or ValueError unless tokens are non-negative
  integers that fit int32.
  """
  width = max([1, *map(len, lists)])
  out = np.full((len(lists), width), PADDING, np.int32)
  for row, tokens in enumerate(lists):
    out[row, : len(tokens)] = _tokens(f"{name}[{row}]", tokens)
  return out


def padded_words(name: str, lists: list[Any]) -> np.ndarray:
  """Pads words with -1 before their tokens, to int32[Q, X, Y].

  A word is a list of tokens. A sequence has at most X words, and a word has at
  most Y tokens. Raises TypeError or ValueError unless each word has a token,
  and tokens are non-negative integers that fit int32.
  """
  count = max([1, *map(len, lists)])
  width = max([1, *(len(word) for words in lists for word in words)])
  out = np.full((len(lists), count, width), PADDING, np.int32)
  for row, words in enumerate(lists):
    for index, word in enumerate(words):
      label = f"{name}[{row}][{index}]"
      if not len(word):
        raise ValueError(
          f"`{label}` must have at least one token, got an empty list."
        )
      out[row, index, width - len(word) :] = _tokens(label, word)
  return out


def padded_biases(
  name: str, value: Any, num_sequences: int
) -> tuple[np.ndarray, np.ndarray]:
  """Converts a dictionary for all Q sequences, or Q of them, to padded arrays.

  Returns tokens and biases, each [Q, X]. Raises TypeError and ValueError for
  other values, tokens that are negative or not in int32, and biases that are
  not real.
  """
  if isinstance(value, Mapping):
    value = [value] * num_sequences
  if not isinstance(value, list | tuple) or not all(
    isinstance(biases, Mapping) for biases in value
  ):
    raise TypeError(
      f"`{name}` must be a dictionary from tokens to numbers, or a list with "
      f"one for each sequence, got {value!r}."
    )
  if len(value) != num_sequences:
    raise ValueError(
      f"`{name}` must have {num_sequences} dictionaries, one for each "
      f"sequence, got {len(value)}."
    )
  tokens = padded_tokens(name, [list(biases) for biases in value])
  bias_rows = np.zeros(tokens.shape)
  for row, biases in enumerate(value):
    values = np.asarray(list(biases.values()))
    if biases and values.dtype.kind not in "fiu":
      raise TypeError(
        f"`{name}[{row}]` must hold real numbers, got {values.dtype}."
      )
    bias_rows[row, : len(biases)] = values
  return tokens, bias_rows


def as_tokens(name: str, value: Array, num_sequences: int, rank: int) -> Any:
  """Converts an array to int32 with a row for each of Q sequences.

  An array with `rank - 1` axes is repeated for all sequences. Raises ValueError
  for other shapes.
  """
  tokens = as_int32(name, value)
  if tokens.ndim == rank - 1:
    tokens = tokens[None].repeat(num_sequences, axis=0)
  check_shape(name, tokens, (num_sequences, "X", "Y")[:rank], _ONE_EACH)
  return tokens


def pad_to(values: Any, shape: tuple[int, ...], fill: float) -> Any:
  """Pads values to [Q, *shape]: lists at the end, words at the front."""
  missing = [
    limit - n for n, limit in zip(values.shape[1:], shape, strict=True)
  ]
  # Axis 1 has the entries of a list, padded at the end. Axis 2, if any, has the
  # tokens of a word, padded at the front, so that it ends in the last column.
  widths = [(0, 0), *((0, count) for count in missing[:1])]
  widths += [(count, 0) for count in missing[1:]]
  pad = np.pad if isinstance(values, np.ndarray) else jnp.pad
  return pad(values, widths, constant_values=fill)


def _tokens(name: str, tokens: Any) -> np.ndarray:
  row = np.asarray(as_int32(name, tokens)).reshape(len(tokens))
  if np.any(row < 0):
    raise ValueError(
      f"`{name}` must hold tokens of at least 0, got {row.min()}."
    )
  return row
