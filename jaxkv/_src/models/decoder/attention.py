"""What attention makes of tokens: projections, norms, rotations, outputs."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._src.models.decoder import delta_net
from jaxkv._src.models.decoder import rope as ropes
from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import DeltaNet
from jaxkv._src.models.decoder.description import LatentAttention
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.decoder.description import Stack
from jaxkv._src.models.decoder.memories import Place
from jaxkv._src.models.decoder.norms import rms_norm
from jaxkv._src.models.decoder.params import Params

Rotations = dict[tuple[ropes.Rope, int], tuple[jax.Array, jax.Array]]


def rotations(decoder: Stack, positions: jax.Array) -> Rotations:
  """The angles of all layers, each once, of positions int32[B, T]."""
  wanted = dict.fromkeys(
    key for layer in decoder.layers if (key := _rotation_of(layer)) is not None
  )
  return {
    (rope, dim): ropes.rotation(rope, dim, positions) for rope, dim in wanted
  }


def _rotation_of(layer: Layer) -> tuple[ropes.Rope, int] | None:
  attention = layer.attention
  if isinstance(attention, LatentAttention):
    return attention.rope, attention.rotated_dim
  if isinstance(attention, Attention) and attention.rope is not None:
    return attention.rope, attention.head_dim
  return None


def softmax(
  x: jax.Array,
  weights: Params,
  attention: Attention,
  place: Place,
  turned: Rotations,
  keep: Any,
  memory: tuple[Any, ...],
  decoder: Stack,
) -> tuple[jax.Array, tuple[Any, ...]]:
  """[B, T, E] of normed [B, T, E]: softmax attention.

  Args:
    x: the tokens.
    weights: of the layer.
    attention: its sizes.
    place: where it keeps keys and values.
    turned: from `rotations`.
    keep: one of `memories`.
    memory: its arrays.
    decoder: for norms.
  """
  q = _queries(x, weights, attention, decoder)
  k, v = keys_and_values(x, weights, attention, decoder)
  if attention.rope is not None:
    angles = turned[attention.rope, attention.head_dim]
    q = ropes.rotate(q, angles, attention.rope)
    k = ropes.rotate(k, angles, attention.rope)
  out, memory = keep.softmax(attention, place, weights, q, k, v, memory)
  return _output(out, x, weights, attention), memory


def cross(
  x: jax.Array,
  weights: Params,
  attention: Attention,
  place: Place,
  keep: Any,
  memory: tuple[Any, ...],
  decoder: Stack,
) -> jax.Array:
  """[B, T, E] of normed [B, T, E]: attention to all tokens of an encoder.

  Args:
    x: the tokens.
    weights: of the layer's cross-attention, from `cross_weights`.
    attention: its sizes.
    place: where its keys and values are kept.
    keep: one of `memories`.
    memory: its arrays.
    decoder: for norms.
  """

  def project(encoded: jax.Array) -> tuple[jax.Array, jax.Array]:
    return keys_and_values(encoded, weights, attention, decoder)

  q = _queries(x, weights, attention, decoder)
  out = keep.cross(attention, place, weights, q, project, memory)
  return _output(out, x, weights, attention)


def cross_weights(weights: Params) -> Params:
  """The weights of a layer's cross-attention, named like those of others."""
  own = "cross_"
  return {
    name.removeprefix(own): leaf
    for name, leaf in weights.items()
    if name.startswith(own)
  }


def _queries(
  x: jax.Array, weights: Params, attention: Attention, decoder: Stack
) -> jax.Array:
  """[B, T, H, D], not rotated yet."""
  q = jnp.einsum("bte,ehd->bthd", x, weights["query"])
  if attention.biased:
    q = q + weights["query_bias"][None, None]
  if attention.query_key_norm:
    eps, offset = decoder.norm_eps, decoder.norm_offset
    q = rms_norm(q, weights["query_norm"], eps, offset)
  return q


def keys_and_values(
  x: jax.Array, weights: Params, attention: Attention, decoder: Stack
) -> tuple[jax.Array, jax.Array]:
  """[B, T, K, D] each, not rotated yet."""
  k = jnp.einsum("bte,ekd->btkd", x, weights["key"])
  v = jnp.einsum("bte,ekd->btkd", x, weights["value"])
  if attention.biased:
    k = k + weights["key_bias"][None, None]
    v = v + weights["value_bias"][None, None]
  if attention.query_key_norm:
    eps, offset = decoder.norm_eps, decoder.norm_offset
    k = rms_norm(k, weights["key_norm"], eps, offset)
  return k, v


def _output(
  out: jax.Array, x: jax.Array, weights: Params, attention: Attention
) -> jax.Array:
  """[B, T, E] of what queries read [B, T, H, D], from tokens x."""
  out = out.astype(x.dtype)
  if attention.gated:
    gate = jnp.einsum("bte,ehd->bthd", x, weights["query_gate"])
    out = out * jax.nn.sigmoid(gate)
  out = jnp.einsum("bthd,hde->bte", out, weights["output"])
  if attention.output_biased:
    out = out + weights["output_bias"][None, None]
  return out


def latent(
  x: jax.Array,
  weights: Params,
  attention: LatentAttention,
  place: Place,
  turned: Rotations,
  keep: Any,
  memory: tuple[Any, ...],
  decoder: Stack,
) -> tuple[jax.Array, tuple[Any, ...]]:
  """Like `softmax`: multi-head latent attention."""
  eps, offset = decoder.norm_eps, decoder.norm_offset
  down = x
  if attention.query_rank is not None:
    down = jnp.einsum("bte,er->btr", x, weights["query_down"])
    down = rms_norm(down, weights["query_norm"], eps, offset)
  q = jnp.einsum("btr,rhd->bthd", down, weights["query"])
  both = jnp.einsum("bte,el->btl", x, weights["latent"])
  kept = rms_norm(
    both[..., : attention.latent_dim], weights["latent_norm"], eps, offset
  )
  rotated = both[:, :, None, attention.latent_dim :]
  plain, q_rotated = jnp.split(q, [attention.plain_dim], axis=-1)
  angles = turned[attention.rope, attention.rotated_dim]
  q_rotated = ropes.rotate(q_rotated, angles, attention.rope)
  rotated = ropes.rotate(rotated, angles, attention.rope)
  out, memory = keep.latent(
    attention, place, weights, (plain, q_rotated), kept, rotated, memory
  )
  out = jnp.einsum("bthv,hve->bte", out.astype(x.dtype), weights["output"])
  return out, memory


def recurrent(
  x: jax.Array,
  weights: Params,
  attention: DeltaNet,
  place: Place,
  turned: Rotations,
  keep: Any,
  memory: tuple[Any, ...],
  decoder: Stack,
) -> tuple[jax.Array, tuple[Any, ...]]:
  """Like `softmax`: the gated delta rule, as in Qwen3-Next."""
  del turned
  a, (rows, tokens) = attention, x.shape[:2]
  mixed = [
    jnp.einsum("bte,ehd->bthd", x, weights[name]).reshape(rows, tokens, -1)
    for name in ("query", "key", "value")
  ]
  beta = jax.nn.sigmoid(jnp.einsum("bte,eh->bth", x, weights["beta"]))
  decay = delta_net.log_decay(
    jnp.einsum("bte,eh->bth", x, weights["decay"]),
    weights["decay_log"],
    weights["decay_bias"],
  )

  def run(
    inputs: tuple[jax.Array, ...], states: dict[str, jax.Array], counts: Any
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    channels, beta, decay = inputs
    channels, last = delta_net.causal_conv(
      channels, weights["convolution"], states["convolution"], counts
    )
    channels = jax.nn.silu(channels)
    keys = a.num_key_heads * a.key_dim
    parts = jnp.split(channels, [keys, 2 * keys], axis=-1)
    heads = (a.num_key_heads, a.num_key_heads, a.num_value_heads)
    q, k, v = (
      part.reshape(*part.shape[:2], count, -1)
      for part, count in zip(parts, heads, strict=True)
    )
    q, k = delta_net.l2_normalized(q), delta_net.l2_normalized(k)
    out, delta = delta_net.gated_delta_rule(
      q, k, v, decay, beta, states["delta"], counts
    )
    return out, {"convolution": last, "delta": delta}

  inputs = (jnp.concatenate(mixed, axis=-1), beta, decay)
  out, memory = keep.recurrent(attention, place, run, inputs, memory)
  out = rms_norm(out, weights["output_norm"], decoder.norm_eps)
  gate = jnp.einsum("bte,ehv->bthv", x, weights["output_gate"])
  out = out.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
  out = jnp.einsum("bthv,hve->bte", out.astype(x.dtype), weights["output"])
  return out, memory
