"""Two ways to keep keys and values, which differ in nothing else.

| way        | where                                        | used for     |
|------------|----------------------------------------------|--------------|
| `Paged`    | pages (`jaxkv.kv`)                           | decoding     |
| `Nowhere`  | those of the same call                       | training     |

`Branches` (`branches`) is `Nowhere` for trees of tokens.
"""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels
from jaxkv._src.kv.attend import attend
from jaxkv._src.kv.expert_ids import ExpertIdPages
from jaxkv._src.kv.expert_ids import write_tokens
from jaxkv._src.kv.view import AnyView
from jaxkv._src.kv.view import PackedView
from jaxkv._src.kv.write import write
from jaxkv._src.models.decoder import states
from jaxkv._src.models.decoder.attention import Latents
from jaxkv._src.models.decoder.attention import Softmax
from jaxkv._src.models.decoder.causal_attention import attend_causal
from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import LatentAttention
from jaxkv._src.models.decoder.numerics import Each
from jaxkv._src.models.decoder.params import Params


class Place(NamedTuple):
  """Where a layer keeps what it keeps.

  Attributes:
    group: the layer group of the cache.
    layer: int32[], the memory layer.
    pool: which pool of the memory.
    routed: int32[], its number among the layers with experts.
  """

  group: int
  layer: jax.Array | int
  pool: int
  routed: jax.Array | int = 0


class Mixer(NamedTuple):
  """The part of a layer in which tokens look at each other.

  Attributes:
    kind: its sizes.
    place: where it keeps what it keeps.
    weights: of the layer.
  """

  kind: Any
  place: Place
  weights: Params


Memory = tuple[Any, ...]
Read = tuple[jax.Array, Memory]
"""What tokens read, [B, T, H, X], and the memory."""


def _at_once(function: Any, weights: Any, *arrays: Any) -> Any:
  return function(weights, *arrays)


@dataclasses.dataclass(frozen=True)
class Paged:
  """Keys and values in pages.

  Attributes:
    views: of each layer group.
    backend: see `jaxkv.kv.attend`.
    heads: see `jaxkv.kv.attend`.
    experts: see `Nowhere`.
    exact: see `jaxkv.kv.attend`.
    each: see `numerics.token_wise`.
  """

  views: tuple[AnyView, ...]
  backend: str
  heads: jax.sharding.NamedSharding | None
  experts: jax.Array | None = None
  exact: bool = False
  each: Each = _at_once

  def softmax(self, mixer: Mixer, seen: Softmax, memory: Memory) -> Read:
    """Keeps keys and values; what queries read of those up to their own."""
    place = mixer.place
    view = self.views[place.group]
    pool = write(memory[place.pool], view, place.layer, seen.k, seen.v)
    out = attend(
      pool,
      view,
      place.layer,
      seen.q,
      options=kernels.AttentionOptions(**_options(mixer)),
      exact=self.exact,
      backend=self.backend,
      heads=self.heads,
    )
    return out, with_pool(memory, place.pool, pool)

  def latent(self, mixer: Mixer, seen: Latents, memory: Memory) -> Read:
    """Keeps latents; see `Nowhere.latent`.

    Queries are multiplied by the projection of the keys, so that no key is
    made.
    """
    place, weights = mixer.place, mixer.weights
    view = self.views[place.group]
    pool = write(memory[place.pool], view, place.layer, vectors(seen))
    out = attend(
      pool,
      view,
      place.layer,
      self.each(absorbed, weights["key"], seen.plain, seen.turned),
      options=kernels.AttentionOptions(scale=scale_of(mixer.kind)),
      exact=self.exact,
      backend=self.backend,
    )
    out = self.each(values_of_latents, weights["value"], out)
    return out, with_pool(memory, place.pool, pool)

  def recurrent(
    self,
    mixer: Mixer,
    run: states.Run,
    inputs: tuple[jax.Array, ...],
    memory: Memory,
  ) -> Read:
    """Keeps states; see `Nowhere.recurrent`.

    In a `PackedView` no row of the prefill may go past the end of a page; a
    rollout keeps to that.
    """
    place = mixer.place
    pool, view = memory[place.pool], self.views[place.group]
    if isinstance(view, PackedView):
      out, pool = states.packed(run, inputs, pool, view, place.layer)
    else:
      out, pool = states.by_page(run, inputs, pool, view, place.layer)
    return out, with_pool(memory, place.pool, pool)

  def routed(self, place: Place, used: jax.Array, memory: Memory) -> Memory:
    """Keeps the experts int32[B, T, k] that tokens used, if it has pages."""
    pool = memory[-1]
    if not isinstance(pool, ExpertIdPages):
      return memory
    view = self.views[pool.group]
    pool = write_tokens(pool, view, place.routed, used)
    return (*memory[:-1], pool)


@dataclasses.dataclass(frozen=True)
class Nowhere:
  """No memory of tokens: they attend to those of the same call.

  Attributes:
    experts: signed integers [B, T, J, k], experts that tokens must use; None
      for none.
  """

  experts: jax.Array | None = None

  def softmax(self, mixer: Mixer, seen: Softmax, memory: Memory) -> Read:
    """What queries read of keys and values up to their own."""
    return self.attend(seen.q, seen.k, seen.v, **_options(mixer)), memory

  def attend(
    self, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any
  ) -> jax.Array:
    """What queries of all tokens read of all tokens: [B, T, H, X].

    Args:
      q: [B, T, H, D].
      k: [B, T, K, D].
      v: [B, T, K, X].
      **options: see `attend_causal`.
    """
    return attend_causal(q, k, v, **options)

  def latent(self, mixer: Mixer, seen: Latents, memory: Memory) -> Read:
    """What queries read from latents, [B, T, H, value_dim]."""
    latent, rotated = seen.latent, seen.rotated
    keys = jnp.einsum("btl,lhd->bthd", latent, mixer.weights["key"])
    values = jnp.einsum("btl,lhv->bthv", latent, mixer.weights["value"])
    shape = (*keys.shape[:3], rotated.shape[3])
    keys = jnp.concatenate([keys, jnp.broadcast_to(rotated, shape)], axis=-1)
    query = jnp.concatenate([seen.plain, seen.turned], axis=-1)
    scale = scale_of(mixer.kind)
    return self.attend(query, keys, values, scale=scale), memory

  def recurrent(
    self,
    mixer: Mixer,
    run: states.Run,
    inputs: tuple[jax.Array, ...],
    memory: Memory,
  ) -> Read:
    """What a recurrence gives for tokens.

    Args:
      mixer: the recurrence.
      run: takes inputs [R, T, ...], states and counts int32[R]; returns outputs
        [R, T, ...] and the states after so many tokens.
      inputs: [B, T, ...] each.
      memory: none.

    Returns:
      [B, T, ...], and the memory.
    """
    rows, tokens = inputs[0].shape[:2]
    counts = jnp.full((rows,), tokens, jnp.int32)
    return run(inputs, states.zeros(mixer.kind, rows), counts)[0], memory

  def routed(self, place: Place, used: jax.Array, memory: Memory) -> Memory:
    """Keeps nothing of the experts that tokens used."""
    del place, used
    return memory


def vectors(seen: Latents) -> jax.Array:
  """What pages hold of latents: [B, T, 1, latent_dim + rotated_dim]."""
  return jnp.concatenate([seen.latent[:, :, None], seen.rotated], axis=-1)


def absorbed(
  weights: jax.Array, plain: jax.Array, turned: jax.Array
) -> jax.Array:
  """Queries [B, T, H, D] of latents."""
  absorbed = jnp.einsum("bthd,lhd->bthl", plain, weights)
  return jnp.concatenate([absorbed, turned], axis=-1)


def values_of_latents(weights: jax.Array, out: jax.Array) -> jax.Array:
  """What queries read of latents as values, [B, T, H, value_dim]."""
  return jnp.einsum("bthl,lhv->bthv", out, weights)


def scale_of(attention: LatentAttention) -> float:
  """The factor of the logits."""
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


def with_pool(memory: Memory, number: int, pool: Any) -> Memory:
  """The memory with another pool in place of one."""
  return (*memory[:number], pool, *memory[number + 1 :])
