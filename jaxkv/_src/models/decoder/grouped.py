"""Log-probs of completions that share a prompt, for training."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.arrays import arguments
from jaxkv._src.models.decoder import blocks
from jaxkv._src.models.decoder import log_probs
from jaxkv._src.models.decoder import logits
from jaxkv._src.models.decoder import routing
from jaxkv._src.models.decoder import trees
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.own_pages import memory_within
from jaxkv._src.models.decoder.params import Params
from jaxkv._src.sampling.temperature import as_temperature
from jaxkv._src.sampling.temperature import divisor

Levels = jax.Array | tuple[jax.Array, ...]
"""What is said of completions, or of each level of a tree of them."""


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
  """Log-probs of completions, of which G share a prompt.

  Those of `forward_uncached` over each prompt with each completion, but a
  prompt is computed once, forward and backward, and logits exist only for
  tokens of completions, of some at a time. Differentiable in `params`;
  with exact numerics in reverse mode alone, not by `jax.jvp`. A sequence that
  shares nothing is a completion of its first token.
  Letters: N prompts of up to P tokens, and G completions of each, of up to R.

  Completions may share more than a prompt, such as turns of a search. Then they
  are a tuple of levels: int32[N, G, R] the first one, int32[N, G, G', R'] the
  second one, int32[N, G, G', G'', R''] the third one. Lengths are the same
  without the last axis. Each of the G branches of the first level is continued
  by G' of the second one, which begin where it ends. A token sees all its
  ancestors, wherever they end; positions count from the root.

  On several devices, call it in `jax.shard_map` with all arrays split by N:
  nothing is gathered, and exact numbers stay the same. Under `jit` alone the
  axes of the mesh must be `AxisType.Auto`, for with `AxisType.Explicit` jax
  raises a ShardingTypeError; and exact numerics gather the whole batch on each
  device.

  Args:
    params: as `init_params` returns.
    prompts: int32[N, P], padded at the end.
    prompt_lengths: int32[N], 1 .. P; 0 for a prompt without any completion.
    completions: int32[N, G, R], padded at the end; or a tuple of levels.
    completion_lengths: int32[N, G], 0 .. R, 0 for a completion that does not
      exist; of levels, a tuple.
    config: static; the decoder.
    temperature: by what logits are divided, as in `Sampling`; for 0 by 1, as in
      a rollout and in `score`. A traced one that is negative, infinite or NaN
      gives NaN.
    experts: what prompts and completions use: signed integers [N, P, J, k] and
      [N, G, R, J, k], or of levels a tuple; see `forward_uncached`.
    remat: static; whether a gradient keeps the input of each layer alone, and
      computes the layer again: less memory, and up to a third more time.
    kv_dtype: static; see `forward_uncached`.

  Returns:
    float32[N, G, R], or a tuple of levels alike: the log-prob of each token,
    given all before it. 0 behind the lengths. NaN for a token outside the
    vocabulary; where it is an input, also for all tokens of its completion but
    the first one, of what goes on from there, and for gradients, whatever a
    mask says. NaN for all completions of a prompt if its length, or that of one
    of them, is out of range: `mask & ~jnp.isnan(log_probs)` leaves these out of
    a loss and its gradient.

  Raises:
    TypeError: an argument has another type, such as tokens that are no
      integers.
    ValueError: an argument has another shape than the decoder's, is missing, or
      given but not used, or the temperature is negative, infinite or NaN.

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

    A tree: both go on with another turn, the second one in two ways:

    >>> turns = jnp.array([[[[7, 7], [0, 0]], [[2, 0], [8, 3]]]])
    >>> tree = grouped_log_probs(
    ...   params, prompts, lengths[0], (completions, turns),
    ...   (lengths[1], jnp.array([[[2, 0], [1, 2]]])), config=config,
    ... )
    >>> [level.shape for level in tree]
    [(1, 2, 3), (1, 2, 2, 2)]
  """
  if not isinstance(config, Decoder):
    hint = "describe one, such as with `models.llama`"
    arguments.refuse(TypeError, "config", "a Decoder", config, hint)
  single = not isinstance(completions, tuple)
  levels, lengths = _checked(
    (prompts, *_levels(completions)),
    (prompt_lengths, *_levels(completion_lengths)),
  )
  heat = divisor(as_temperature(temperature))
  used = _checked_experts(experts, levels, config)
  out = _grouped(
    params,
    levels,
    lengths,
    heat,
    used,
    config=config,
    remat=bool(remat),
    kv_dtype=kv_dtype,
  )
  return out[0] if single else out


def _levels(values: Levels) -> tuple[jax.Array, ...]:
  return values if isinstance(values, tuple) else (values,)


@functools.partial(jax.jit, static_argnames=("config", "remat", "kv_dtype"))
def _grouped(
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
  """`grouped_log_probs`, a tuple of levels."""
  logits.check_params(params, config)
  widths = [level.shape[-1] for level in levels]
  lengths = tuple(_flat(length, 0) for length in lengths)
  fits = _fit(lengths, widths)
  # What stands behind the lengths must not make anything NaN, and neither what
  # wrong lengths are about: a gradient would be NaN wherever its factor is 0.
  lengths = tuple(jnp.where(fits[:, None], own, 0) for own in lengths)
  tokens = _padded([_flat(level, 1) for level in levels], lengths, 0)
  used = None
  if experts is not None:
    used = _padded([_flat(own, 3) for own in experts], lengths, -1)
  # Nothing follows the last column of the last level.
  tree = trees.of_lengths([*widths[:-1], max(widths[-1] - 1, 1)], lengths)
  keep = memory_within(
    config,
    None if used is None else tree.join(used),
    tree=tree,
    kv_dtype=kv_dtype,
  )
  row, positions = tree.join(tokens), tree.join(tree.positions())
  x, _ = blocks.run(params, row, positions, (), keep, config, remat=remat)
  found = _of_levels(params, x, tokens, tree, temperature, config)
  found = _padded(found, lengths[1:], 0)
  return tuple(
    jnp.where(fits[:, None, None], own, jnp.nan).reshape(level.shape)
    for own, level in zip(found, levels[1:], strict=True)
  )


def _of_levels(
  params: Params,
  x: jax.Array,
  tokens: list[jax.Array],
  tree: trees.Tree,
  temperature: jax.Array,
  config: Decoder,
) -> list[jax.Array]:
  """float32[N, C, R] of each level of completions, from x [N, T, E]."""
  found = []
  for level, own in enumerate(tokens[1:], 1):
    # A row for each branch above, with the first tokens of all those below it.
    last = tree.last(level - 1)
    before = jnp.take_along_axis(x, last[..., None], axis=1, mode="clip")
    below = own[..., 0].reshape(*last.shape, -1)
    first = log_probs.of_tokens(params, before, below, temperature, config)
    before = tree.split(x)[level][:, :, : own.shape[2] - 1]
    below = own[..., 1:, None]
    rest = log_probs.of_tokens(params, before, below, temperature, config)
    first = first.reshape(*own.shape[:2], 1)
    found.append(jnp.concatenate([first, rest[..., 0]], axis=2))
  return found


def _padded(
  levels: list[jax.Array], lengths: tuple[jax.Array, ...], fill: int
) -> list[jax.Array]:
  """Levels [N, C, R, ...] with a number in all columns behind the lengths."""
  padded = []
  for own, length in zip(levels, lengths, strict=True):
    real = trees.columns(own.shape[2]) < length[..., None]
    real = real.reshape(*real.shape, *(1,) * (own.ndim - 3))
    padded.append(jnp.where(real, own, jnp.array(fill, own.dtype)))
  return padded


def _flat(values: jax.Array, dims: int) -> jax.Array:
  """[N, C, ...]: all branching axes as one, before the last dimensions."""
  last = values.shape[values.ndim - dims :]
  return values.reshape(values.shape[0], -1, *last)


def _fit(lengths: tuple[jax.Array, ...], widths: list[int]) -> jax.Array:
  """bool[N]: whether lengths are in range, and something comes first."""
  fits = True
  for own, width in zip(lengths, widths, strict=True):
    fits &= jnp.all((own >= 0) & (own <= width), axis=1)
    fits &= (lengths[0][:, 0] > 0) | jnp.all(own == 0, axis=1)
  return jnp.asarray(fits)


def _checked(
  tokens: tuple[Any, ...], lengths: tuple[Any, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
  """Prompts and levels of completions, and their lengths: int32.

  Raises:
    TypeError: they are no integers.
    ValueError: they have another shape.
  """
  if len(tokens) < 2 or len(tokens) != len(lengths):
    raise ValueError(
      "`completions` and `completion_lengths` must have the same number of "
      f"levels (at least one), got {len(tokens) - 1} and {len(lengths) - 1}."
    )
  above, levels, sizes = (), [], []
  for own, length in zip(tokens, lengths, strict=True):
    name, more = ("completions", "GR") if levels else ("prompts", "NP")
    own = arguments.as_int32(name, own)
    arguments.check_shape(name, own, (*above, *more))
    above, label = own.shape[:-1], f"{name.removesuffix('s')}_lengths"
    length = arguments.as_int32(label, length)
    arguments.check_shape(label, length, above, f", one for each row of {name}")
    levels.append(own)
    sizes.append(length)
  return tuple(levels), tuple(sizes)


def _checked_experts(
  experts: Any, levels: tuple[jax.Array, ...], config: Decoder
) -> tuple[jax.Array, ...] | None:
  """Those of prompts and of each level of completions.

  Raises:
    TypeError: they are no pair, or hold something else than integers.
    ValueError: they have another shape, or the decoder has none.
  """
  if experts is None:
    return None
  if not isinstance(experts, tuple) or len(experts) != 2:
    found = arguments.describe(experts)
    if isinstance(experts, tuple | list):
      found = f"a {type(experts).__name__} of {len(experts)}"
    raise TypeError(
      "`experts` must be a tuple of those of prompts and those of completions, "
      f"got {found}; leave it out to choose them anew."
    )
  used = (experts[0], *_levels(experts[1]))
  if len(used) != len(levels):
    raise ValueError(
      "`experts` must have the same number of levels as `completions`, "
      f"{len(levels) - 1}, got {len(used) - 1}."
    )
  for own, level in zip(used, levels, strict=True):
    if not isinstance(own, jax.Array | np.ndarray):
      raise TypeError(
        "`experts` must be arrays, one for prompts and one for each level of "
        f"completions, got {arguments.describe(own)}; leave it out to choose "
        "them anew."
      )
    routing.check_experts(own, level, config)
  return used
