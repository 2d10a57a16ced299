"""grouped: reshapes results into prompts and their samples."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.arrays.arguments import as_int
from jaxkv._src.arrays.arguments import check_type
from jaxkv._src.engine.queue.queue import NOT_SAMPLED
from jaxkv._src.engine.results.generated import Generated
from jaxkv._src.engine.results.generated import Harvested
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.sampling.statistics import Records


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouped:
  """N prompts of up to P tokens, and G samples of each, of up to R tokens.

  A sample has all tokens after the prompt, including those of `extend`. All
  arrays [N, G, R] are aligned with `completions`.

  Attributes:
    prompts: the prompt of each group; then 0.  # int32[N, P]
    prompt_lengths: the length of each prompt, even if it exceeds P; 0 for a
      group without samples; -1 for a group whose samples have different
      prompts.  # int32[N]
    completions: the samples; then 0.  # int32[N, G, R]
    completion_lengths: the length of each sample, even if it exceeds R; 0 for a
      row without a sample.  # int32[N, G]
    mask: True for sampled tokens.  # bool[N, G, R]
    log_probs: see `Generated`.  # float32[N, G, R]
    versions: see `Generated`.  # int32[N, G, R]
    records: see `Generated`.
    experts: the experts of prompts and those of completions, see `Generated`.
      A token of a prompt has those of the first sample that computed it.
      # int16 or int32[N, P, J, k], [N, G, R, J, k]
  """

  prompts: Array
  prompt_lengths: Array
  completions: Array
  completion_lengths: Array
  mask: Array
  log_probs: Array
  versions: Array
  records: Records
  experts: tuple[Array, Array] | None


def grouped(
  results: Generated,
  *,
  num_samples: int | None = None,
  prompt_columns: int | None = None,
  completion_columns: int | None = None,
) -> Grouped:
  """Reshapes results into prompts and samples that begin in column 0.

  The first four fields of the result are arguments of
  `jaxkv.models.grouped_log_probs`, which computes each prompt once.

  A prompt or sample that does not fit is cut, but keeps its length. The whole
  group then gets NaN from `grouped_log_probs`. A loss can mask such groups:

    fits = (out.prompt_lengths <= prompt_columns) & jnp.all(
      out.completion_lengths <= completion_columns, axis=1
    )
    mask = out.mask & fits[:, None, None]

  All sequences of a group must have the same prompt. Under `jax.jit`, where
  this is not checked, a group with different prompts gets the prompt length -1,
  for which `grouped_log_probs` returns NaN, and `score` BAD_LENGTH.

  Args:
    results: from `generated(state)`, or the `results` of `harvest` without
      `ids`; all rows, in order.
    num_samples: static; G; None for `RolloutConfig.num_samples`.
    prompt_columns: static; P; None for W - 1 if `RolloutConfig.max_length` is
      set, else for the columns of the prompts of `init`.
    completion_columns: static; R; None for W - 1 if
      `RolloutConfig.max_length` is set, because `extend` can have added tokens,
      else for `RolloutConfig.max_new_tokens`.

  Raises:
    TypeError: `results` is not a `Generated`, or a number is not an int.
    ValueError: G does not divide the number of rows, a number of columns is not
      in 1 .. W, or, outside of `jax.jit`, a group has different prompts.

  Examples:
    >>> import jaxkv
    >>> from jaxkv import models
    >>> from jaxkv import rollout
    >>> config = models.llama(vocab_size=11, num_layers=1, embed_dim=8,
    ...                       num_heads=2, num_kv_heads=1, head_dim=4,
    ...                       mlp_dim=16)
    >>> params = models.init_params(jax.random.key(0), config)
    >>> sizes = jaxkv.CacheConfig(
    ...   num_pages=17, page_size=4, num_slots=4, pages_per_slot=4
    ... )
    >>> state = rollout.init(
    ...   jaxkv.init(sizes), models.init_kv(config, sizes),
    ...   rollout.Requests([[3, 1, 4], [5, 0, 0]], [3, 1]), jax.random.key(1),
    ...   rollout.RolloutConfig(num_samples=2, max_new_tokens=4),
    ... )
    >>> state = rollout.generate(
    ...   params, state, model=functools.partial(models.forward, config=config)
    ... )
    >>> out = grouped(rollout.generated(state))
    >>> log_probs = models.grouped_log_probs(
    ...   params, out.prompts, out.prompt_lengths, out.completions,
    ...   out.completion_lengths, config=config,
    ... )
    >>> log_probs.shape, out.mask.shape
    ((2, 2, 4), (2, 2, 4))
    >>> bool(jnp.allclose(log_probs, out.log_probs, atol=1e-5))
    True
  """
  _check_results(results)
  rows, width = results.tokens.shape
  config = results.config
  if num_samples is None:
    num_samples = config.num_samples
  if prompt_columns is None:
    new_tokens = 1 if config.max_length else config.max_new_tokens
    prompt_columns = width - new_tokens
  if completion_columns is None:
    completion_columns = width - 1
    if not config.max_length:
      completion_columns = config.max_new_tokens
  num_samples = as_count("num_samples", num_samples, 1)
  if rows % num_samples:
    raise ValueError(
      f"`num_samples` must divide the {rows} sequences of results, got "
      f"{num_samples}; give RolloutConfig.num_samples, and all rows."
    )
  widths = (
    _as_columns("prompt_columns", prompt_columns, width),
    _as_columns("completion_columns", completion_columns, width),
  )
  out, differs = _grouped(results, num_samples, *widths)
  if not isinstance(differs, Tracer) and differs.is_fully_addressable:
    _check_prompts(np.asarray(differs), num_samples)
  return out


def _check_results(results: Any) -> None:
  """Raises TypeError unless `results` is a `Generated`."""
  hint = "give generated(state), or the `results` that harvest returns"
  if isinstance(results, RolloutState):
    hint = "give generated(state)"
  elif isinstance(results, Harvested):
    hint = "give its `.results`"
  check_type("results", results, Generated, "a Generated", hint)


def _as_columns(name: str, columns: Any, width: int) -> int:
  """Returns `columns` as an int; raises unless it is in 1 .. `width`."""
  columns = as_int(name, columns)
  if not 1 <= columns <= width:
    raise ValueError(
      f"`{name}` must be 1 .. {width}, the columns of results, got {columns}."
    )
  return columns


def _check_prompts(differs: np.ndarray, num_samples: int) -> None:
  """Raises ValueError if `differs` is True for a row."""
  if differs.any():
    row = int(differs.argmax())
    raise ValueError(
      "`num_samples` must be the number of samples of each prompt, got "
      f"{num_samples}: sequence {row} has another prompt than the first one of "
      "its group; give RolloutConfig.num_samples, and all rows in their order."
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _grouped(
  results: Generated, num_samples: int, prompt_width: int, width: int
) -> tuple[Grouped, Array]:
  """Returns the groups; and bool[Q], rows whose prompt is not their group's."""
  prompt_lengths = results.prompt_lengths
  real = jnp.arange(width, dtype=jnp.int32)[None]
  real = real < (results.lengths - prompt_lengths)[:, None]
  # Rows without a sequence have no prompt, so `first_rows` are valid rows.
  valid = results.valid.reshape(-1, num_samples)
  group = jnp.arange(valid.shape[0], dtype=jnp.int32) * num_samples
  first_rows = group + jnp.argmax(valid, axis=1).astype(jnp.int32)
  lengths = prompt_lengths.at[first_rows].get(mode="clip")
  differs = _differs(results, jnp.repeat(first_rows, num_samples))
  mixed = jnp.any(differs.reshape(valid.shape), axis=1)
  in_prompt = jnp.arange(prompt_width, dtype=jnp.int32)[None]
  in_prompt = in_prompt < lengths[:, None]

  def samples(values: Array, fill: Any = 0) -> Array:
    """Converts [Q, W, ...] to [N, G, R, ...]."""
    columns = prompt_lengths[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    row = jnp.arange(columns.shape[0], dtype=jnp.int32)[:, None]
    selected = values.at[row, columns].get(mode="clip")
    selected = _where(real, selected, fill)
    return selected.reshape(-1, num_samples, width, *values.shape[2:])

  def prompts(values: Array, fill: Any = 0) -> Array:
    """Converts [Q, W, ...] to [N, P, ...]."""
    selected = values.at[first_rows, :prompt_width].get(mode="clip")
    return _where(in_prompt, selected, fill)

  def prompt_experts(experts: Array) -> Array:
    """Converts [Q, W, J, k] to [N, P, J, k]."""
    # A sample that never ran has no ids, so each token has those of the first
    # sample that has them.
    has_ids = experts[:, :prompt_width, 0, 0] >= 0
    has_ids = has_ids.reshape(-1, num_samples, prompt_width)
    row = group[:, None] + jnp.argmax(has_ids, axis=1).astype(jnp.int32)
    column = jnp.arange(prompt_width, dtype=jnp.int32)[None]
    return _where(in_prompt, experts.at[row, column].get(mode="clip"), -1)

  experts = results.experts
  out = Grouped(
    prompts=prompts(results.tokens),
    prompt_lengths=jnp.where(mixed, -1, lengths),
    completions=samples(results.tokens),
    completion_lengths=(results.lengths - prompt_lengths).reshape(
      -1, num_samples
    ),
    mask=samples(results.mask, False),
    log_probs=samples(results.log_probs),
    versions=samples(results.versions, NOT_SAMPLED),
    records=jax.tree.map(samples, results.records),
    experts=None
    if experts is None
    else (prompt_experts(experts), samples(experts, -1)),
  )
  return out, differs


def _differs(results: Generated, first_rows: Array) -> Array:
  """Returns bool[Q], True if a prompt differs from that of row `first_rows`."""
  prompt_lengths = results.prompt_lengths
  tokens = results.tokens
  column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
  is_other = tokens != tokens.at[first_rows].get(mode="clip")
  differs = jnp.any(is_other & (column < prompt_lengths[:, None]), axis=1)
  differs |= prompt_lengths != prompt_lengths.at[first_rows].get(mode="clip")
  return differs & results.valid


def _where(real: Array, values: Array, fill: Any) -> Array:
  """Returns values [X, Y, ...] where `real` [X, Y] is True, else `fill`."""
  real = real.reshape(*real.shape, *(1,) * (values.ndim - 2))
  return jnp.where(real, values, jnp.array(fill, values.dtype))
