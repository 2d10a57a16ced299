"""How each sequence draws its tokens, and when it ends."""

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

_MOST = float(np.finfo(np.float32).max)
_ENDLESS = 2**30
_USED_ONCE = ("max_tokens", "seed")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitBias:
  """What is added to the logits of some tokens of each sequence.

  Attributes:
    tokens: padded with -1.  # int32[Q, X]
    values: what is added; -inf for tokens that must not be drawn.
      # float32[Q, X]
  """

  tokens: Any
  values: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """How each of Q sequences draws its tokens, and when it ends.

  Names and meanings are those of vLLM's `SamplingParams`, but that its
  `stop_token_ids` are `stop_tokens` here, and its `stop` is `stop_strings`. A
  number is one for all sequences; a list or an array has one for each. A field
  that is None is not compiled, and costs nothing.

  The logits of a token are changed in this order: `logit_bias`, `min_tokens`,
  `bad_words`, `repetition_penalty`, `frequency_penalty`, `presence_penalty`,
  the caller's own function, `temperature`. Then tokens that are too unlikely
  are left out: by `min_p`, by `top_k`, and by `top_p` among those that are
  left. A token beyond the vocabulary has no effect in any list. Logits that
  would overflow become the float32 of the largest magnitude.

  Attributes:
    temperature: what logits are divided by; 0 takes the most likely token, for
      which `top_k`, `top_p` and `min_p` do nothing. None for 1.  # float32[Q]
    top_k: the number of most likely tokens to draw from; 0 or -1 for all.
      Tokens that are as likely as the last of them are not left out.
      # int32[Q]
    top_p: the probability, in (0, 1], that the most likely tokens to draw from
      must have together at least. Tokens that are as likely as the last of
      them are not left out.  # float32[Q]
    min_p: the least probability of a token to draw, in [0, 1], in parts of that
      of the most likely one.  # float32[Q]
    presence_penalty: what is subtracted from the logits of tokens that the
      sequence has drawn.  # float32[Q]
    frequency_penalty: likewise, for each time the token was drawn.
      # float32[Q]
    repetition_penalty: what positive logits of tokens in the prompt or among
      the drawn ones are divided by, and negative ones multiplied by.
      # float32[Q]
    min_tokens: how many tokens a sequence draws before it may draw a stop
      token: one of `stop_tokens`, or `RolloutConfig.stop_token`.  # int32[Q]
    max_tokens: the most tokens it draws, if that is less than
      `RolloutConfig.max_new_tokens`.  # int32[Q]
    stop_tokens: tokens that end a sequence, beside `RolloutConfig.stop_token`:
      a list for all, or a list for each; stored padded with -1.  # int32[Q, X]
    stop_strings: strings that end a sequence; kept as it is.
    logit_bias: what is added to the logits of tokens: a dictionary for all
      sequences, or a list with one for each; stored as `LogitBias`.
    bad_words: words, as lists of tokens, that are never completed: a list for
      all sequences, or a list of such lists; stored padded with -1, a word at
      the front, so that its last token is in the last place.
      # int32[Q, X, Y]
    seed: from which a sequence's random key is made; negative for none of its
      own.  # int32[Q]

  Raises:
    TypeError: a field holds values of another kind.
    ValueError: a field has a value that is not allowed. Those of arrays on a
      device are checked by `init` and `submit`; traced ones never.

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
    for name, rule in _RULES.items():
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


def _with_keys(sampling: Sampling) -> tuple[Any, None]:
  key = jax.tree_util.GetAttrKey
  return tuple((key(name), getattr(sampling, name)) for name in _FIELDS), None


def _unflattened(_: None, leaves: Any) -> Sampling:
  """Settings whose leaves may be anything, such as shapes; none is checked."""
  sampling = object.__new__(Sampling)
  for name, leaf in zip(_FIELDS, leaves, strict=True):
    object.__setattr__(sampling, name, leaf)
  return sampling


# `register_dataclass` would call the constructor, which checks values.
jax.tree_util.register_pytree_with_keys(Sampling, _with_keys, _unflattened)


class _Rule(NamedTuple):
  """What the numbers of a field must be.

  Attributes:
    dtype: as which they are stored.
    fits: takes an array of them, and says which are allowed.
    wanted: what they must be, for the message.
    neutral: the number that is as if the field were None.
    fill: what a row without a sequence has.
  """

  dtype: Any
  fits: Callable[[Any], Any]
  wanted: str
  neutral: float
  fill: float


def _numbers(wanted: str, fits: Callable[[Any], Any], neutral: float) -> _Rule:
  return _Rule(jnp.float32, fits, wanted, neutral, neutral)


def _counts(wanted: str, least: int, neutral: int) -> _Rule:
  return _Rule(jnp.int32, lambda x: x >= least, wanted, neutral, neutral)


_RULES = {
  # A row without a sequence is greedy, so it costs no random number.
  "temperature": _numbers(
    RANGE,
    lambda x: (x == 0) | ((x >= LEAST) & (x <= HIGHEST)),
    1,
  )._replace(fill=0),
  "top_k": _counts("at least 1, or 0 or -1 for all tokens", -1, 0),
  "top_p": _numbers("above 0 and at most 1", lambda x: (x > 0) & (x <= 1), 1),
  "min_p": _numbers("0 .. 1", lambda x: (x >= 0) & (x <= 1), 0),
  "presence_penalty": _numbers("finite", np.isfinite, 0),
  "frequency_penalty": _numbers("finite", np.isfinite, 0),
  "repetition_penalty": _numbers(
    f"a finite float32 of at least {LEAST:.2g}",
    lambda x: (x >= LEAST) & (x <= _MOST),
    1,
  ),
  "min_tokens": _counts("at least 0", 0, 0),
  "max_tokens": _counts("at least 1", 1, _ENDLESS),
  "seed": _counts("an int32", -(2**31), -1),
}


def as_sampling(sampling: Sampling | None, total: int) -> Sampling:
  """The settings of Q sequences, as arrays of their own.

  Traced values are not checked.

  Args:
    sampling: as the caller wrote it; None for none.
    total: Q, the number of sequences.

  Raises:
    TypeError: `sampling` is something else, or a field holds values of another
      kind.
    ValueError: a field has another number of entries, or a value that is not
      allowed.

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
  for name, rule in _RULES.items():
    value = getattr(sampling, name)
    fields[name] = None if value is None else _column(name, value, total, rule)
  _check_order(fields["min_tokens"], fields["max_tokens"])
  for name, cast in _LISTS.items():
    value = getattr(sampling, name)
    fields[name] = None if value is None else cast(value, total)
  return Sampling(**fields)


def _is_known(value: Any) -> bool:
  return value is not None and not isinstance(value, Tracer)


def _own(value: Any, dtype: Any) -> Array:
  """A copy, because what has the settings may be donated."""
  return jnp.array(value, dtype=dtype, copy=True)


def _as_numbers(name: str, value: Any, rule: _Rule) -> Any:
  """Numbers of the right kind; those on the host are in range."""
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


def _column(name: str, value: Any, total: int, rule: _Rule) -> Array:
  value = _as_numbers(name, value, rule)
  if value.ndim and value.shape != (total,):
    raise ValueError(
      f"`{name}` must have the shape [] or [{total}], one for each sequence, "
      f"got {[*value.shape]}."
    )
  if _is_known(value):
    _check_values(name, np.asarray(value), rule)
  return _own(jnp.broadcast_to(value, (total,)), rule.dtype)


def _check_values(name: str, value: np.ndarray, rule: _Rule) -> None:
  bad = np.flatnonzero(~np.asarray(rule.fits(value)))
  if bad.size:
    label = f"{name}[{bad[0]}]" if value.ndim else name
    found = value.reshape(-1)[bad[0]]
    raise ValueError(f"`{label}` must be {rule.wanted}, got {found}.")


def _check_order(least: Array | None, most: Array | None) -> None:
  if not (_is_known(least) and _is_known(most)):
    return
  low, high = np.asarray(least), np.asarray(most)
  for row in np.flatnonzero(low > high)[:1]:
    raise ValueError(
      f"`min_tokens[{row}]` must be at most `max_tokens[{row}]`, got "
      f"{low[row]} and {high[row]}."
    )


def _is_array(value: Any) -> bool:
  return isinstance(value, np.ndarray | jax.Array)


def _stop_tokens(value: Any, total: int) -> Array:
  name = "stop_tokens"
  if _is_array(value):
    tokens = padding.as_tokens(name, value, total, 2)
  else:
    lists = padding.as_lists(name, value, total, 1)
    tokens = padding.padded_tokens(name, lists)
  return _own(tokens, jnp.int32)


def _bad_words(value: Any, total: int) -> Array:
  name = "bad_words"
  if not _is_array(value):
    lists = padding.as_lists(name, value, total, 2)
    return _own(padding.padded_words(name, lists), jnp.int32)
  words = padding.as_tokens(name, value, total, 3)
  if _is_known(words):
    known = np.asarray(words) >= 0
    if np.any(known[..., :-1] & ~known[..., 1:]):
      raise ValueError(
        f"`{name}` must be padded with {PADDING} in front of each word, got a "
        "word with padding behind a token; use lists of lists."
      )
  return _own(words, jnp.int32)


def _logit_bias(value: Any, total: int) -> LogitBias:
  name = "logit_bias"
  if isinstance(value, LogitBias):
    tokens = padding.as_tokens(f"{name}.tokens", value.tokens, total, 2)
    values = as_real_numbers(f"{name}.values", value.values)
    if values.shape not in (tokens.shape, tokens.shape[1:]):
      raise ValueError(
        f"`{name}.values` must have the shape of `{name}.tokens`, "
        f"{[*tokens.shape]}, got {[*values.shape]}."
      )
  else:
    tokens, values = padding.padded_biases(name, value, total)
  if _is_known(values):
    _check_biases(name, np.asarray(values))
  values = jnp.broadcast_to(values, tokens.shape)
  return LogitBias(
    tokens=_own(tokens, jnp.int32), values=_own(values, jnp.float32)
  )


_LISTS: dict[str, Callable[[Any, int], Any]] = {
  "stop_tokens": _stop_tokens,
  "logit_bias": _logit_bias,
  "bad_words": _bad_words,
}


def _check_biases(name: str, values: np.ndarray) -> None:
  bad = values[np.isnan(values) | (values > _MOST)]
  if bad.size:
    raise ValueError(
      f"`{name}` must have finite numbers, or -inf for tokens that must not be "
      f"drawn, got {bad[0]}."
    )


def rows(sampling: Sampling, numbers: Array) -> Sampling:
  """The settings of the sequences of some rows.

  A row without a sequence is greedy, and nothing else is done to it. Stop
  strings stay as they are.

  Args:
    sampling: from `as_sampling`.
    numbers: int32[R], sequences; any other number for none.

  Examples:
    >>> sampling = as_sampling(Sampling(top_k=[3, 4]), 2)
    >>> rows(sampling, jnp.asarray([1, 2, 0], jnp.int32)).top_k
    Array([4, 0, 3], dtype=int32)
  """

  def take(array: Array | None, fill: Any) -> Array | None:
    return None if array is None else indexing.take(array, numbers, fill=fill)

  fields = {
    name: take(getattr(sampling, name), rule.fill)
    for name, rule in _RULES.items()
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


def put(sampling: Sampling, numbers: Array, new: Sampling) -> Sampling:
  """Gives sequences other settings.

  What the new settings leave out has no effect on these sequences. Stop strings
  stay as they are: the caller selects those of the new sequences. `max_tokens`
  and `seed`, which are used once, when a sequence is made, may be new.

  Args:
    sampling: from `as_sampling`, of Q sequences.
    numbers: int32[R], the sequences, each at most once; any other number for a
      row that changes none.
    new: from `as_sampling`, of R sequences.

  Raises:
    ValueError: `new` has a field that `sampling` does not have, or longer
      lists.

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
      values = _widened(name, values, array.shape[1:], fill)
    return indexing.put(array, numbers, values=values)

  fields = {
    name: write(name, getattr(sampling, name), getattr(new, name), rule.neutral)
    for name, rule in _RULES.items()
  }
  for name in ("stop_tokens", "bad_words"):
    fields[name] = write(
      name, getattr(sampling, name), getattr(new, name), PADDING
    )
  bias = sampling.logit_bias
  more = new.logit_bias or LogitBias(tokens=None, values=None)
  if bias is not None:
    bias = LogitBias(
      tokens=write("logit_bias", bias.tokens, more.tokens, PADDING),
      values=write("logit_bias", bias.values, more.values, 0),
    )
  return dataclasses.replace(sampling, logit_bias=bias, **fields)


def _check_fields(sampling: Sampling, new: Sampling) -> None:
  for field in dataclasses.fields(Sampling):
    name = field.name
    there, given = getattr(sampling, name), getattr(new, name)
    if there is None and given is not None and name not in _USED_ONCE:
      raise ValueError(
        f"`sampling.{name}` must be None, because it was None when the rollout "
        "was made, and is not compiled; give it there, too."
      )


def _widened(
  name: str, values: Array, sizes: tuple[int, ...], fill: float
) -> Array:
  """Padded at the end to as many entries, and words to as many tokens."""
  if any(own > most for own, most in zip(values.shape[1:], sizes, strict=True)):
    raise ValueError(
      f"`sampling.{name}` must have at most {[*sizes]} entries for a sequence, "
      f"as when the rollout was made, got {[*values.shape[1:]]}; give longer "
      "lists there."
    )
  missing = [
    most - own for own, most in zip(values.shape[1:], sizes, strict=True)
  ]
  # Words stand at the end of their tokens.
  padding = [(0, 0), *((0, count) for count in missing[:1])]
  padding += [(count, 0) for count in missing[1:]]
  return jnp.pad(values, padding, constant_values=fill)
