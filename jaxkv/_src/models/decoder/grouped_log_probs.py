"""Log-probs of completions with shared prompts, for training."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.arrays import arguments
from jaxkv._src.models.decoder import expert_records
from jaxkv._src.models.decoder import log_probs
from jaxkv._src.models.decoder import logits
from jaxkv._src.models.decoder import prompt_tree
from jaxkv._src.models.decoder import stack
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import check_decoder
from jaxkv._src.models.decoder.exact_trainer import uncached_access
from jaxkv._src.models.decoder.params import Params
from jaxkv._src.sampling.temperature import as_temperature
from jaxkv._src.sampling.temperature import divisor

Levels = jax.Array | tuple[jax.Array, ...]
"""One array for all completions, or a tuple of arrays, one per tree level."""


def grouped_log_probs(
  params: Params,
  prompts: jax.Array,
  prompt_lengths: jax.Array,
  completions: Levels,
  completion_lengths: Levels,
  *,
  config: Decoder,
  temperature: float | jax.Array = 1.0,
  experts: tuple[jax.Array, Levels] | None = None,
  remat: bool = False,
  kv_dtype: Any = None,
) -> Any:
  """Computes log-probs of completions that share prompts.

  Up to rounding, the result equals the log-probs from `forward_uncached` for
  each prompt followed by each of its completions. But each prompt is computed
  only once, forward and backward, and logits are computed in chunks and only
  for tokens of completions. With exact numerics, gradients exist only in
  reverse mode. To score a sequence without a prompt, pass its first token as
  the prompt. Letters: N prompts of up to P tokens, with G completions of up to
  R tokens; J layers with experts, k experts per token in each such layer.

  Completions can form a tree, such as the turns of a tree search. Then
  `completions` is a tuple of levels: int32[N, G, R], int32[N, G, G', R'],
  int32[N, G, G', G'', R''] and so on. Lengths have the same shapes without the
  last axis. Each of the G branches of the first level has G' continuations at
  the second level. A token attends to itself and to the tokens before it on the
  path from the prompt. Its position is the number of tokens before it.

  On several devices, call it in `jax.shard_map`, with prompts, completions,
  lengths and experts split by N. Then no array is gathered, and exact numerics
  give the same bits as on one device. Under `jit` without `shard_map`, the axes
  of the mesh must be `AxisType.Auto`, because jax raises a ShardingTypeError
  for `Explicit`. Exact numerics then gather the whole batch on each device.

  Args:
    params: parameters as returned by `init_params`.
    prompts: int32[N, P], padded at the end.
    prompt_lengths: int32[N], 1 .. P; 0 for a prompt without completions.
    completions: int32[N, G, R], padded at the end; or a tuple of levels.
    completion_lengths: int32[N, G], 0 .. R, or a tuple of levels. A length of 0
      means no completion.
    config: static; the decoder.
    temperature: divisor of the logits, as in `Sampling`. As in a rollout and in
      `score`, 0 has the effect of 1. A traced temperature out of range gives
      NaN.
    experts: a tuple of the recorded experts of prompts, signed integers
      [N, P, J, k], and those of completions, [N, G, R, J, k] or a tuple of
      levels; see `forward_uncached`.
    remat: static; True to save only each layer's input for the backward pass,
      which then recomputes the layer. This needs less memory and up to a third
      more time.
    kv_dtype: static; see `forward_uncached`.

  Returns:
    float32[N, G, R], or a tuple of levels: the log-prob of each token given all
    tokens before it, and 0 past the lengths. If the length of a prompt or of
    one of its completions is out of range, all completions of the prompt get
    NaN. `mask & ~jnp.isnan(log_probs)` excludes these completions from a loss
    and its gradient. A token outside the vocabulary gets NaN, and so can other
    tokens of its completion and all continuations. It makes all gradients NaN,
    even if a mask excludes it.

  Raises:
    TypeError: an argument has the wrong type, such as tokens that are floats.
    ValueError: a shape is wrong, `experts` is given for a decoder without
      experts, `kv_dtype` is given without exact numerics, or the temperature is
      out of range.

  Examples:
    Two completions of a prompt, of 2 and of 3 tokens:

    >>> import jax, jax.numpy as jnp
    >>> from jaxkv import models
    >>> config = models.llama(vocab_size=11, num_layers=2, embed_dim=8,
    ...                       num_heads=4, num_kv_heads=2, head_dim=2,
    ...                       mlp_dim=16)
    >>> params = models.init_params(jax.random.key(0), config)
    >>> prompts, completions = jnp.array([[3, 1]]), jnp.array([[[4, 1, 0],
    ...                                                         [5, 9, 2]]])
    >>> lengths = jnp.array([2]), jnp.array([[2, 3]])
    >>> log_probs = grouped_log_probs(
    ...   params, prompts, lengths[0], completions, lengths[1], config=config
    ... )
    >>> log_probs.shape, (log_probs < 0).tolist()
    ((1, 2, 3), [[[True, True, False], [True, True, True]]])
    >>> logits = models.forward_uncached(
    ...   params, jnp.array([[3, 1, 5, 9, 2]]), jnp.arange(5)[None],
    ...   config=config)
    >>> plain = jax.nn.log_softmax(logits)[0, jnp.array([1, 2, 3]),
    ...                                    jnp.array([5, 9, 2])]
    >>> bool(jnp.allclose(log_probs[0, 1], plain, atol=1e-5))
    True

    A tree: the first completion has one continuation, the second has two:

    >>> turns = jnp.array([[[[7, 7], [0, 0]], [[2, 0], [8, 3]]]])
    >>> tree = grouped_log_probs(
    ...   params, prompts, lengths[0], (completions, turns),
    ...   (lengths[1], jnp.array([[[2, 0], [1, 2]]])), config=config,
    ... )
    >>> [level.shape for level in tree]
    [(1, 2, 3), (1, 2, 2, 2)]
  """
  check_decoder("config", config)
  is_array = not isinstance(completions, tuple)
  levels, lengths = _checked_levels(
    (prompts, *_levels(completions)),
    (prompt_lengths, *_levels(completion_lengths)),
  )
  # The temperature is checked here, because the jitted function traces it.
  temperature = divisor(as_temperature(temperature))
  records = _checked_experts(experts, levels, config)
  out = _log_probs_of_levels(
    params,
    levels,
    lengths,
    temperature,
    records,
    config=config,
    remat=bool(remat),
    kv_dtype=kv_dtype,
  )
  return out[0] if is_array else out


def _levels(values: Levels) -> tuple[jax.Array, ...]:
  return values if isinstance(values, tuple) else (values,)


@functools.partial(jax.jit, static_argnames=("config", "remat", "kv_dtype"))
def _log_probs_of_levels(
  params: Params,
  levels: tuple[jax.Array, ...],
  lengths: tuple[jax.Array, ...],
  temperature: jax.Array,
  experts: tuple[jax.Array, ...] | None,
  *,
  config: Decoder,
  remat: bool,
  kv_dtype: Any,
) -> tuple[jax.Array, ...]:
  """Computes `grouped_log_probs` from checked arrays, one for each level."""
  logits.check_params(params, config)
  widths = [level.shape[-1] for level in levels]
  lengths = tuple(_flat(length, 0) for length in lengths)
  is_valid = _lengths_fit(lengths, widths)
  # Lengths out of range become 0 and padding becomes token 0, so that neither
  # produces NaN. A mask on the result would not suffice for gradients, because
  # it multiplies them by 0, and 0 * NaN is NaN.
  lengths = tuple(jnp.where(is_valid[:, None], x, 0) for x in lengths)
  tokens = _padded([_flat(level, 1) for level in levels], lengths, 0)
  records = None
  if experts is not None:
    records = _padded([_flat(level, 3) for level in experts], lengths, -1)
  # The tree omits the last column of the last level, which predicts no token.
  tree = prompt_tree.of_lengths([*widths[:-1], max(widths[-1] - 1, 1)], lengths)
  rows = None if records is None else tree.join(records)
  access = uncached_access(config, tree, rows, kv_dtype)
  row = tree.join(tokens)
  positions = tree.join(tree.positions())
  x, _ = stack.run(params, row, positions, (), access, config, remat=remat)
  outs = _head_of_levels(params, x, tokens, tree, temperature, config)
  outs = _padded(outs, lengths[1:], 0)
  return tuple(
    jnp.where(is_valid[:, None, None], out, jnp.nan).reshape(level.shape)
    for out, level in zip(outs, levels[1:], strict=True)
  )


def _head_of_levels(
  params: Params,
  x: jax.Array,
  tokens: list[jax.Array],
  tree: prompt_tree.Tree,
  temperature: jax.Array,
  config: Decoder,
) -> list[jax.Array]:
  """Computes log-probs [N, C_l, R_l] of all completions from x [N, T, E]."""
  outs = []
  for level, targets in enumerate(tokens[1:], 1):
    # The last token of a parent predicts the first token of each child, so its
    # logits are computed once for all children.
    last_column = tree.last(level - 1)
    inputs = jnp.take_along_axis(x, last_column[..., None], axis=1, mode="clip")
    children = targets[..., 0].reshape(*last_column.shape, -1)
    first_log_probs = log_probs.of_tokens(
      params, inputs, children, temperature, config
    )
    inputs = tree.split(x)[level][:, :, : targets.shape[2] - 1]
    successors = targets[..., 1:, None]
    later_log_probs = log_probs.of_tokens(
      params, inputs, successors, temperature, config
    )
    first_log_probs = first_log_probs.reshape(*targets.shape[:2], 1)
    outs.append(
      jnp.concatenate([first_log_probs, later_log_probs[..., 0]], axis=2)
    )
  return outs


def _padded(
  levels: list[jax.Array], lengths: tuple[jax.Array, ...], fill: int
) -> list[jax.Array]:
  """Replaces values past the lengths in levels [N, C, R, ...] by `fill`."""
  padded = []
  for level, length in zip(levels, lengths, strict=True):
    mask = prompt_tree.columns(level.shape[2]) < length[..., None]
    mask = mask.reshape(*mask.shape, *(1,) * (level.ndim - 3))
    padded.append(jnp.where(mask, level, jnp.array(fill, level.dtype)))
  return padded


def _flat(values: jax.Array, dims: int) -> jax.Array:
  """Merges the axes between the first axis and the last `dims` axes."""
  last_axes = values.shape[values.ndim - dims :]
  return values.reshape(values.shape[0], -1, *last_axes)


def _lengths_fit(
  lengths: tuple[jax.Array, ...], widths: list[int]
) -> jax.Array:
  """Returns bool[N]: True for a prompt whose lengths are all in range."""
  fits = True
  for length, width in zip(lengths, widths, strict=True):
    fits &= jnp.all((length >= 0) & (length <= width), axis=1)
    # Nothing predicts the first token after an empty prompt, so all completions
    # of an empty prompt must be empty.
    fits &= (lengths[0][:, 0] > 0) | jnp.all(length == 0, axis=1)
  return jnp.asarray(fits)


def _checked_levels(
  tokens: tuple[Any, ...], lengths: tuple[Any, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
  """Checks prompts, completions and lengths, and converts them to int32."""
  if len(tokens) < 2 or len(tokens) != len(lengths):
    raise ValueError(
      "`completions` and `completion_lengths` must have the same number of "
      f"levels (at least one), got {len(tokens) - 1} and {len(lengths) - 1}."
    )
  # Each level has one more axis than the level above, before the last axis: the
  # branches of one parent.
  shape = ()
  levels = []
  checked_lengths = []
  for level, length in zip(tokens, lengths, strict=True):
    name, axes = ("completions", "GR") if levels else ("prompts", "NP")
    level = arguments.as_int32(name, level, (*shape, *axes))
    shape = level.shape[:-1]
    label = f"{name.removesuffix('s')}_lengths"
    meaning = f", one for each row of {name}"
    levels.append(level)
    checked_lengths.append(arguments.as_int32(label, length, shape, meaning))
  return tuple(levels), tuple(checked_lengths)


def _checked_experts(
  experts: Any, levels: tuple[jax.Array, ...], config: Decoder
) -> tuple[jax.Array, ...] | None:
  """Checks recorded experts, and returns one array per level, prompts first."""
  if experts is None:
    return None
  if not isinstance(experts, tuple) or len(experts) != 2:
    description = arguments.describe(experts)
    if isinstance(experts, tuple | list):
      description = f"a {type(experts).__name__} of {len(experts)}"
    raise TypeError(
      "`experts` must be a tuple, the experts of prompts and of completions, "
      f"got {description}; leave it out to let the router choose."
    )
  records = (experts[0], *_levels(experts[1]))
  if len(records) != len(levels):
    raise ValueError(
      "`experts[1]` must have as many levels as `completions`, "
      f"{len(levels) - 1}, got {len(records) - 1}."
    )
  for record, level in zip(records, levels, strict=True):
    if not isinstance(record, jax.Array | np.ndarray):
      raise TypeError(
        "`experts` must hold arrays, one for prompts and one for each level of "
        f"`completions`, got {arguments.describe(record)}; leave it out to let "
        "the router choose."
      )
    expert_records.check_experts(record, level, config)
  return records
