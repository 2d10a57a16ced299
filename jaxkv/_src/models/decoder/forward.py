"""The decoder: one function of tokens, with two ways to keep what it reads.

| function           | keys and values                   | used for         |
|--------------------|-----------------------------------|------------------|
| `forward`          | paged memory (`jaxkv.kv`)         | decoding         |
| `forward_uncached` | those of the same call, no memory | training         |

`grouped_log_probs` (`grouped`) trains on sequences that share prompts.

Dimension letters besides the project's own (B rows, T tokens, H query heads, K
key-value heads, D head size, L layers): V vocabulary, J layers with experts, k
experts of a token in each.
"""

import functools
from typing import Any

import jax

from jaxkv._src.kv.memory import KVPages
from jaxkv._src.kv.shared_prefix import refresh_shared
from jaxkv._src.kv.view import PackedView
from jaxkv._src.kv.view import View
from jaxkv._src.models.decoder import layout
from jaxkv._src.models.decoder import logits as all_logits
from jaxkv._src.models.decoder import memories
from jaxkv._src.models.decoder import routing
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.logits import Wanted
from jaxkv._src.models.decoder.memory import check_memory
from jaxkv._src.models.decoder.numerics import is_exact
from jaxkv._src.models.decoder.numerics import token_wise
from jaxkv._src.models.decoder.own_pages import memory_within
from jaxkv._src.models.decoder.params import Params

_AnyView = View | PackedView


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
  experts: jax.Array | None = None,
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
    experts: see `forward_uncached`. The experts that tokens use are kept in
      `kv` if it is of `init_kv(experts=True)`.

  Returns:
    (logits, kv): float32[B, P, V], where P is T, 1 or 0 for "all", "last"
    and "none"; the logits of tokens past a row's count are meaningless. With
    `columns`, float32[X, V].

  Raises:
    TypeError: `tokens` or `positions` are no array of integers.
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
    >>> view = View(page_table=jnp.array([[2, 1]]),
    ...                   starts=jnp.array([0]), counts=jnp.array([3]))
    >>> logits, kv = forward(
    ...   models.init_params(jax.random.key(0), config),
    ...   jnp.array([[3, 1, 4]]), jnp.array([[0, 1, 2]]),
    ...   models.init_kv(config, cache), view, config=config)
    >>> logits.shape
    (1, 3, 11)
  """
  del rows
  all_logits.check_tokens(tokens, positions)
  views = view if isinstance(view, tuple) else (view,)
  pools = kv if type(kv) is tuple else (kv,)
  check_memory(pools, views, config)
  counts = None if isinstance(views[0], PackedView) else views[0].counts
  kinds, numbers = layout.groups(config), layout.group_pools(config)
  seen: list[Any] = list(views)
  exact, each = is_exact(config), token_wise(config)
  for group, one in enumerate(views):
    single = isinstance(one, PackedView) or tokens.shape[1:] == (1,)
    pool, kind = pools[numbers[group]], kinds[group]
    shares = not kind.skips_pages and not exact
    if single and shares and _has_keys(pool):
      seen[group] = refresh_shared(pool, one)
  routing.check_experts(experts, tokens, config)
  keep = memories.Paged(tuple(seen), backend, heads, experts, exact, each)
  wanted = logits if columns is None else columns
  out, pools = all_logits.run(
    params, tokens, positions, pools, keep, counts, wanted, config
  )
  kv = pools if type(kv) is tuple else pools[0]
  return out if columns is None else out[0], kv


@functools.partial(jax.jit, static_argnames=("config", "kv_dtype"))
def forward_uncached(
  params: Params,
  tokens: jax.Array,
  positions: jax.Array,
  *,
  config: Decoder,
  experts: jax.Array | None = None,
  kv_dtype: Any = None,
) -> jax.Array:
  """Runs whole sequences; each token attends to all tokens up to itself.

  In layers with a window it attends to the last ones of them. Differentiable in
  `params`: this is the function to train. On several devices,
  call it in `jax.shard_map`, or under `jit` with a mesh whose axes are
  `AxisType.Auto`; see `grouped_log_probs`.

  With `experts` of those that drew the tokens it has the same experts, in
  whatever order new weights, or another rounding, would rank them (routing
  replay); their factors come from `params`.

  Args:
    params: as `init_params` returns.
    tokens: int32[B, T], each in 0 ... V - 1.
    positions: int32[B, T], for the rotations only; attention is causal, and
      windows count tokens, in the order of T.
    config: static; the decoder.
    experts: signed integers [B, T, J, k], the k experts that each token uses in
      each of the J layers with `Experts`, such as `jaxkv.rollout.generated`
      gives them. A token's k are all given, or all below 0: then they are
      chosen here. None: all are.
    kv_dtype: static; with `config.numerics` of "exact", in which format the
      pages of those that drew the tokens keep keys and values, as given to
      `init_kv`; None for that of the decoder.

  Returns:
    float32[B, T, V] logits. An expert that does not exist makes them NaN, for
    its token at least.

  Raises:
    TypeError: `tokens`, `positions` or `experts` are no array of integers.
    ValueError: an argument has another shape than the decoder's, is missing, or
      given in vain.

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
  routing.check_experts(experts, tokens, config)
  keep = memory_within(config, experts, kv_dtype=kv_dtype)
  return all_logits.run(
    params, tokens, positions, (), keep, None, "all", config
  )[0]


def _has_keys(pool: Any) -> bool:
  return isinstance(pool, KVPages) and pool.v is not None
