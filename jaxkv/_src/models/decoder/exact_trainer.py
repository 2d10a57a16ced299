"""Uncached attention that is bit-identical to paged attention.

A trainer has no cache. But with `numerics="exact"`, each of its calls writes
keys and values to temporary pages and runs the paged attention of rollouts. So
a trainer sums the same products in the same order as a rollout.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.exact import gradient
from jaxkv._src.kv.attend import attend
from jaxkv._src.kv.kv_pages import init as init_pages
from jaxkv._src.kv.view import View
from jaxkv._src.kv.write import write
from jaxkv._src.models.decoder import kv_access
from jaxkv._src.models.decoder.attention import LatentInputs
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import LatentAttention
from jaxkv._src.models.decoder.kv_access import Mixer
from jaxkv._src.models.decoder.kv_access import MixerOutput
from jaxkv._src.models.decoder.kv_access import Pools
from jaxkv._src.models.decoder.kv_access import UncachedKV
from jaxkv._src.models.decoder.numerics import is_exact
from jaxkv._src.models.decoder.numerics import token_wise
from jaxkv._src.models.decoder.params import Params
from jaxkv._src.models.decoder.prompt_tree import Tree

_PAGE_SIZE = 16
"""Tokens per page. Rollouts on a GPU or TPU must use the same page size,
because rounding depends on it there. On a CPU it does not affect rounding."""


def uncached_access(
  config: Decoder, tree: Tree, experts: jax.Array | None, kv_dtype: Any
) -> UncachedKV:
  """Returns the `UncachedKV` for a decoder's numerics.

  See `forward_uncached` for `kv_dtype`.
  """
  if not is_exact(config):
    if kv_dtype is not None:
      raise ValueError(
        f'`kv_dtype` must be None with numerics="fast", got {kv_dtype!r}.'
      )
    return UncachedKV(tree, experts)
  dtype = config.dtype if kv_dtype is None else kv_dtype
  return ExactUncachedKV(tree, experts, dtype=dtype, decoder=config)


@dataclasses.dataclass(frozen=True)
class ExactUncachedKV(UncachedKV):
  """An `UncachedKV` whose outputs are bit-identical to those of a `PagedKV`.

  Gradients are those of `UncachedKV`.

  Attributes:
    dtype: dtype of keys and values in pages, see `jaxkv.kv.init`.
    decoder: the decoder.
  """

  dtype: Any = dataclasses.field(kw_only=True)
  decoder: Decoder = dataclasses.field(kw_only=True)

  def attend(
    self,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    sinks: jax.Array | None = None,
    **numbers: Any,
  ) -> jax.Array:
    """See `UncachedKV`."""

    # `with_gradient` requires functions that close over no arrays, so both
    # functions take the tree as an argument.
    def exact(tree: Any, q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
      options = kernels.AttentionOptions(sinks=sinks, **numbers)
      return _attend_tree(tree, q, k, v, options=options, dtype=self.dtype)

    def fast(tree: Any, q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
      return UncachedKV(tree).attend(q, k, v, sinks=sinks, **numbers)

    return gradient.with_gradient(exact, fast, self.tree, q, k, v, sinks)

  def latent(
    self, mixer: Mixer, inputs: LatentInputs, pools: Pools
  ) -> MixerOutput:
    """See `UncachedKV`."""
    attention: LatentAttention = mixer.kind
    call = token_wise(self.decoder)

    def exact(tree: Any, weights: Params, inputs: Any) -> jax.Array:
      queries = call(
        kv_access.latent_queries,
        weights["key"],
        inputs.plain_query,
        inputs.rotated_query,
      )
      scale = kv_access.scale_of(attention)
      out = _attend_tree(
        tree,
        queries,
        kv_access.cached_latents(inputs),
        None,
        options=kernels.AttentionOptions(scale=scale),
        dtype=self.dtype,
        value_dim=attention.latent_dim,
      )
      return call(kv_access.latent_values, weights["value"], out)

    def fast(tree: Any, weights: Params, inputs: Any) -> jax.Array:
      bound = mixer._replace(weights=weights)
      return UncachedKV(tree).latent(bound, inputs, ())[0]

    weights = {name: mixer.weights[name] for name in ("key", "value")}
    out: Any = gradient.with_gradient(exact, fast, self.tree, weights, inputs)
    return out, pools


def _attend_tree(
  tree: Tree, q: jax.Array, k: jax.Array, v: jax.Array | None, **options: Any
) -> jax.Array:
  """Computes causal attention in N trees."""
  outs = []
  # A rollout runs each branch as a separate sequence. To get the same bits, the
  # branch's keys are preceded by copies of its ancestors' keys.
  for level, queries in enumerate(tree.split(q)):
    if queries.size == 0:
      width = options.get("value_dim") or k.shape[3]
      outs.append(jnp.zeros((*queries.shape[:4], width), q.dtype))
      continue
    keys, values = (None if x is None else tree.paths(x, level) for x in (k, v))
    assert keys is not None
    rows = queries.reshape(-1, *queries.shape[2:])
    out = _attend(rows, keys, values, tree.starts[level].ravel(), **options)
    outs.append(out.reshape(*queries.shape[:3], *out.shape[2:]))
  return tree.join(outs)


def _attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array | None,
  starts: jax.Array,
  *,
  options: kernels.AttentionOptions,
  dtype: Any,
  value_dim: int | None = None,
) -> jax.Array:
  """Computes causal attention of Y consecutive tokens in each of Z sequences.

  The queries q [Z, Y, H, D] come after `starts`, int32[Z], tokens. `k` has the
  keys [Z, T, K, D] of all tokens, or latents, for which `v` is None. `dtype` is
  that of pages; see `jaxkv.kv.init` for `value_dim`.
  """
  rows, tokens, heads, dim = k.shape
  pages = -(-tokens // _PAGE_SIZE)
  # The sequences need one page less, but page 0 of a cache is the null page,
  # which is never written.
  config = CacheConfig(
    num_pages=rows * pages + 1,
    page_size=_PAGE_SIZE,
    num_slots=rows,
    pages_per_slot=pages,
  )
  pool = init_pages(
    config,
    num_layers=1,
    num_kv_heads=heads,
    head_dim=dim,
    dtype=dtype,
    value_dim=value_dim,
  )
  table = jnp.arange(1, rows * pages + 1, dtype=jnp.int32)
  zeros = jnp.zeros((rows,), jnp.int32)
  all_tokens = View(
    page_table=table.reshape(rows, pages),
    starts=zeros,
    num_tokens=zeros + tokens,
  )
  pool = write(pool, all_tokens, 0, *(x for x in (k, v) if x is not None))
  view = View(
    page_table=all_tokens.page_table,
    starts=starts,
    num_tokens=zeros + q.shape[1],
  )
  return attend(pool, view, 0, q, options=options, exact=True)
