"""Keys and values of a call in pages of its own, read as in a rollout.

A trainer has no cache. With `numerics="exact"` its tokens go through pages all
the same, so that they meet the same products in the same order.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.exact import row_loop
from jaxkv._src.kv.attend import attend
from jaxkv._src.kv.memory import init as init_pages
from jaxkv._src.kv.view import View
from jaxkv._src.kv.write import write
from jaxkv._src.models.decoder import memories
from jaxkv._src.models.decoder.attention import Latents
from jaxkv._src.models.decoder.branches import Branches
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import LatentAttention
from jaxkv._src.models.decoder.memories import Memory
from jaxkv._src.models.decoder.memories import Mixer
from jaxkv._src.models.decoder.memories import Nowhere
from jaxkv._src.models.decoder.memories import Read
from jaxkv._src.models.decoder.numerics import Each
from jaxkv._src.models.decoder.numerics import is_exact
from jaxkv._src.models.decoder.numerics import token_wise
from jaxkv._src.models.decoder.params import Params
from jaxkv._src.models.decoder.trees import Tree

_PAGE_SIZE = 16


def memory_within(
  config: Decoder,
  experts: jax.Array | None,
  *,
  tree: Tree | None = None,
  kv_dtype: Any = None,
) -> Nowhere:
  """The memory of tokens that attend to those of the same call.

  Args:
    config: the decoder.
    experts: see `Nowhere`.
    tree: where the tokens stand; None for rows of one sequence each.
    kv_dtype: see `forward_uncached`.

  Raises:
    ValueError: `kv_dtype` is given in vain.
  """
  if not is_exact(config):
    if kv_dtype is not None:
      raise ValueError(
        f'`kv_dtype` must be None with numerics="fast", got {kv_dtype!r}.'
      )
    if tree is None:
      return Nowhere(experts)
    return Branches(experts, tree=tree)
  own: Any = {
    "dtype": config.dtype if kv_dtype is None else kv_dtype,
    "each": token_wise(config),
  }
  if tree is None:
    return OwnPages(experts, **own)
  return BranchesInPages(experts, tree=tree, **own)


@dataclasses.dataclass(frozen=True)
class OwnPages(Nowhere):
  """Like `Nowhere`, with the numbers that tokens have in `memories.Paged`.

  Gradients are those of `Nowhere`.

  Attributes:
    dtype: in which pages keep keys and values.
    each: see `numerics.token_wise`.
  """

  dtype: Any = dataclasses.field(kw_only=True)
  each: Each = dataclasses.field(kw_only=True)

  @property
  def _tree(self) -> Tree | None:
    return None

  def attend(
    self,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    sinks: jax.Array | None = None,
    **numbers: Any,
  ) -> jax.Array:
    """See `Nowhere`."""

    def exact(tree: Any, q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
      options = kernels.AttentionOptions(sinks=sinks, **numbers)
      return _read(tree, q, k, v, options=options, dtype=self.dtype)

    def like(tree: Any, q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
      return _fast(tree).attend(q, k, v, sinks=sinks, **numbers)

    return row_loop.with_gradient(exact, like, self._tree, q, k, v, sinks)

  def latent(self, mixer: Mixer, seen: Latents, memory: Memory) -> Read:
    """See `Nowhere`."""
    attention: LatentAttention = mixer.kind

    def exact(tree: Any, weights: Params, seen: Any) -> jax.Array:
      scale = memories.scale_of(attention)
      out = _read(
        tree,
        self.each(memories.absorbed, weights["key"], seen.plain, seen.turned),
        memories.vectors(seen),
        None,
        options=kernels.AttentionOptions(scale=scale),
        dtype=self.dtype,
        value_dim=attention.latent_dim,
      )
      return self.each(memories.values_of_latents, weights["value"], out)

    def like(tree: Any, weights: Params, seen: Any) -> jax.Array:
      same = mixer._replace(weights=weights)
      return _fast(tree).latent(same, seen, ())[0]

    own = {name: mixer.weights[name] for name in ("key", "value")}
    out: Any = row_loop.with_gradient(exact, like, self._tree, own, seen)
    return out, memory


@dataclasses.dataclass(frozen=True)
class BranchesInPages(OwnPages, Branches):
  """Like `branches.Branches`, with the numbers of `memories.Paged`."""

  @property
  def _tree(self) -> Tree | None:
    return self.tree


def _fast(tree: Tree | None) -> Nowhere:
  """The memory whose gradients are taken."""
  return Nowhere() if tree is None else Branches(tree=tree)


def _read(
  tree: Tree | None,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array | None,
  **options: Any,
) -> jax.Array:
  """What queries [N, T, H, D] read of tokens up to their own."""
  if tree is None:
    zeros = jnp.zeros(q.shape[:1], jnp.int32)
    return _attend(q, k, v, zeros, **options)
  outs = []
  for level, own in enumerate(tree.split(q)):
    if own.size == 0:
      width = options.get("value_dim") or k.shape[3]
      outs.append(jnp.zeros((*own.shape[:4], width), q.dtype))
      continue
    keys, values = (None if x is None else tree.paths(x, level) for x in (k, v))
    assert keys is not None
    queries = own.reshape(-1, *own.shape[2:])
    out = _attend(queries, keys, values, tree.starts[level].ravel(), **options)
    outs.append(out.reshape(*own.shape[:3], *out.shape[2:]))
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
  """Causal attention of the last tokens of Z sequences.

  Args:
    q: [Z, Y, H, D], queries of Y tokens.
    k: [Z, T, K, D], keys of all tokens.
    v: [Z, T, K, D]; None for latents.
    starts: int32[Z], the tokens before the queries'.
    options: see `jaxkv.kv.attend`.
    dtype: in which keys and values are kept.
    value_dim: of latents, see `jaxkv.kv.init`.

  Returns:
    [Z, Y, H, D], of latents [Z, Y, H, value_dim].
  """
  rows, tokens, heads, dim = k.shape
  pages = -(-tokens // _PAGE_SIZE)
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
  whole = View(
    page_table=table.reshape(rows, pages),
    starts=zeros,
    counts=zeros + tokens,
  )
  pool = write(pool, whole, 0, *(x for x in (k, v) if x is not None))
  view = View(
    page_table=whole.page_table, starts=starts, counts=zeros + q.shape[1]
  )
  return attend(pool, view, 0, q, options=options, exact=True)
