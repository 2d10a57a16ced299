"""Llama-family decoder in plain JAX, with interchangeable attention.

One core (`_decode`) holds all arithmetic but attention: embedding, RMSNorm,
rotary positions, projections, SwiGLU and logits. Three functions pass their
attention to it, so they differ only in the rounding of attention:

| function           | keys and values                   | used for         |
|--------------------|-----------------------------------|------------------|
| `forward`          | paged memory (`jaxkv.kv`)         | decoding         |
| `forward_dense`    | `DenseCache`                      | the baseline     |
| `forward_uncached` | those of the same call, no memory | training         |

The layer loop carries the whole key-value memory, not one slice per layer: a
scan with slices as inputs and outputs would copy the memory at every token. A
step of the loop is one repetition of the pattern `LlamaConfig.windows`.

Dimension letters besides the project's own (B rows, T tokens, G layer groups
and layers of the pattern, H query heads, K key-value heads, D head size, L
layers): E width, F inner width of the MLP, V vocabulary.
"""

import functools
import math
from collections.abc import Callable
from typing import Any
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv_kernels as kernels
from jaxkv import kv as paged
from jaxkv._src.cache import ops
from jaxkv._src.models import dense
from jaxkv._src.models.config import LlamaConfig

Params = dict[str, Any]
Wanted = Literal["all", "last", "none"]
# (group, repetition, q[B, T, H, D], k[B, T, K, D], v[B, T, K, D], memory)
#   -> (output[B, T, H, D], memory); the layer is repetition * G + group.
_Attention = Callable[
  [int, jax.Array, jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]
]
_AnyView = paged.View | paged.PackedView


def init_params(key: jax.Array, config: LlamaConfig) -> Params:
  """Random parameters; every array under "layers" has a leading L axis.

  Args:
    key: random key.
    config: the decoder's sizes.

  Returns:
    A dict: "embed" [V, E], "final_norm" [E], "unembed" [E, V] where the
    embeddings are not tied, and "layers", a dict of "attention_norm" [L, E],
    "query" [L, E, H, D], "key" and "value" [L, E, K, D], "output"
    [L, H, D, E], "mlp_norm" [L, E], "gate" and "up" [L, E, F], "down"
    [L, F, E]; all of `config.dtype`.

  Examples:
    >>> import jax
    >>> config = LlamaConfig(vocab_size=11, num_layers=2, embed_dim=8,
    ...                      num_heads=4, num_kv_heads=2, head_dim=2,
    ...                      mlp_dim=16)
    >>> init_params(jax.random.key(0), config)["layers"]["key"].shape
    (2, 8, 2, 2)
  """
  c = config
  n, e, f, d = c.num_layers, c.embed_dim, c.mlp_dim, c.head_dim
  h, k = c.num_heads, c.num_kv_heads
  residual = (2 * n) ** -0.5
  # One draw, cut up: separate draws would cost a compilation for each shape.
  size = 2 * c.vocab_size * e + n * e * (2 * (h + k) * d + 3 * f)
  noise = jax.random.normal(key, (size,), jnp.float32)
  used = 0

  def normal(*shape: int, fan_in: int, gain: float = 1.0) -> jax.Array:
    nonlocal used
    begin, used = used, used + math.prod(shape)
    drawn = noise[begin:used].reshape(shape)
    return (drawn * (gain * fan_in**-0.5)).astype(c.dtype)

  def ones(*shape: int) -> jax.Array:
    return jnp.ones(shape, c.dtype)

  params: Params = {
    "embed": normal(c.vocab_size, e, fan_in=e),
    "final_norm": ones(e),
    "layers": {
      "attention_norm": ones(n, e),
      "query": normal(n, e, h, d, fan_in=e),
      "key": normal(n, e, k, d, fan_in=e),
      "value": normal(n, e, k, d, fan_in=e),
      "output": normal(n, h, d, e, fan_in=h * d, gain=residual),
      "mlp_norm": ones(n, e),
      "gate": normal(n, e, f, fan_in=e),
      "up": normal(n, e, f, fan_in=e),
      "down": normal(n, f, e, fan_in=f, gain=residual),
    },
  }
  if not c.tied_embeddings:
    params["unembed"] = normal(e, c.vocab_size, fan_in=e)
  return params


@functools.partial(jax.jit, static_argnames=("config", "logits", "backend"))
def forward(
  params: Params,
  tokens: jax.Array,
  positions: jax.Array,
  kv: paged.KVPages,
  view: _AnyView | tuple[_AnyView, ...],
  columns: jax.Array | None = None,
  *,
  config: LlamaConfig,
  logits: Wanted = "all",
  backend: str = "auto",
) -> tuple[jax.Array, paged.KVPages]:
  """Runs tokens through the decoder with keys and values in pages.

  Writes the keys and values of row b's first `view.counts[b]` tokens after its
  `view.starts[b]` cached tokens. Each token attends to all tokens up to itself,
  in layers with a window to the last ones of them. Prefill, chunked prefill and
  decode are this one call with different T and counts. With a `PackedView` B is
  1, and the columns are the view's. A row's logits do not depend on other rows,
  except for rounding if the view has `shared` pages or a `plan`. Layers with a
  window ignore `shared`.

  Never donates: outside your own `jit`, each call copies the pages.

  Args:
    params: as `init_params` returns.
    tokens: int32[B, T]. A token outside the vocabulary makes logits of its row
      NaN, unless it is past the row's count.
    positions: int32[B, T]; for row b of an ordinary sequence
      `view.starts[b] + arange(T)`.
    kv: the pages, `config.num_memory_layers` layers of them.
    view: where each row's pages are, and how many tokens are written. A
      tuple has a view for each of `config.groups`, which differ in the page
      table only; one group needs no tuple.
    columns: int32[X], of a packed call: the columns that get logits.
    config: static; the decoder's sizes and windows.
    logits: static; if `columns` is None, which tokens get logits: "all";
      "last", the token at `view.counts[b] - 1` (meaningless for a row with
      count 0); or "none", as for a prompt's earlier chunks.
    backend: static; see `jaxkv.kv.attend`.

  Returns:
    (logits, kv): float32[B, P, V], where P is T, 1 or 0 for "all", "last"
    and "none"; the logits of tokens past a row's count are meaningless. With
    `columns`, float32[X, V].

  Examples:
    >>> import jax, jax.numpy as jnp, jaxkv
    >>> config = LlamaConfig(vocab_size=11, num_layers=2, embed_dim=8,
    ...                      num_heads=4, num_kv_heads=2, head_dim=2,
    ...                      mlp_dim=16)
    >>> cache = jaxkv.CacheConfig(num_pages=3, page_size=4, num_slots=1,
    ...                           pages_per_slot=2)
    >>> kv = paged.init(cache, num_layers=2, num_kv_heads=2, head_dim=2,
    ...                 dtype=jnp.float32)
    >>> view = paged.View(page_table=jnp.array([[2, 1]]),
    ...                   starts=jnp.array([0]), counts=jnp.array([3]))
    >>> logits, kv = forward(
    ...   init_params(jax.random.key(0), config),
    ...   jnp.array([[3, 1, 4]]), jnp.array([[0, 1, 2]]), kv, view,
    ...   config=config)
    >>> logits.shape
    (1, 3, 11)
  """
  views = view if isinstance(view, tuple) else (view,)
  _check_memory(kv, views, config)
  counts = None if isinstance(views[0], paged.PackedView) else views[0].counts
  rows: list[Any] = list(views)
  for group, one in enumerate(views):
    single = isinstance(one, paged.PackedView) or tokens.shape[1:] == (1,)
    if single and config.windows[group] is None:
      rows[group] = paged.refresh_shared(kv, one)

  def attention(
    group: int,
    repetition: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    memory: paged.KVPages,
  ) -> tuple[Any, paged.KVPages]:
    memory = paged.write(memory, rows[group], repetition, k, v)
    options = kernels.AttentionOptions(window=config.windows[group])
    out = paged.attend(
      memory, rows[group], repetition, q, options=options, backend=backend
    )
    return out, memory

  wanted = logits if columns is None else columns
  out, kv = _decode(
    params, tokens, positions, kv, attention, counts, wanted, config
  )
  return out if columns is None else out[0], kv


@functools.partial(jax.jit, static_argnames=("config", "logits"))
def forward_dense(
  params: Params,
  tokens: jax.Array,
  positions: jax.Array,
  cache: dense.DenseCache,
  starts: jax.Array,
  counts: jax.Array,
  *,
  config: LlamaConfig,
  logits: Wanted = "all",
) -> tuple[jax.Array, dense.DenseCache]:
  """Like `forward`, with one contiguous stretch of memory per row.

  The baseline: no pages, no kernel. Tokens past `cache.max_len` are not
  kept, and get NaN logits. Never donates.

  Args:
    params: as `init_params` returns.
    tokens: int32[B, T].
    positions: int32[B, T].
    cache: the memory.
    starts: int32[B], tokens of each row cached before.
    counts: int32[B], how many of each row's T tokens to keep.
    config: static; the decoder's sizes.
    logits: static; as in `forward`.

  Returns:
    (logits, cache): float32[B, P, V] as in `forward`.

  Examples:
    >>> import jax, jax.numpy as jnp
    >>> config = LlamaConfig(vocab_size=11, num_layers=2, embed_dim=8,
    ...                      num_heads=4, num_kv_heads=2, head_dim=2,
    ...                      mlp_dim=16)
    >>> cache = dense.init(num_layers=2, batch_size=1, max_len=8,
    ...                    num_kv_heads=2, head_dim=2)
    >>> logits, cache = forward_dense(
    ...   init_params(jax.random.key(0), config),
    ...   jnp.array([[3, 1, 4]]), jnp.array([[0, 1, 2]]), cache,
    ...   jnp.array([0]), jnp.array([3]), config=config, logits="last")
    >>> logits.shape
    (1, 1, 11)
  """

  def attention(
    group: int,
    repetition: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    memory: dense.DenseCache,
  ) -> tuple[jax.Array, dense.DenseCache]:
    window = config.windows[group]
    layer = repetition * len(config.windows) + group
    memory = dense.write(memory, layer, starts, counts, k, v)
    return dense.attend(memory, layer, starts, q, window=window), memory

  return _decode(
    params, tokens, positions, cache, attention, counts, logits, config
  )


@functools.partial(jax.jit, static_argnames=("config",))
def forward_uncached(
  params: Params,
  tokens: jax.Array,
  positions: jax.Array,
  *,
  config: LlamaConfig,
) -> jax.Array:
  """Runs whole sequences; each token attends to all tokens up to itself.

  In layers with a window it attends to the last ones of them. Differentiable in
  `params`: this is the function to train.

  Args:
    params: as `init_params` returns.
    tokens: int32[B, T], each in 0 ... V - 1.
    positions: int32[B, T], for the rotations only; attention is causal, and
      windows count tokens, in the order of T.
    config: static; the decoder's sizes.

  Returns:
    float32[B, T, V] logits.

  Examples:
    >>> import jax, jax.numpy as jnp
    >>> config = LlamaConfig(vocab_size=11, num_layers=2, embed_dim=8,
    ...                      num_heads=4, num_kv_heads=2, head_dim=2,
    ...                      mlp_dim=16)
    >>> forward_uncached(init_params(jax.random.key(0), config),
    ...                  jnp.array([[3, 1, 4]]), jnp.array([[0, 1, 2]]),
    ...                  config=config).shape
    (1, 3, 11)
  """

  def attention(
    group: int,
    repetition: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    memory: None,
  ) -> tuple[jax.Array, None]:
    del repetition
    window = config.windows[group]
    return dense.attend_causal(q, k, v, window=window), memory

  return _decode(
    params, tokens, positions, None, attention, None, "all", config
  )[0]


def _decode(
  params: Params,
  tokens: jax.Array,
  positions: jax.Array,
  memory: Any,
  attention: _Attention,
  counts: jax.Array | None,
  wanted: Wanted | jax.Array,
  config: LlamaConfig,
) -> tuple[jax.Array, Any]:
  """All of the decoder but attention: (float32[B, P, V] logits, memory)."""
  _check_inputs(params, tokens, positions, counts, wanted, config)
  num_groups = len(config.windows)
  rotations = {
    base: _rotation(positions, base, config.head_dim)
    for base in config.rope_bases
  }

  def block(
    group: int,
    repetition: jax.Array,
    weights: Params,
    x: jax.Array,
    memory: Any,
  ) -> tuple[jax.Array, Any]:
    rotation = rotations[config.rope_bases[group]]
    y = _rms_norm(x, weights["attention_norm"], config)
    q = _rotate(jnp.einsum("bte,ehd->bthd", y, weights["query"]), rotation)
    k = _rotate(jnp.einsum("bte,ekd->btkd", y, weights["key"]), rotation)
    v = jnp.einsum("bte,ekd->btkd", y, weights["value"])
    out, memory = attention(group, repetition, q, k, v, memory)
    x = x + jnp.einsum("bthd,hde->bte", out.astype(x.dtype), weights["output"])
    y = _rms_norm(x, weights["mlp_norm"], config)
    gate = jax.nn.silu(jnp.einsum("bte,ef->btf", y, weights["gate"]))
    up = jnp.einsum("bte,ef->btf", y, weights["up"])
    return x + jnp.einsum("btf,fe->bte", gate * up, weights["down"]), memory

  def repeat(carry: Any, inputs: Any) -> tuple[Any, None]:
    repetition, weights = inputs
    if num_groups == 1:
      return block(0, repetition, weights, *carry), None
    for group in range(num_groups):
      own = _layer_of(weights, group, carry[0])
      carry = block(group, repetition, own, *carry)
    return carry, None

  x = (
    params["embed"]
    .at[tokens]
    .get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
  )
  repetitions = jnp.arange(config.num_layers // num_groups, dtype=jnp.int32)
  layers = params["layers"]
  if num_groups > 1:  # XLA for a CPU copies what is reshaped to [L, 1, ...].
    layers = jax.tree.map(
      lambda leaf: leaf.reshape(-1, num_groups, *leaf.shape[1:]), layers
    )
  (x, memory), _ = jax.lax.scan(repeat, (x, memory), (repetitions, layers))
  x = _rms_norm(_pick(x, counts, wanted), params["final_norm"], config)
  unembed = params["embed"].T if config.tied_embeddings else params["unembed"]
  logits = jnp.einsum(
    "bte,ev->btv", x, unembed, preferred_element_type=jnp.float32
  )
  return logits, memory


def _layer_of(weights: Params, group: int, x: jax.Array) -> Params:
  """The weights of one layer of a repetition, read when its input x is known.

  Otherwise XLA copies the weights of all layers of the repetition before the
  first one: as much more memory, and on a CPU twice the time of a decode step.
  """
  known = (x[0, 0, 0] > 0).astype(jnp.int32)
  index = ops.read_before(known, jnp.int32(group))
  return jax.tree.map(
    lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False),
    weights,
  )


def _pick(
  x: jax.Array, counts: jax.Array | None, wanted: Wanted | jax.Array
) -> jax.Array:
  """[B, T, E] to [B, P, E]: the tokens that get logits."""
  if not isinstance(wanted, str):
    return x.at[:, wanted].get(mode="clip")
  if wanted == "all" or counts is None:
    return x
  if wanted == "none":
    return x[:, :0]
  last = jnp.maximum(counts - 1, 0)[:, None, None]
  return jnp.take_along_axis(x, last, axis=1, mode="fill")


def _rms_norm(
  x: jax.Array, weight: jax.Array, config: LlamaConfig
) -> jax.Array:
  wide = x.astype(jnp.float32)
  scale = jax.lax.rsqrt(
    jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + config.norm_eps
  )
  return (wide * scale).astype(x.dtype) * weight[None, None]


def _rotation(
  positions: jax.Array, base: float, head_dim: int
) -> tuple[jax.Array, jax.Array]:
  """Cosine and sine of each pair's angle, float32[B, T, 1, D // 2]."""
  half = head_dim // 2
  exponents = np.arange(half, dtype=np.float32) / half
  frequencies = jnp.asarray(base**-exponents, jnp.float32)
  angles = (
    positions.astype(jnp.float32)[:, :, None, None]
    * frequencies[None, None, None]
  )
  return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Turns element i with element i + D / 2, as published checkpoints do."""
  cos, sin = rotation
  low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = (low * cos - high * sin, high * cos + low * sin)
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _check_memory(
  kv: paged.KVPages, views: tuple[_AnyView, ...], config: LlamaConfig
) -> None:
  if len(views) != len(config.windows):
    raise ValueError(
      f"`view` must have a view for each of the {len(config.windows)} layer "
      f"groups of config, got {len(views)}; give a tuple in the order of "
      "config.groups."
    )
  if kv.num_layers < config.num_memory_layers:
    raise ValueError(
      f"`kv` must have {config.num_memory_layers} layers for config, got "
      f"{kv.num_layers}; make it with num_layers=config.num_memory_layers."
    )


def _check_inputs(
  params: Params,
  tokens: jax.Array,
  positions: jax.Array,
  counts: jax.Array | None,
  wanted: Wanted | jax.Array,
  config: LlamaConfig,
) -> None:
  if tokens.ndim != 2:
    raise ValueError(f"`tokens` must be [B, T], got shape {tokens.shape}.")
  if positions.shape != tokens.shape:
    raise ValueError(
      f"`positions` must have the shape of tokens, {tokens.shape}, got "
      f"{positions.shape}."
    )
  if counts is not None and counts.shape != tokens.shape[:1]:
    raise ValueError(
      f"`counts` must have shape {tokens.shape[:1]}, got {counts.shape}."
    )
  if isinstance(wanted, str) and wanted not in ("all", "last", "none"):
    raise ValueError(
      f'`logits` must be "all", "last" or "none", got {wanted!r}.'
    )
  embed = (config.vocab_size, config.embed_dim)
  if params["embed"].shape != embed or params["embed"].dtype != config.dtype:
    raise ValueError(
      f'`params["embed"]` must be {config.dtype.name}{list(embed)}, as in '
      f"config, got {params['embed'].dtype.name}"
      f"{list(params['embed'].shape)}."
    )
