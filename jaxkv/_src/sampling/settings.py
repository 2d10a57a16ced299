"""Sampling settings: how a sequence draws its tokens, and when it ends."""

import dataclasses
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.arrays.arguments import as_real_numbers
from jaxkv._src.sampling import padding
from jaxkv._src.sampling.padding import PADDING
from jaxkv._src.sampling.temperature import HIGHEST
from jaxkv._src.sampling.temperature import LEAST
from jaxkv._src.sampling.temperature import RANGE

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_NO_LIMIT = 2**30
# Fields that are read only when a sequence is created.
READ_ONCE = ("max_tokens", "seed")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitBias:
  """Biases for the logits of X tokens of each sequence.

  Attributes:
    tokens: the tokens, padded with -1.  # int32[Q, X]
    values: the bias of each token; -inf bans the token.  # float32[Q, X]
  """

  tokens: Any
  values: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """Sampling settings of Q sequences.

  Names and semantics follow vLLM's `SamplingParams`, except that
  `stop_token_ids` is `stop_tokens` here, `stop` is `stop_strings`, and
  `bad_words` and `seed` differ as described below. A number applies to all
  sequences. A list or an array has one number for each sequence. A field that
  is None adds nothing to the compiled program.

  The fields change the logits in this order: `logit_bias`, `min_tokens`,
  `bad_words`, `repetition_penalty`, `frequency_penalty`, `presence_penalty`,
  the caller's `process` function, `temperature`. Then the filters `min_p`,
  `top_k` and `top_p` remove unlikely tokens, in this order. `top_p` normalizes
  over the tokens that `min_p` and `top_k` keep. Tokens beyond the vocabulary
  are ignored in all lists. Logits that would overflow are clipped.

  Attributes:
    temperature: divides the logits. 0 takes the most likely token and ignores
      `top_k`, `top_p` and `min_p`. None means 1.  # float32[Q]
    top_k: the number of most likely tokens to draw from; 0 or -1 for all.
      Tokens that tie with the last of these are kept, too.  # int32[Q]
    top_p: the total probability, in (0, 1], that the most likely tokens must
      reach; less likely tokens are not drawn. Ties are kept.  # float32[Q]
    min_p: the lowest probability that a drawn token can have, as a fraction of
      that of the most likely token, in [0, 1].  # float32[Q]
    presence_penalty: is subtracted from the logits of tokens that the sequence
      has drawn.  # float32[Q]
    frequency_penalty: is subtracted from a token's logit once for each time
      that the sequence has drawn the token.  # float32[Q]
    repetition_penalty: for tokens that are in the prompt or were drawn, divides
      positive logits and multiplies negative logits.  # float32[Q]
    min_tokens: the number of tokens a sequence draws before it may draw a stop
      token or end at a stop string.  # int32[Q]
    max_tokens: the maximum number of tokens a sequence draws, if less than
      `RolloutConfig.max_new_tokens`.  # int32[Q]
    stop_tokens: tokens that end a sequence, as does `RolloutConfig.stop_token`.
      A list for all sequences, or one list for each sequence. The stored array
      is padded with -1.  # int32[Q, X]
    stop_strings: a `StopStrings` with the strings that end each sequence.
    logit_bias: a dictionary from tokens to the biases to add to their logits,
      or a list with one dictionary for each sequence. Stored as `LogitBias`.
    bad_words: words (lists of tokens) that no drawn token completes. A word may
      begin in the prompt, as in transformers and unlike in vLLM. A list of
      words for all sequences, or one such list for each sequence. The stored
      array is padded with -1 before each word.  # int32[Q, X, Y]
    seed: seeds the random key of a sequence; a negative seed is ignored. The
      random numbers of a sequence depend on its seed alone. So sequences with
      one seed are drawn with the same numbers: samples of a prompt are equal,
      unlike in vLLM, and samples of different prompts are correlated, which
      biases an average over them. For independent samples, give each sequence
      another seed, or none: without a seed, the key of `init` and the id of a
      sequence make its samples reproducible.  # int32[Q]

  Raises:
    TypeError: a field has values of a wrong type.
    ValueError: a value is out of range. The values of arrays on a device are
      checked by `init` and `submit` instead. Traced values are not checked.

  Examples:
    >>> sampling = Sampling(temperature=[0.0, 0.7], logit_bias={5: -100.0})
    >>> sampling = as_sampling(sampling, 2)
    >>> sampling.logit_bias.tokens.tolist(), sampling.top_k
    ([[5], [5]], None)
  """

  temperature: Any = None
  top_k: Any = None
  top_p: Any = None
  min_p: Any = None
  presence_penalty: Any = None
  frequency_penalty: Any = None
  repetition_penalty: Any = None
  min_tokens: Any = None
  max_tokens: Any = None
  stop_tokens: Any = None
  stop_strings: Any = None
  logit_bias: Any = None
  bad_words: Any = None
  seed: Any = None

  def __post_init__(self) -> None:
    for name, rule in RULES.items():
      value = getattr(self, name)
      if value is not None:
        _as_numbers(name, value, rule)
    for name, cast in _LISTS.items():
      value = getattr(self, name)
      if value is not None and not isinstance(value, Array | LogitBias):
        sized = isinstance(value, list | tuple | np.ndarray) and len(value)
        cast(value, len(value) if sized else 1)
    strings = self.stop_strings
    if strings is not None and not hasattr(strings, "advance"):
      raise TypeError(
        "`stop_strings` must be a rollout.StopStrings, got "
        f"{type(strings).__name__}; make it with rollout.stop_strings."
      )


_FIELDS = tuple(field.name for field in dataclasses.fields(Sampling))


def _flatten(sampling: Sampling) -> tuple[Any, None]:
  key = jax.tree_util.GetAttrKey
  return tuple((key(name), getattr(sampling, name)) for name in _FIELDS), None


def _unflatten(_: None, leaves: Any) -> Sampling:
  """Builds settings without the checks of the constructor."""
  sampling = object.__new__(Sampling)
  for name, leaf in zip(_FIELDS, leaves, strict=True):
    object.__setattr__(sampling, name, leaf)
  return sampling


# `register_dataclass` would call the constructor, whose checks refuse the
# placeholders that jax puts into trees.
jax.tree_util.register_pytree_with_keys(Sampling, _flatten, _unflatten)


class _Rule(NamedTuple):
  """The dtype, valid range and defaults of a numeric field.

  Attributes:
    dtype: the dtype in which numbers are stored.
    fits: maps an array of numbers to bools, True for valid ones.
    requirement: the phrase after "must be" in the error message.
    neutral: the number that has the same effect as None.
    fill: the number for rows without a sequence.
  """

  dtype: Any
  fits: Callable[[Any], Any]
  requirement: str
  neutral: float
  fill: float


def _numbers(
  requirement: str, fits: Callable[[Any], Any], neutral: float
) -> _Rule:
  return _Rule(jnp.float32, fits, requirement, neutral, neutral)


def _counts(requirement: str, minimum: int, neutral: int) -> _Rule:
  return _Rule(jnp.int32, lambda x: x >= minimum, requirement, neutral, neutral)


RULES = {
  # A row without a sequence is greedy. On a CPU, a batch whose rows are all
  # greedy draws no random numbers.
  "temperature": _numbers(
    RANGE, lambda x: (x == 0) | ((x >= LEAST) & (x <= HIGHEST)), 1
  )._replace(fill=0),
  "top_k": _counts("at least 1, or 0 or -1 for all tokens", -1, 0),
  "top_p": _numbers("above 0 and at most 1", lambda x: (x > 0) & (x <= 1), 1),
  "min_p": _numbers("0 .. 1", lambda x: (x >= 0) & (x <= 1), 0),
  "presence_penalty": _numbers("finite", np.isfinite, 0),
  "frequency_penalty": _numbers("finite", np.isfinite, 0),
  "repetition_penalty": _numbers(
    f"a finite float32 of at least {LEAST:.2g}",
    lambda x: (x >= LEAST) & (x <= _FLOAT32_MAX),
    1,
  ),
  "min_tokens": _counts("at least 0", 0, 0),
  "max_tokens": _counts("at least 1", 1, _NO_LIMIT),
  "seed": _counts("an int32", -(2**31), -1),
}


def as_sampling(sampling: Sampling | None, num_sequences: int) -> Sampling:
  """Checks settings and converts them to new arrays for Q sequences.

  `sampling` is None for the defaults.

  Examples:
    >>> as_sampling(Sampling(top_k=50, stop_tokens=[2, 3]), 2).stop_tokens
    Array([[2, 3],
           [2, 3]], dtype=int32)
  """
  if sampling is None:
    return Sampling()
  if not isinstance(sampling, Sampling):
    raise TypeError(
      f"`sampling` must be a rollout.Sampling, got {type(sampling).__name__}."
    )
  fields: dict[str, Any] = {"stop_strings": sampling.stop_strings}
  for name, rule in RULES.items():
    value = getattr(sampling, name)
    fields[name] = (
      None if value is None else _column(name, value, num_sequences, rule)
    )
  _check_order(fields["min_tokens"], fields["max_tokens"])
  for name, cast in _LISTS.items():
    value = getattr(sampling, name)
    fields[name] = None if value is None else cast(value, num_sequences)
  return Sampling(**fields)


def _is_concrete(value: Any) -> bool:
  return value is not None and not isinstance(value, Tracer)


def _copy(value: Any, dtype: Any) -> Array:
  """Returns a new array of a value."""
  # A state that contains the settings can be donated. Without a copy, donation
  # would delete the caller's array.
  return jnp.array(value, dtype=dtype, copy=True)


def _as_numbers(name: str, value: Any, rule: _Rule) -> Any:
  """Converts numbers, and checks their range if they are on the host."""
  as_kind = as_int32 if rule.dtype == jnp.int32 else as_real_numbers
  value = as_kind(name, value)
  if value.ndim > 1:
    raise ValueError(
      f"`{name}` must have the shape [] or [Q], one for each sequence, got "
      f"{[*value.shape]}."
    )
  if not isinstance(value, Array):
    _check_values(name, value, rule)
  return value


def _column(name: str, value: Any, num_sequences: int, rule: _Rule) -> Array:
  value = _as_numbers(name, value, rule)
  if value.ndim and value.shape != (num_sequences,):
    raise ValueError(
      f"`{name}` must have the shape [] or [{num_sequences}], one for each "
      f"sequence, got {[*value.shape]}."
    )
  if _is_concrete(value):
    _check_values(name, np.asarray(value), rule)
  return _copy(jnp.broadcast_to(value, (num_sequences,)), rule.dtype)


def _check_values(name: str, value: np.ndarray, rule: _Rule) -> None:
  # In float16, the bounds would become 0 and infinity.
  bad = np.flatnonzero(~np.asarray(rule.fits(value.astype(np.float64))))
  if bad.size:
    label = f"{name}[{bad[0]}]" if value.ndim else name
    bad_value = value.reshape(-1)[bad[0]]
    raise ValueError(f"`{label}` must be {rule.requirement}, got {bad_value}.")


def _check_order(min_tokens: Array | None, max_tokens: Array | None) -> None:
  if not (_is_concrete(min_tokens) and _is_concrete(max_tokens)):
    return
  low = np.asarray(min_tokens)
  high = np.asarray(max_tokens)
  for row in np.flatnonzero(low > high)[:1]:
    raise ValueError(
      f"`min_tokens[{row}]` must be at most `max_tokens[{row}]`, got "
      f"{low[row]} and {high[row]}."
    )


def _is_array(value: Any) -> bool:
  return isinstance(value, np.ndarray | jax.Array)


def _stop_tokens(value: Any, num_sequences: int) -> Array:
  name = "stop_tokens"
  if _is_array(value):
    tokens = padding.as_tokens(name, value, num_sequences, 2)
  else:
    lists = padding.as_lists(name, value, num_sequences, 1)
    tokens = padding.padded_tokens(name, lists)
  return _copy(tokens, jnp.int32)


def _bad_words(value: Any, num_sequences: int) -> Array:
  name = "bad_words"
  if not _is_array(value):
    lists = padding.as_lists(name, value, num_sequences, 2)
    return _copy(padding.padded_words(name, lists), jnp.int32)
  words = padding.as_tokens(name, value, num_sequences, 3)
  if _is_concrete(words):
    is_token = np.asarray(words) >= 0
    if np.any(is_token[..., :-1] & ~is_token[..., 1:]):
      raise ValueError(
        f"`{name}` must have the padding, {PADDING}, before the tokens of each "
        f"word, got a {PADDING} after a token; pass lists of lists, which need "
        "no padding."
      )
  return _copy(words, jnp.int32)


def _logit_bias(value: Any, num_sequences: int) -> LogitBias:
  name = "logit_bias"
  if isinstance(value, LogitBias):
    tokens = padding.as_tokens(f"{name}.tokens", value.tokens, num_sequences, 2)
    values = as_real_numbers(f"{name}.values", value.values)
    if values.shape not in (tokens.shape, tokens.shape[1:]):
      raise ValueError(
        f"`{name}.values` must have the shape of `{name}.tokens`, "
        f"{[*tokens.shape]}, got {[*values.shape]}."
      )
  else:
    tokens, values = padding.padded_biases(name, value, num_sequences)
  if _is_concrete(values):
    _check_biases(name, np.asarray(values))
  values = jnp.broadcast_to(values, tokens.shape)
  return LogitBias(
    tokens=_copy(tokens, jnp.int32), values=_copy(values, jnp.float32)
  )


_LISTS: dict[str, Callable[[Any, int], Any]] = {
  "stop_tokens": _stop_tokens,
  "logit_bias": _logit_bias,
  "bad_words": _bad_words,
}


def _check_biases(name: str, values: np.ndarray) -> None:
  bad = values[np.isnan(values) | (values > _FLOAT32_MAX)]
  if bad.size:
    raise ValueError(
      f"`{name}` must hold finite numbers, or -inf to exclude a token, got "
      f"{bad[0]}."
    )


def rows(sampling: Sampling, sequences: Array) -> Sampling:
  """Gathers the settings of the sequences in R rows.

  A row without a sequence, whose entry of `sequences` int32[R] is out of range,
  is greedy if temperatures are set, and its other settings are off.
  `stop_strings` are not gathered.

  Examples:
    >>> sampling = as_sampling(Sampling(top_k=[3, 4]), 2)
    >>> rows(sampling, jnp.asarray([1, 2, 0], jnp.int32)).top_k
    Array([4, 0, 3], dtype=int32)
  """

  def take(array: Array | None, fill: Any) -> Array | None:
    return None if array is None else indexing.take(array, sequences, fill=fill)

  fields = {
    name: take(getattr(sampling, name), rule.fill)
    for name, rule in RULES.items()
  }
  bias = sampling.logit_bias
  return dataclasses.replace(
    sampling,
    stop_tokens=take(sampling.stop_tokens, PADDING),
    bad_words=take(sampling.bad_words, PADDING),
    logit_bias=None
    if bias is None
    else LogitBias(
      tokens=take(bias.tokens, PADDING), values=take(bias.values, 0)
    ),
    **fields,
  )


def put(sampling: Sampling, sequences: Array, new: Sampling) -> Sampling:
  """Replaces the settings of R sequences, distinct or out of range.

  A field that is None in `new` is turned off for these sequences. Stop strings
  do not change; the caller replaces them.

  Raises:
    ValueError: `new` has longer lists than `sampling`, or sets a field that is
      None in `sampling`, other than `max_tokens` and `seed`.

  Examples:
    >>> sampling = as_sampling(Sampling(top_k=[3, 4]), 2)
    >>> new = as_sampling(Sampling(top_k=9), 1)
    >>> put(sampling, jnp.asarray([1], jnp.int32), new).top_k
    Array([3, 9], dtype=int32)
  """
  _check_fields(sampling, new)

  def write(name: str, array: Any, values: Any, fill: float) -> Array | None:
    if array is None:
      return None
    if values is None:
      values = jnp.asarray(fill, array.dtype)
    else:
      _check_sizes(name, values.shape[1:], array.shape[1:])
      values = padding.pad_to(values, array.shape[1:], fill)
    return indexing.put(array, sequences, values=values)

  fields = {
    name: write(name, getattr(sampling, name), getattr(new, name), rule.neutral)
    for name, rule in RULES.items()
  }
  for name in ("stop_tokens", "bad_words"):
    fields[name] = write(
      name, getattr(sampling, name), getattr(new, name), PADDING
    )
  bias = sampling.logit_bias
  new_bias = new.logit_bias or LogitBias(tokens=None, values=None)
  if bias is not None:
    bias = LogitBias(
      tokens=write("logit_bias", bias.tokens, new_bias.tokens, PADDING),
      values=write("logit_bias", bias.values, new_bias.values, 0),
    )
  return dataclasses.replace(sampling, logit_bias=bias, **fields)


def _check_fields(sampling: Sampling, new: Sampling) -> None:
  for field in dataclasses.fields(Sampling):
    name = field.name
    current = getattr(sampling, name)
    replacement = getattr(new, name)
    if current is None and replacement is not None and name not in READ_ONCE:
      raise ValueError(
        f"`sampling.{name}` must be None, because it was None in "
        "`rollout.init`, got a value; set it in `rollout.init`, too."
      )


def _check_sizes(
  name: str, lengths: tuple[int, ...], limits: tuple[int, ...]
) -> None:
  if any(length > limit for length, limit in zip(lengths, limits, strict=True)):
    raise ValueError(
      f"`sampling.{name}` must have at most {[*limits]} entries for a "
      f"sequence, as in `rollout.init`, got {[*lengths]}; pass longer lists to "
      "`rollout.init`."
    )
