"""The decoder: one function of tokens, with three ways to keep what it reads.

| function           | keys and values                   | used for         |
|--------------------|-----------------------------------|------------------|
| `forward`          | paged memory (`jaxkv.kv`)         | decoding         |
| `forward_dense`    | `DenseCache`                      | the baseline     |
| `forward_uncached` | those of the same call, no memory | training         |

A loop over layers carries the whole memory, not one slice per layer: a scan
with slices as inputs and outputs would copy the memory at every token.

Dimension letters besides the project's own (B rows, T tokens, H query heads, K
key-value heads, D head size, L layers): E width, V vocabulary, P layers of a
pattern, R repetitions.
"""

import functools
from typing import Any
from typing import Literal

import jax
import jax.numpy as jnp

from jaxkv import kv as paged
from jaxkv._src.cache import ops
from jaxkv._src.models import dense
from jaxkv._src.models.decoder import attention as attentions
from jaxkv._src.models.decoder import layout
from jaxkv._src.models.decoder import memories
from jaxkv._src.models.decoder import mlp as mlps
from jaxkv._src.models.decoder.attention import Rotations
from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import LatentAttention
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.decoder.description import Mlp
from jaxkv._src.models.decoder.memories import Place
from jaxkv._src.models.decoder.norms import rms_norm
from jaxkv._src.models.decoder.params import Params

Wanted = Literal["all", "last", "none"]
_Memory = tuple[Any, ...]
_AnyView = paged.View | paged.PackedView


@functools.partial(
  jax.jit, static_argnames=("config", "logits", "backend", "heads")
)
def forward(
  params: Params,
  tokens: jax.Array,
  positions: jax.Array,
  kv: Any,
  view: _AnyView | tuple[_AnyView, ...],
  columns: jax.Array | None = None,
  rows: Any = None,
  *,
  config: Decoder,
  logits: Wanted = "all",
  backend: str = "auto",
  heads: jax.sharding.NamedSharding | None = None,
) -> tuple[jax.Array, Any]:
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
    kv: the memory, from `init_kv`: pages, or a tuple if the layers need several
      kinds of them.
    view: where each row's pages are, and how many tokens are written. A
      tuple has a view for each of `cache_groups(config)`, which differ in the
      page table only; one group needs no tuple.
    columns: int32[X], of a packed call: the columns that get logits.
    rows: what a rollout says about the sequence of each token; not used.
    config: static; the decoder.
    logits: static; if `columns` is None, which tokens get logits: "all";
      "last", the token at `view.counts[b] - 1` (meaningless for a row with
      count 0); or "none", as for a prompt's earlier chunks.
    backend: static; see `jaxkv.kv.attend`.
    heads: static; see `jaxkv.kv.attend`.

  Returns:
    (logits, kv): float32[B, P, V], where P is T, 1 or 0 for "all", "last"
    and "none"; the logits of tokens past a row's count are meaningless. With
    `columns`, float32[X, V].

  Raises:
    ValueError: the views, the memory or the parameters are not those of the
      decoder.

  Examples:
    >>> import jax, jax.numpy as jnp, jaxkv
    >>> from jaxkv import models
    >>> config = models.llama(vocab_size=11, num_layers=2, embed_dim=8,
    ...                       num_heads=4, num_kv_heads=2, head_dim=2,
    ...                       mlp_dim=16)
    >>> cache = jaxkv.CacheConfig(num_pages=3, page_size=4, num_slots=1,
    ...                           pages_per_slot=2)
    >>> view = paged.View(page_table=jnp.array([[2, 1]]),
    ...                   starts=jnp.array([0]), counts=jnp.array([3]))
    >>> logits, kv = forward(
    ...   models.init_params(jax.random.key(0), config),
    ...   jnp.array([[3, 1, 4]]), jnp.array([[0, 1, 2]]),
    ...   models.init_kv(config, cache), view, config=config)
    >>> logits.shape
    (1, 3, 11)
  """
  del rows
  views = view if isinstance(view, tuple) else (view,)
  pools = kv if type(kv) is tuple else (kv,)
  _check_memory(pools, views, config)
  counts = None if isinstance(views[0], paged.PackedView) else views[0].counts
  kinds = layout.groups(config)
  seen: list[Any] = list(views)
  for group, one in enumerate(views):
    single = isinstance(one, paged.PackedView) or tokens.shape[1:] == (1,)
    pool = pools[_pool_of(config, group)]
    if single and not kinds[group].skips_pages and _has_keys(pool):
      seen[group] = paged.refresh_shared(pool, one)
  keep = memories.Paged(tuple(seen), backend, heads)
  wanted = logits if columns is None else columns
  out, pools = _decode(
    params, tokens, positions, pools, keep, counts, wanted, config
  )
  kv = pools if type(kv) is tuple else pools[0]
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
  config: Decoder,
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
    config: static; a decoder whose layers have `Attention` of equal sizes.
    logits: static; as in `forward`.

  Returns:
    (logits, cache): float32[B, P, V] as in `forward`.

  Examples:
    >>> import jax, jax.numpy as jnp
    >>> from jaxkv import models
    >>> config = models.llama(vocab_size=11, num_layers=2, embed_dim=8,
    ...                       num_heads=4, num_kv_heads=2, head_dim=2,
    ...                       mlp_dim=16)
    >>> cache = models.init_dense(config, batch_size=1, max_len=8)
    >>> logits, cache = forward_dense(
    ...   models.init_params(jax.random.key(0), config),
    ...   jnp.array([[3, 1, 4]]), jnp.array([[0, 1, 2]]), cache,
    ...   jnp.array([0]), jnp.array([3]), config=config, logits="last")
    >>> logits.shape
    (1, 1, 11)
  """
  keep = memories.Dense(starts, counts, len(layout.groups(config)))
  out, memory = _decode(
    params, tokens, positions, (cache,), keep, counts, logits, config
  )
  return out, memory[0]


@functools.partial(jax.jit, static_argnames=("config",))
def forward_uncached(
  params: Params,
  tokens: jax.Array,
  positions: jax.Array,
  *,
  config: Decoder,
) -> jax.Array:
  """Runs whole sequences; each token attends to all tokens up to itself.

  In layers with a window it attends to the last ones of them. Differentiable in
  `params`: this is the function to train.

  Args:
    params: as `init_params` returns.
    tokens: int32[B, T], each in 0 ... V - 1.
    positions: int32[B, T], for the rotations only; attention is causal, and
      windows count tokens, in the order of T.
    config: static; the decoder.

  Returns:
    float32[B, T, V] logits.

  Examples:
    >>> import jax, jax.numpy as jnp
    >>> from jaxkv import models
    >>> config = models.llama(vocab_size=11, num_layers=2, embed_dim=8,
    ...                       num_heads=4, num_kv_heads=2, head_dim=2,
    ...                       mlp_dim=16)
    >>> params = models.init_params(jax.random.key(0), config)
    >>> forward_uncached(params, jnp.array([[3, 1, 4]]),
    ...                  jnp.array([[0, 1, 2]]), config=config).shape
    (1, 3, 11)
  """
  keep = memories.Nowhere()
  return _decode(params, tokens, positions, (), keep, None, "all", config)[0]


def _decode(
  params: Params,
  tokens: jax.Array,
  positions: jax.Array,
  memory: _Memory,
  keep: Any,
  counts: jax.Array | None,
  wanted: Wanted | jax.Array,
  config: Decoder,
) -> tuple[jax.Array, _Memory]:
  """All of the decoder: (float32[B, P, V] logits, memory)."""
  _check_inputs(params, tokens, positions, counts, wanted, config)
  turned = attentions.rotations(config, positions)
  x = (
    params["embed"]
    .at[tokens]
    .get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
  )
  if config.embed_scale != 1.0:
    x = x * jnp.asarray(config.embed_scale, x.dtype)
  for stretch, weights in zip(
    layout.stretches(config), params["layers"], strict=True
  ):
    x, memory = _repeat(x, memory, stretch, weights, turned, keep, config)
  x = rms_norm(
    _pick(x, counts, wanted),
    params["final_norm"],
    config.norm_eps,
    config.norm_offset,
  )
  unembed = params["embed"].T if config.tied_embeddings else params["unembed"]
  logits = jnp.einsum(
    "bte,ev->btv", x, unembed, preferred_element_type=jnp.float32
  )
  if config.logit_cap is not None:
    logits = config.logit_cap * jnp.tanh(logits / config.logit_cap)
  return logits, memory


def _repeat(
  x: jax.Array,
  memory: _Memory,
  stretch: layout.Stretch,
  weights: tuple[Params, ...],
  turned: Rotations,
  keep: Any,
  config: Decoder,
) -> tuple[jax.Array, _Memory]:
  """Runs the layers of a stretch."""
  num_groups, size = len(layout.groups(config)), len(stretch.pattern)

  def block(
    number: int, repetition: jax.Array | int, own: Params, carry: Any
  ) -> tuple[jax.Array, _Memory]:
    layer = stretch.pattern[number]
    index = stretch.first + number
    place = Place(
      group=index % num_groups,
      layer=index // num_groups + repetition * (size // num_groups),
      pool=layout.pools(config).index(layout.pool_of(layer)),
    )
    x, memory = carry
    return _block(x, memory, layer, own, place, turned, keep, config)

  carry = (x, memory)
  if stretch.repetitions == 1:
    for number, leaves in enumerate(weights):
      own = jax.tree.map(lambda leaf: leaf[0], leaves)
      carry = block(number, 0, own, carry)
    return carry

  def repeat(carry: Any, inputs: Any) -> tuple[Any, None]:
    repetition, own = inputs
    if size == 1:
      return block(0, repetition, own[0], carry), None
    for number in range(size):
      leaves = _read(weights[number], repetition, carry[0])
      carry = block(number, repetition, leaves, carry)
    return carry, None

  repetitions = jnp.arange(stretch.repetitions, dtype=jnp.int32)
  sliced = weights if size == 1 else None
  return jax.lax.scan(repeat, carry, (repetitions, sliced))[0]


def _read(weights: Params, repetition: jax.Array, x: jax.Array) -> Params:
  """The weights of one layer of a repetition, read when its input x is known.

  Otherwise XLA copies the weights of all layers of the repetition before the
  first one: as much more memory, and on a CPU twice the time of a decode step.
  """
  known = (x[0, 0, 0] > 0).astype(jnp.int32)
  index = ops.read_before(known, repetition)
  return jax.tree.map(
    lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False),
    weights,
  )


def _block(
  x: jax.Array,
  memory: _Memory,
  layer: Layer,
  weights: Params,
  place: Place,
  turned: Rotations,
  keep: Any,
  config: Decoder,
) -> tuple[jax.Array, _Memory]:
  """Attention and an MLP, each added to [B, T, E]."""

  def norm(values: jax.Array, name: str) -> jax.Array:
    return rms_norm(values, weights[name], config.norm_eps, config.norm_offset)

  kind = layer.attention
  attend: Any = attentions.recurrent
  if isinstance(kind, LatentAttention):
    attend = attentions.latent
  elif isinstance(kind, Attention):
    attend = attentions.softmax
  y = norm(x, "attention_norm")
  out, memory = attend(y, weights, kind, place, turned, keep, memory, config)
  x = x + (norm(out, "post_attention_norm") if layer.post_norms else out)
  y = norm(x, "mlp_norm")
  if isinstance(layer.mlp, Mlp):
    out = mlps.gated(y, weights, layer.mlp)
  else:
    out, _ = mlps.mixture(y, weights, layer.mlp)
  return x + (norm(out, "post_mlp_norm") if layer.post_norms else out), memory


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


def _pool_of(config: Decoder, group: int) -> int:
  """The pool of a layer group."""
  needed = layout.pool_of(config.layers[group])
  return layout.pools(config).index(needed)


def _has_keys(pool: Any) -> bool:
  return isinstance(pool, paged.KVPages) and pool.v is not None


def _check_memory(
  pools: tuple[Any, ...], views: tuple[_AnyView, ...], config: Decoder
) -> None:
  groups, wanted = layout.groups(config), len(layout.pools(config))
  if len(views) != len(groups):
    raise ValueError(
      f"`view` must have a view for each of the {len(groups)} layer groups of "
      f"config, got {len(views)}; give a tuple in the order of cache_groups."
    )
  if len(pools) != wanted:
    raise ValueError(
      f"`kv` must have {wanted} pools for config, got {len(pools)}; make it "
      "with init_kv."
    )
  layers = layout.num_memory_layers(config)
  for pool in pools:
    if pool.num_layers < layers:
      raise ValueError(
        f"`kv` must have {layers} layers for config, got {pool.num_layers}; "
        "make it with init_kv."
      )


def _check_inputs(
  params: Params,
  tokens: jax.Array,
  positions: jax.Array,
  counts: jax.Array | None,
  wanted: Wanted | jax.Array,
  config: Decoder,
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
