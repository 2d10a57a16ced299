"""The forward pass of a decoder, with and without a cache.

| function           | keys and values           | used for |
|--------------------|---------------------------|----------|
| `forward`          | paged memory (`jaxkv.kv`) | decoding |
| `forward_uncached` | those of the same call    | training |

To train on sequences that share prompts, use `grouped_log_probs`.

Letters: B rows of T tokens, V vocabulary size, J layers with experts, k experts
per token in each such layer.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxkv._src.arrays.arguments import check_type
from jaxkv._src.arrays.arguments import refuse
from jaxkv._src.kv.kv_pages import KVPages
from jaxkv._src.kv.share import refresh_shared
from jaxkv._src.kv.view import Batch
from jaxkv._src.kv.view import PackedView
from jaxkv._src.kv.view import View
from jaxkv._src.models.decoder import expert_records
from jaxkv._src.models.decoder import groups
from jaxkv._src.models.decoder import kv_access
from jaxkv._src.models.decoder import logits as all_logits
from jaxkv._src.models.decoder import prompt_tree
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import check_decoder
from jaxkv._src.models.decoder.exact_trainer import uncached_access
from jaxkv._src.models.decoder.init_kv import check_pools
from jaxkv._src.models.decoder.numerics import is_exact
from jaxkv._src.models.decoder.params import Params

_AnyView = View | PackedView


def _jitted(*static_argnames: str) -> Callable[..., Any]:
  """Returns a decorator like `jax.jit`, for functions of a static `config`."""

  def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = jax.jit(function, static_argnames=("config", *static_argnames))

    # Before `jax.jit`, which refuses a list or dict without the name.
    @functools.wraps(function)
    def call(*arguments: Any, config: Decoder, **options: Any) -> Any:
      check_decoder("config", config)
      return compiled(*arguments, config=config, **options)

    return call

  return decorate


@_jitted("backend", "head_sharding", "expert_axis")
def forward(
  params: Params,
  batch: Batch,
  kv: Any,
  *,
  config: Decoder,
  backend: str = "auto",
  head_sharding: jax.sharding.NamedSharding | None = None,
  experts: jax.Array | None = None,
  expert_axis: str | None = None,
) -> tuple[jax.Array, Any]:
  """Runs tokens through the decoder with keys and values in pages.

  `starts` and `num_tokens` are fields of the views. Row b adds `num_tokens[b]`
  new tokens to `starts[b]` cached tokens, and the call writes the keys and
  values of the new ones. Each token attends to itself and to all tokens before
  it, or to those within the layer's window. Prefill, chunked prefill and decode
  are the same call with different T and `num_tokens`. With a `PackedView`, B is
  1 and T is the number of columns. Other rows change a row's logits only by
  rounding, for example if the view has `shared` pages.

  `forward` does not donate `kv`, so a call outside your own `jit` copies it.

  Args:
    params: parameters as returned by `init_params`.
    batch: the tokens. `positions` set only the rotary angles; normally they are
      `starts[b] + arange(T)` in row b. `views` has a view for each group of
      `cache_groups(config)`, all with the same tokens. `rows` is ignored. A new
      token outside the vocabulary gets NaN logits, and so can other tokens of
      its sequence.
    kv: the memory from `init_kv`.
    config: static; the decoder.
    backend: static; see `jaxkv.kv.attend`.
    head_sharding: static; see `jaxkv.kv.attend`.
    experts: see `forward_uncached`. If `kv` is from
      `init_kv(record_experts=True)`, the call also records the experts of each
      token in `kv`.
    expert_axis: static; inside `jax.shard_map`, the axis over which the experts
      of each layer are distributed, as by `jaxkv.sharding.MeshAxes.experts`;
      None if each device has all experts. Devices exchange the inputs and
      outputs of experts, so they must call this function together, with equal
      shapes.

  Returns:
    The logits and the new `kv`. The logits are float32[B, T, V], or those of
    `batch.columns`: float32[B, X, V] for int32[B, X], float32[X, V] for
    int32[X]. Logits past a row's `num_tokens` are meaningless.

  Raises:
    TypeError: an argument has a type or dtype that is not supported.
    ValueError: an argument does not fit the decoder, `batch.columns` does not
      fit the rows, or `expert_axis` is given with exact numerics.

  Examples:
    >>> import jax, jax.numpy as jnp, jaxkv
    >>> from jaxkv import models
    >>> config = models.llama(vocab_size=11, num_layers=2, embed_dim=8,
    ...                       num_heads=4, num_kv_heads=2, head_dim=2,
    ...                       mlp_dim=16)
    >>> cache = jaxkv.CacheConfig(num_pages=3, page_size=4, num_slots=1,
    ...                           pages_per_slot=2)
    >>> view = View(page_table=jnp.array([[2, 1]]),
    ...             starts=jnp.array([0]), num_tokens=jnp.array([3]))
    >>> batch = Batch(tokens=jnp.array([[3, 1, 4]]),
    ...               positions=jnp.array([[0, 1, 2]]), views=(view,))
    >>> logits, kv = forward(
    ...   models.init_params(jax.random.key(0), config), batch,
    ...   models.init_kv(config, cache), config=config)
    >>> logits.shape
    (1, 3, 11)
  """
  _check_batch(batch)
  tokens = batch.tokens
  positions = batch.positions
  views = batch.views
  columns = batch.columns
  all_logits.check_tokens(tokens, positions)
  if columns is not None:
    _check_columns(columns, tokens.shape[0])
  pools = kv if type(kv) is tuple else (kv,)
  check_pools(pools, views, config)
  expert_records.check_experts(experts, tokens, config)
  if expert_axis is not None and is_exact(config):
    raise ValueError(
      '`expert_axis` must be None with numerics="exact", got '
      f"{expert_axis!r}: devices compute the experts of all tokens together, "
      "and rounding depends on the number of tokens."
    )
  is_decode = isinstance(views[0], PackedView) or tokens.shape[1:] == (1,)
  # Exact numerics do not use shared pages, with which attention merges partial
  # results. A merge rounds differently from one pass over all keys.
  if is_decode and not is_exact(config):
    views = _with_shared_pages(pools, views, config)
  access = kv_access.PagedKV(
    views, backend, head_sharding, experts, config, expert_axis
  )
  out, pools = all_logits.run(
    params, tokens, positions, pools, access, columns, config
  )
  kv = pools if type(kv) is tuple else pools[0]
  return out[0] if columns is not None and columns.ndim == 1 else out, kv


def _check_batch(batch: Any) -> None:
  hint = "make one with jaxkv.kv.Batch(tokens=, positions=, views=)"
  check_type("batch", batch, Batch, "a Batch", hint)
  expected = "a tuple with a view for each layer group"
  check_type("batch.views", batch.views, tuple, expected)


def _check_columns(columns: jax.Array, num_rows: int) -> None:
  is_packed = columns.ndim == 1 and num_rows == 1
  if not is_packed and (columns.ndim != 2 or len(columns) != num_rows):
    expected = f"int32[{num_rows}, X], with the rows of `batch.tokens`"
    refuse(ValueError, "batch.columns", expected, columns)


def _with_shared_pages(
  pools: tuple[Any, ...], views: tuple[_AnyView, ...], config: Decoder
) -> tuple[_AnyView, ...]:
  """Updates the `shared` pages of views, once before the loop over layers."""
  refreshed: list[Any] = list(views)
  for group, group_kind in enumerate(groups.groups_of(config).kinds):
    pool = pools[group_kind.pool]
    # `attend` ignores `shared` in layers with a window or with latents, so the
    # views of these layers are not updated.
    has_keys = isinstance(pool, KVPages) and pool.v is not None
    if has_keys and not group_kind.skips_pages:
      refreshed[group] = refresh_shared(pool, views[group])
  return tuple(refreshed)


@_jitted("kv_dtype")
def forward_uncached(
  params: Params,
  tokens: jax.Array,
  positions: jax.Array,
  *,
  config: Decoder,
  experts: jax.Array | None = None,
  kv_dtype: Any = None,
) -> jax.Array:
  """Runs whole sequences without a cache; differentiable in `params`.

  Each token attends to itself and to all tokens before it, or to those within
  the layer's window. On several devices, call it in `jax.shard_map`, or under
  `jit` with a mesh whose axes are `AxisType.Auto`; see `grouped_log_probs`.

  `experts` replays the routing of a rollout: tokens use the recorded experts,
  even if new weights or rounding would change the router's choice. The factors
  of the experts' outputs are still computed from `params`.

  Args:
    params: parameters as returned by `init_params`.
    tokens: int32[B, T], each in 0 ... V - 1.
    positions: int32[B, T], which set only the rotary angles. Causal masks and
      windows follow the order of the T tokens.
    config: static; the decoder.
    experts: signed integers [B, T, J, k], the k experts of each token in each
      of the J layers with `Experts`, as from `jaxkv.rollout.generated`. If all
      k ids of a token are negative, the router chooses its experts. None lets
      the router choose for all tokens.
    kv_dtype: static; with `config.numerics="exact"`, the `dtype` that the
      rollout passed to `init_kv`; None for the decoder's dtype.

  Returns:
    float32[B, T, V] logits. If a token or one of its expert ids is out of
    range, its logits are NaN, and so can be all logits of its row.

  Raises:
    TypeError: an argument has a type or dtype that is not supported.
    ValueError: a shape does not fit the decoder, the decoder has no experts to
      replay, or `kv_dtype` is given without exact numerics.

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
  all_logits.check_tokens(tokens, positions)
  expert_records.check_experts(experts, tokens, config)
  tree = prompt_tree.of_sequences(*tokens.shape)
  access = uncached_access(config, tree, experts, kv_dtype)
  return all_logits.run(params, tokens, positions, (), access, None, config)[0]
