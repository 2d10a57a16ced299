"""Requests: prompts, and the settings of their samples."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.arrays.arguments import as_key
from jaxkv._src.arrays.arguments import check_shape
from jaxkv._src.arrays.arguments import check_type
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.sampling.settings import Sampling
from jaxkv._src.sampling.settings import as_sampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Requests:
  """P prompts, and the settings of their P * G samples.

  G is `RolloutConfig.num_samples`. In arrays with a row for each sample, sample
  g of prompt p has row p * G + g. `init` and `submit` check the values.

  Attributes:
    tokens: the prompts, padded at the end.  # int32[P, L]
    lengths: the length of each prompt, 1 .. L.  # int32[P]
    sampling: settings of each sample. `submit` can set `max_tokens`, `seed` and
      the fields that `init` has set; other fields are not compiled.
    num_samples: the number of samples of each prompt, 0 .. G in `init` and
      1 .. G in `submit`; None for G.  # int32[P]
    priority: lower numbers are admitted first and preempted last; None for
      equal priorities. If pages are scarce, up to `RolloutConfig.max_overtaken`
      later sequences that need fewer pages may still be admitted first. With
      negated expected lengths as priorities, the longest sequences start first,
      which keeps slots busy to the end.  # int32[P * G]
    log_probs_from: the position from which log-probs of given tokens, those of
      the prompt and of `extend`, are recorded. A first token has no log-prob,
      so 0 and 1 record all others. They are the log-probs at temperature 1, and
      are recorded with the entropy and the most likely tokens if
      `RolloutConfig` says so. A cached prefix ends before this position, except
      for tokens that were already computed for the sequence. After a change of
      weights, some values may be of old weights. A position past the given
      tokens records none; None for no log-probs of given tokens in the whole
      rollout.  # int32[P]
    salts: see `jaxkv.salt`. Samples with different salts, such as those of
      different adapters, share no pages. The salt of an adapter must depend on
      its contents, see the recipe there. None for no salts.
      # uint32[P * G, 4]
    extra: values of each sample for `process` and the model, a pytree of arrays
      [P * G, ...]; None for no values.

  Examples:
    >>> from jaxkv import rollout
    >>> rollout.Requests([[3, 1, 4], [1, 5, 0]], [3, 2]).lengths
    [3, 2]
  """

  tokens: Any
  lengths: Any
  _: dataclasses.KW_ONLY
  sampling: Sampling | None = None
  num_samples: Any = None
  priority: Any = None
  log_probs_from: Any = None
  salts: Any = None
  extra: Any = None


def as_requests(requests: Any, config: RolloutConfig) -> Requests:
  """Returns requests whose fields are arrays of the documented shapes."""
  hint = "make one with jaxkv.rollout.Requests(tokens, lengths)"
  check_type("requests", requests, Requests, "a Requests", hint)
  tokens = as_int32("requests.tokens", requests.tokens, ("P", "L"))
  num_prompts = tokens.shape[0]
  per_prompt = ", one for each prompt"
  per_sample = ", one for each sample"
  lengths = as_int32(
    "requests.lengths", requests.lengths, (num_prompts,), per_prompt
  )
  num_sequences = num_prompts * config.num_samples
  if num_sequences >= 2**31:
    raise ValueError(
      "`RolloutConfig.num_samples` times the prompts must be below 2**31, got "
      f"{config.num_samples} times {num_prompts}; use fewer of either."
    )
  num_samples = requests.num_samples
  priority = requests.priority
  if num_samples is not None:
    num_samples = as_int32(
      "requests.num_samples", num_samples, (num_prompts,), per_prompt
    )
  if priority is not None:
    priority = jnp.asarray(
      as_int32("requests.priority", priority, (num_sequences,), per_sample)
    )
  log_probs_from = requests.log_probs_from
  if log_probs_from is None and not config.max_new_tokens:
    raise ValueError(
      "`RolloutConfig.max_new_tokens` must be at least 1 for requests without "
      "`log_probs_from`, got 0; nothing would be recorded."
    )
  if log_probs_from is not None:
    log_probs_from = as_int32(
      "requests.log_probs_from", log_probs_from, (num_prompts,), per_prompt
    )
  salts = requests.salts
  if salts is not None:
    salts = jnp.asarray(as_key("requests.salts", salts))
    shape = (num_sequences, hashing.KEY_WORDS)
    check_shape("requests.salts", salts, shape, per_sample)
  sampling = as_sampling(requests.sampling, num_sequences)
  strings = sampling.stop_strings
  if strings is not None:
    # A start state for each sample, because `submit` writes rows of the queue.
    strings = dataclasses.replace(strings, start=strings.init(num_sequences))
    sampling = dataclasses.replace(sampling, stop_strings=strings)
  return Requests(
    tokens,
    lengths,
    sampling=sampling,
    num_samples=num_samples,
    priority=priority,
    log_probs_from=log_probs_from,
    salts=salts,
    extra=as_extra("requests.extra", requests.extra, num_sequences),
  )


def map_rows(
  of_prompts: Callable[..., Any],
  of_samples: Callable[..., Any],
  requests: Requests,
  *others: Requests,
) -> Requests:
  """Maps functions over the arrays of requests, as `jax.tree.map` does.

  `of_prompts` is applied to arrays with a row for each prompt, and `of_samples`
  to those with a row for each sample. The result has the tables of stop strings
  of `requests`, unchanged.
  """

  def mapped(path: Any, array: Any, *other_arrays: Any) -> Any:
    name = jax.tree_util.keystr(path)
    if name in (".tokens", ".lengths", ".num_samples", ".log_probs_from"):
      return of_prompts(array, *other_arrays)
    strings = ".sampling.stop_strings."
    if name.startswith(strings) and name != f"{strings}start":
      return array
    return of_samples(array, *other_arrays)

  return jax.tree_util.tree_map_with_path(mapped, requests, *others)


def take_prompts(
  requests: Requests, rows: np.ndarray, samples: int
) -> Requests:
  """Returns copies of the prompts in rows, which have G `samples` each."""
  of_samples = (rows[:, None] * samples + np.arange(samples)).reshape(-1)
  return map_rows(
    lambda array: np.asarray(array)[rows],
    lambda array: np.asarray(array)[of_samples],
    requests,
  )


def as_extra(name: str, extra: Any, rows: int) -> Any:
  """Returns `extra` as arrays with `rows` rows each, or raises ValueError."""

  def checked(path: Any, leaf: Any) -> Array:
    array = jnp.asarray(leaf)
    if array.shape[:1] != (rows,):
      raise ValueError(
        f"`{name}{jax.tree_util.keystr(path)}` must have the shape [{rows}, "
        f"...], got {list(array.shape)}; give it a row for each sample, or for "
        "each prompt in `score`."
      )
    return array

  return jax.tree_util.tree_map_with_path(checked, extra)


def check_extra(extra: Any, expected: Any, origin: str) -> None:
  """Raises ValueError unless `extra` has the tree and rows of earlier values.

  `origin` is the phrase that says where `expected`, the earlier values, were
  given.
  """
  new_shapes, old_shapes = (
    jax.tree.map(lambda leaf: (leaf.shape[1:], leaf.dtype), tree)
    for tree in (extra, expected)
  )
  if old_shapes != new_shapes:
    raise ValueError(
      "`requests.extra` must have the tree, row shapes and dtypes that it had "
      f"{origin}, {old_shapes}, got {new_shapes}."
    )


def check_stop_strings(strings: Any, expected: Any, origin: str) -> None:
  """Raises ValueError unless two `StopStrings` have equal automata.

  Both may be None. Automata that are traced, or on devices of other processes,
  are compared by their shapes alone. `origin` is as in `check_extra`.
  """
  new_tables, old_tables = (
    () if tree is None else (tree.next, tree.ends)
    for tree in (strings, expected)
  )
  for new_table, old_table in zip(new_tables, old_tables, strict=True):
    if new_table is old_table:
      continue
    is_equal = new_table.shape == old_table.shape
    if is_equal and _is_readable(new_table) and _is_readable(old_table):
      is_equal = np.array_equal(new_table, old_table)
    if not is_equal:
      raise ValueError(
        "`requests.sampling.stop_strings` must have the automata of those "
        f"{origin}, got others; make one StopStrings with the strings of all "
        "sequences, and select from it with StopStrings.select."
      )


def check_tokens(
  name: str,
  tokens: Any,
  lengths: Any,
  *,
  vocab_size: int | None = None,
  mask: Any = True,
) -> None:
  """Raises ValueError if a token is not in the vocabulary.

  Tokens [..., T] at or behind `lengths` [...] are padding, and rows where
  `mask` [...] is False are not checked. Neither are values that are traced, or
  on devices of other processes. If `vocab_size` is None, only negative tokens
  are refused.
  """
  if not all(map(_is_readable, (tokens, lengths, mask))):
    return
  tokens = np.asarray(tokens)
  lengths = np.where(mask, lengths, 0)
  column = np.arange(tokens.shape[-1]).reshape((1,) * lengths.ndim + (-1,))
  real_tokens = tokens[column < lengths[..., None]]
  if not real_tokens.size:
    return
  lowest = int(real_tokens.min())
  highest = int(real_tokens.max())
  if lowest < 0:
    raise ValueError(
      f"`{name}` must be tokens of at least 0, got {lowest}; the model has no "
      "embedding for it. Check the tokenizer and the lengths."
    )
  if vocab_size is not None and highest >= vocab_size:
    raise ValueError(
      f"`{name}` must be tokens below {vocab_size}, the size of the model's "
      f"vocabulary, got {highest}; check that the tokenizer is the model's."
    )


def _is_readable(array: Any) -> bool:
  """Returns True if this process has the values of an array."""
  if isinstance(array, Tracer):
    return False
  return not isinstance(array, Array) or array.is_fully_addressable


def width_of(columns: int, config: RolloutConfig) -> int:
  """Returns W for prompts of `columns` tokens; raises if W is too small."""
  width = config.max_length or columns + config.max_new_tokens
  check_columns(columns, width, config)
  return width


def check_columns(columns: int, width: int, config: RolloutConfig) -> None:
  """Raises ValueError unless prompts leave room in W = `width` columns."""
  # Without new tokens, a prompt may fill the width.
  most_columns = width - (config.max_new_tokens > 0)
  if columns > most_columns:
    raise ValueError(
      f"`requests.tokens` must have at most {most_columns} columns, got "
      f"{columns}; raise RolloutConfig.max_length, or cut the prompts."
    )


def check_num_samples(
  requests: Requests, config: RolloutConfig, *, least: int = 0
) -> None:
  """Raises ValueError if a concrete number of samples is not `least` .. G."""
  counts = requests.num_samples
  maximum = config.num_samples
  if counts is None or isinstance(counts, Tracer):
    return
  for row, count in enumerate(np.asarray(counts).tolist()):
    if not least <= count <= maximum:
      raise ValueError(
        f"`requests.num_samples[{row}]` must be {least} .. {maximum}, got "
        f"{count}; raise RolloutConfig.num_samples for more."
      )


def check_fits(
  requests: Requests, cache_config: CacheConfig, config: RolloutConfig
) -> None:
  """Raises ValueError unless the sequences fit into slots, rows and the pool.

  If `lengths`, `num_samples` or `max_tokens` is traced, only W is checked.
  """
  columns = requests.tokens.shape[1]
  width = width_of(columns, config)
  if width > cache_config.slot_tokens:
    name = "`requests.tokens` and `max_new_tokens`"
    width_text = f"{columns} columns and {width - columns}"
    if config.max_length:
      name = "`RolloutConfig.max_length`"
      width_text = str(width)
    raise ValueError(
      f"{name} must fit a slot of {cache_config.slot_tokens} tokens, got "
      f"{width_text}; raise CacheConfig.pages_per_slot."
    )
  sampling = requests.sampling
  assert sampling is not None  # `as_requests` sets it.
  limits = requests.lengths, requests.num_samples, sampling.max_tokens
  if any(isinstance(limit, Tracer) for limit in limits):
    return
  longest = _longest(requests, sampling, config)
  if longest > width:
    raise ValueError(
      f"`RolloutConfig.max_length` must be at least {longest}, the length that "
      f"a sequence can reach, got {width}."
    )
  most_in_flight = config.prefill_chunk + config.decode_steps - 1
  by_group = cache_config.sizes.max_pages(most_in_flight, longest)
  needed = tuple(
    1 + sum(by_group[group] for group in groups)
    for groups in cache_config.groups_of_pools
  )
  pairs = zip(needed, cache_config.numbers.sizes, strict=True)
  if longest and any(count > size for count, size in pairs):
    min_pages = needed if cache_config.num_pools > 1 else max(needed)
    raise ValueError(
      f"`CacheConfig.num_pages` must be at least {min_pages} for the longest "
      f"sequence of {longest} tokens, got {cache_config.num_pages}."
    )


def check_lengths(requests: Requests) -> np.ndarray:
  """Raises ValueError unless prompts with samples have 1 .. L tokens.

  Returns:
    bool[P], True for prompts with samples; the others may have any length.
  """
  # NumPy, because inside a trace jnp would trace even concrete arrays.
  lengths = np.asarray(requests.lengths)
  columns = requests.tokens.shape[1]
  exists = np.full(lengths.shape, True)
  if requests.num_samples is not None:
    exists = np.asarray(requests.num_samples) > 0
  for row in np.flatnonzero(exists).tolist():
    if not 1 <= lengths[row] <= columns:
      raise ValueError(
        f"`requests.lengths[{row}]` must be 1 .. {columns}, the tokens of a "
        f"prompt, got {lengths[row]}."
      )
  return exists


def _longest(
  requests: Requests, sampling: Sampling, config: RolloutConfig
) -> int:
  """Returns the maximum length that a sequence can reach; checks lengths."""
  exists = check_lengths(requests)
  lengths = np.asarray(requests.lengths)
  budget = np.full(lengths.shape, config.max_new_tokens)
  if sampling.max_tokens is not None:
    limits = np.asarray(sampling.max_tokens).reshape(-1, config.num_samples)
    budget = np.minimum(budget, limits.max(axis=1))
  return int((lengths + budget)[exists].max(initial=0))
