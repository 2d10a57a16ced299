"""Reads and writes the keys and values of a layer, or its recurrent state.

| class        | keys and values         | used for |
|--------------|-------------------------|----------|
| `PagedKV`    | in pages (`jaxkv.kv`)   | decoding |
| `UncachedKV` | those of the same call  | training |

A layer calls the same methods of both classes. `attention` defines the letters
of axes. Without a cache, each row of tokens is a tree (see `prompt_tree`). A
whole sequence is a tree of one branch.
"""

import dataclasses
from typing import Any
from typing import ClassVar
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels
from jaxkv._src.kv.attend import attend
from jaxkv._src.kv.expert_ids import ExpertIdPages
from jaxkv._src.kv.expert_ids import write_expert_ids
from jaxkv._src.kv.view import AnyView
from jaxkv._src.kv.view import PackedView
from jaxkv._src.kv.write import write
from jaxkv._src.models.decoder import recurrent_pages
from jaxkv._src.models.decoder import tree_attention
from jaxkv._src.models.decoder.attention import LatentInputs
from jaxkv._src.models.decoder.attention import SoftmaxInputs
from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import LatentAttention
from jaxkv._src.models.decoder.numerics import is_exact
from jaxkv._src.models.decoder.numerics import token_wise
from jaxkv._src.models.decoder.params import Params
from jaxkv._src.models.decoder.prompt_tree import Tree


class Location(NamedTuple):
  """The place of a layer in the memory of a decoder.

  Attributes:
    group: index of the layer group (see `groups`).
    layer: int32[], the memory layer: the part of each page that holds this
      layer's data (see `groups`).
    pool: index of the pool that has the group's pages.
    expert_layer: int32[], index of the layer among the layers with experts.
  """

  group: int
  layer: jax.Array | int
  pool: int
  expert_layer: jax.Array | int = 0


class Mixer(NamedTuple):
  """The token mixer of a layer: attention or a recurrence.

  Attributes:
    kind: an `Attention`, a `LatentAttention` or a `DeltaNet`.
    location: the place of the layer's keys and values, or of its state.
    weights: parameters of the layer.
  """

  kind: Any
  location: Location
  weights: Params


Pools = tuple[Any, ...]
"""The pools of all layers; an empty tuple without a cache."""

MixerOutput = tuple[jax.Array, Pools]
"""The mixer's output [B, T, H, X], before the projection, and the pools."""


@dataclasses.dataclass(frozen=True)
class PagedKV:
  """Keys and values in pages.

  Attributes:
    views: one view per layer group, which maps tokens to pages.
    backend: see `jaxkv.kv.attend`.
    head_sharding: see `jaxkv.kv.attend`.
    experts: see `UncachedKV`.
    decoder: the decoder, whose numerics apply.
    expert_axis: see `forward`.
  """

  views: tuple[AnyView, ...]
  backend: str
  head_sharding: jax.sharding.NamedSharding | None
  experts: jax.Array | None
  decoder: Decoder
  expert_axis: str | None = None

  def softmax(
    self, mixer: Mixer, inputs: SoftmaxInputs, pools: Pools
  ) -> MixerOutput:
    """Writes keys and values, and then computes causal attention."""
    options = kernels.AttentionOptions(**_options(mixer))
    stored = (inputs.k, inputs.v)
    return self._attend(mixer.location, stored, inputs.q, options, pools)

  def latent(
    self, mixer: Mixer, inputs: LatentInputs, pools: Pools
  ) -> MixerOutput:
    """Writes latents and attends to them; see `UncachedKV.latent`."""
    weights = mixer.weights
    call = token_wise(self.decoder)
    # The key projection is applied to the queries (DeepSeek-V2, section 2.1.2),
    # so that attention reads latents and never builds keys.
    queries = call(
      latent_queries, weights["key"], inputs.plain_query, inputs.rotated_query
    )
    options = kernels.AttentionOptions(scale=scale_of(mixer.kind))
    stored = (cached_latents(inputs),)
    out, pools = self._attend(mixer.location, stored, queries, options, pools)
    return call(latent_values, weights["value"], out), pools

  def _attend(
    self,
    location: Location,
    stored: tuple[jax.Array, ...],
    queries: jax.Array,
    options: kernels.AttentionOptions,
    pools: Pools,
  ) -> MixerOutput:
    pool = pools[location.pool]
    view = self.views[location.group]
    # `write` comes first, because tokens of a call attend to each other.
    pool = write(pool, view, location.layer, *stored)
    out = attend(
      pool,
      view,
      location.layer,
      queries,
      options=options,
      exact=is_exact(self.decoder),
      backend=self.backend,
      head_sharding=self.head_sharding,
    )
    return out, _with_pool(pools, location.pool, pool)

  def recurrent(
    self,
    mixer: Mixer,
    run: recurrent_pages.Recurrence,
    inputs: tuple[jax.Array, ...],
    pools: Pools,
  ) -> MixerOutput:
    """Reads states, runs a recurrence from them, and writes the new states."""
    location = mixer.location
    pool = pools[location.pool]
    view = self.views[location.group]
    layer = location.layer
    # A packed call writes only one state for each sequence. So without moving
    # states, the tokens of a sequence must not cross the end of a page, which
    # must hold the state there. Rollouts schedule prompts accordingly.
    if isinstance(view, PackedView):
      # Exact numerics run token by token, and all rows together.
      out, pool = recurrent_pages.run_packed(
        run, inputs, pool, view, layer, by_rows=is_exact(self.decoder)
      )
    else:
      out, pool = recurrent_pages.run_rows(run, inputs, pool, view, layer)
    return out, _with_pool(pools, location.pool, pool)

  def record_experts(
    self, location: Location, experts: jax.Array, pools: Pools
  ) -> Pools:
    """Writes expert ids int32[B, T, k] if `pools` ends with `ExpertIdPages`."""
    pool = pools[-1]
    if not isinstance(pool, ExpertIdPages):
      return pools
    # All layers' ids are in pages of one group, whichever group a layer is in.
    view = self.views[pool.group]
    pool = write_expert_ids(pool, view, location.expert_layer, experts)
    return (*pools[:-1], pool)


@dataclasses.dataclass(frozen=True)
class UncachedKV:
  """Keys and values of the same call, without a cache.

  Attributes:
    tree: the layout of the trees in rows.
    experts: signed integers [B, T, J, k], the k experts that each token must
      use in each of the J layers with experts (see `expert_records`); None lets
      the router choose.
  """

  tree: Tree
  experts: jax.Array | None = None
  # A trainer has all experts on each device.
  expert_axis: ClassVar[None] = None

  def softmax(
    self, mixer: Mixer, inputs: SoftmaxInputs, pools: Pools
  ) -> MixerOutput:
    """Computes causal attention to the keys and values of the call."""
    out = self.attend(inputs.q, inputs.k, inputs.v, **_options(mixer))
    return out, pools

  def attend(
    self, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any
  ) -> jax.Array:
    """Computes causal attention [B, T, H, X], see `tree_attention.attend`."""
    return tree_attention.attend(self.tree, q, k, v, **options)

  def latent(
    self, mixer: Mixer, inputs: LatentInputs, pools: Pools
  ) -> MixerOutput:
    """Attends to keys and values projected from latents."""
    rotated = inputs.rotated_key
    # `PagedKV` attends to the latents themselves, which are wider than keys.
    # Without a cache many queries read each key, so it costs less to build the
    # keys once.
    keys = jnp.einsum("btl,lhd->bthd", inputs.latent, mixer.weights["key"])
    values = jnp.einsum("btl,lhv->bthv", inputs.latent, mixer.weights["value"])
    shape = (*keys.shape[:3], rotated.shape[3])
    keys = jnp.concatenate([keys, jnp.broadcast_to(rotated, shape)], axis=-1)
    query = (inputs.plain_query, inputs.rotated_query)
    query = jnp.concatenate(query, axis=-1)
    return self.attend(query, keys, values, scale=scale_of(mixer.kind)), pools

  def recurrent(
    self,
    mixer: Mixer,
    run: recurrent_pages.Recurrence,
    inputs: tuple[jax.Array, ...],
    pools: Pools,
  ) -> MixerOutput:
    """Runs a recurrence; a branch starts from its parent's final state."""
    tree = self.tree
    outputs = []
    states = recurrent_pages.empty_state(mixer.kind, inputs[0].shape[0])
    levels = zip(*(tree.split(array) for array in inputs), strict=True)
    for level, arrays in enumerate(levels):
      shape = arrays[0].shape[:3]
      rows = tuple(x.reshape(-1, *x.shape[2:]) for x in arrays)
      times = tree.branches[level] // tree.branches[max(level - 1, 0)]
      states = jax.tree.map(lambda x, n=times: jnp.repeat(x, n, 0), states)
      # At the last level, a length can count a token that has no column; see
      # `Tree.lengths`.
      num_tokens = jnp.minimum(tree.lengths[level], tree.widths[level]).ravel()
      out, states = run(rows, states, num_tokens)
      outputs.append(out.reshape(*shape, *out.shape[2:]))
    return tree.join(outputs), pools

  def record_experts(
    self, location: Location, experts: jax.Array, pools: Pools
  ) -> Pools:
    """Returns the pools unchanged, because no pages are written."""
    del location, experts
    return pools


def cached_latents(inputs: LatentInputs) -> jax.Array:
  """Returns the vectors to write: [B, T, 1, latent_dim + rotated_dim]."""
  return jnp.concatenate(
    [inputs.latent[:, :, None], inputs.rotated_key], axis=-1
  )


def latent_queries(
  weights: jax.Array, plain: jax.Array, rotated: jax.Array
) -> jax.Array:
  """Projects queries to the space of cached latents, see `cached_latents`."""
  absorbed = jnp.einsum("bthd,lhd->bthl", plain, weights)
  return jnp.concatenate([absorbed, rotated], axis=-1)


def latent_values(weights: jax.Array, out: jax.Array) -> jax.Array:
  """Projects attention's output [B, T, H, latent_dim] to [B, T, H, X]."""
  return jnp.einsum("bthl,lhv->bthv", out, weights)


def scale_of(attention: LatentAttention) -> float:
  """Returns the factor of the attention logits."""
  if attention.scale is not None:
    return attention.scale
  return (attention.plain_dim + attention.rotated_dim) ** -0.5


def _options(mixer: Mixer) -> dict[str, Any]:
  attention: Attention = mixer.kind
  return {
    "window": attention.window,
    "scale": attention.scale,
    "soft_cap": attention.soft_cap,
    "sinks": mixer.weights.get("sinks"),
  }


def _with_pool(pools: Pools, index: int, pool: Any) -> Pools:
  """Returns a copy of `pools` in which `pool` replaces item `index`."""
  return (*pools[:index], pool, *pools[index + 1 :])
