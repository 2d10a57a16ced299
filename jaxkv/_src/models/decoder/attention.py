"""Input and output projections of attention and recurrent layers.

A token mixer is attention or a recurrence, and runs in `kv_access`. For each
kind of mixer, a function `project_...` computes the mixer's inputs from x, the
layer's normalized input [B, T, E]. A function `output_...` projects the mixer's
output to [B, T, E]. Both kinds compute each token independently. Letters: B
sequences of T tokens, E embedding width, H query heads (value heads in a
`DeltaNet`), K key-value heads, D head size, X `value_dim`, C channels.

| kind              | result of `project_` | mixer's output |
|-------------------|----------------------|----------------|
| `Attention`       | `SoftmaxInputs`      | [B, T, H, D]   |
| `LatentAttention` | `LatentInputs`       | [B, T, H, X]   |
| `DeltaNet`        | `RecurrenceInputs`   | [B, T, H, X]   |
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv._src.models.decoder import delta_net
from jaxkv._src.models.decoder import rope as ropes
from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import DeltaNet
from jaxkv._src.models.decoder.description import LatentAttention
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.decoder.norms import rms_norm
from jaxkv._src.models.decoder.params import Params

Angles = tuple[jax.Array, jax.Array]
"""Cosines and sines of the rotary angles, from `rope.rotation`."""

Rotations = tuple[Angles, ...]
"""The `Angles` of each distinct rotary encoding of a decoder."""


class SoftmaxInputs(NamedTuple):
  """Queries, keys and values of a layer with `Attention`.

  Attributes:
    q: [B, T, H, D], queries, rotated if the layer has rotary positions.
    k: [B, T, K, D], keys, rotated like the queries.
    v: [B, T, K, D], values.
    gate: [B, T, H, D], a factor of attention's output; None for no gate.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  gate: jax.Array | None


class LatentInputs(NamedTuple):
  """Queries and latents of a layer with `LatentAttention`.

  Attributes:
    plain_query: [B, T, H, plain_dim], the part of queries without rotation.
    rotated_query: [B, T, H, rotated_dim], the rotated part of queries.
    latent: [B, T, latent_dim], from which keys and values are projected.
    rotated_key: [B, T, 1, rotated_dim], the rotated part of keys, which all
      heads share.
  """

  plain_query: jax.Array
  rotated_query: jax.Array
  latent: jax.Array
  rotated_key: jax.Array


class RecurrenceInputs(NamedTuple):
  """Inputs of the recurrence of a layer with `DeltaNet`.

  Attributes:
    channels: [B, T, C], queries, keys and values before the convolution.
    beta: [B, T, H], 0 .. 1, the share of the stored value to replace.
    decay: float32[B, T, H], logarithms of the state's decay factors.
    gate: float32[B, T, H, X], a factor of the recurrence's output.
  """

  channels: jax.Array
  beta: jax.Array
  decay: jax.Array
  gate: jax.Array


def rotations(decoder: Decoder, positions: jax.Array) -> Rotations:
  """Computes the angles of positions [B, T] for each distinct encoding."""
  return tuple(
    ropes.rotation(rope, dim, positions) for rope, dim in _encodings(decoder)
  )


def angles_of(
  layer: Layer, rotations: Rotations, decoder: Decoder
) -> Angles | None:
  """Returns a layer's angles, or None if it has no rotary positions."""
  key = _rotation_of(layer)
  return None if key is None else rotations[_encodings(decoder).index(key)]


@functools.cache
def _encodings(decoder: Decoder) -> tuple[tuple[ropes.Rope, int], ...]:
  """Returns the distinct rotary encodings, in the order of the layers."""
  # `Rotations` is a tuple in this order and not a dict with encodings as keys,
  # because jax sorts the keys of a dict, and a `Rope` has no order.
  keys = map(_rotation_of, decoder.layers)
  return tuple(dict.fromkeys(key for key in keys if key is not None))


def _rotation_of(layer: Layer) -> tuple[ropes.Rope, int] | None:
  attention = layer.attention
  if isinstance(attention, LatentAttention):
    return attention.rope, attention.rotated_dim
  if isinstance(attention, Attention) and attention.rope is not None:
    return attention.rope, attention.head_dim
  return None


def project_softmax(
  x: jax.Array,
  weights: Params,
  attention: Attention,
  angles: Angles | None,
  decoder: Decoder,
) -> SoftmaxInputs:
  """Projects x to the inputs of softmax attention."""
  q = jnp.einsum("bte,ehd->bthd", x, weights["query"])
  k = jnp.einsum("bte,ekd->btkd", x, weights["key"])
  v = jnp.einsum("bte,ekd->btkd", x, weights["value"])
  if attention.biased:
    q = q + weights["query_bias"][None, None]
    k = k + weights["key_bias"][None, None]
    v = v + weights["value_bias"][None, None]
  if attention.query_key_norm:
    eps = decoder.norm_eps
    offset = decoder.norm_offset
    q = rms_norm(q, weights["query_norm"], eps, offset)
    k = rms_norm(k, weights["key_norm"], eps, offset)
  if attention.rope is not None and angles is not None:
    q = ropes.rotate(q, angles, attention.rope)
    k = ropes.rotate(k, angles, attention.rope)
  gate = None
  if attention.gated:
    gate = jnp.einsum("bte,ehd->bthd", x, weights["query_gate"])
    gate = jax.nn.sigmoid(gate)
  return SoftmaxInputs(q, k, v, gate)


def output_softmax(
  out: jax.Array,
  gate: jax.Array | None,
  weights: Params,
  attention: Attention,
  dtype: jnp.dtype,
) -> jax.Array:
  """Projects attention's output [B, T, H, D] to [B, T, E]."""
  out = out.astype(dtype)
  if gate is not None:
    out = out * gate
  out = jnp.einsum("bthd,hde->bte", out, weights["output"])
  if attention.output_biased:
    out = out + weights["output_bias"][None, None]
  return out


def project_latents(
  x: jax.Array,
  weights: Params,
  attention: LatentAttention,
  angles: Angles,
  decoder: Decoder,
) -> LatentInputs:
  """Projects x to the inputs of multi-head latent attention."""
  eps = decoder.norm_eps
  offset = decoder.norm_offset
  compressed = x
  if attention.query_rank is not None:
    compressed = jnp.einsum("bte,er->btr", x, weights["query_down"])
    compressed = rms_norm(compressed, weights["query_norm"], eps, offset)
  q = jnp.einsum("btr,rhd->bthd", compressed, weights["query"])
  vectors = jnp.einsum("bte,el->btl", x, weights["latent"])
  # Only the latent is normalized, not the rotated part of the key.
  latent = rms_norm(
    vectors[..., : attention.latent_dim], weights["latent_norm"], eps, offset
  )
  rotated_key = vectors[:, :, None, attention.latent_dim :]
  plain_query, rotated_query = jnp.split(q, [attention.plain_dim], axis=-1)
  rotated_query = ropes.rotate(rotated_query, angles, attention.rope)
  rotated_key = ropes.rotate(rotated_key, angles, attention.rope)
  return LatentInputs(plain_query, rotated_query, latent, rotated_key)


def output_latents(
  out: jax.Array, weights: Params, dtype: jnp.dtype
) -> jax.Array:
  """Projects attention's output [B, T, H, X] to [B, T, E]."""
  return jnp.einsum("bthv,hve->bte", out.astype(dtype), weights["output"])


def project_recurrence(x: jax.Array, weights: Params) -> RecurrenceInputs:
  """Projects x to the inputs of the gated delta rule (Qwen3-Next)."""
  # Queries, keys and values are concatenated below, because one convolution
  # runs over the channels of all three.
  channels = [
    jnp.einsum("bte,ehd->bthd", x, weights[name]).reshape(*x.shape[:2], -1)
    for name in ("query", "key", "value")
  ]
  beta = jax.nn.sigmoid(jnp.einsum("bte,eh->bth", x, weights["beta"]))
  decay = delta_net.log_decay(
    jnp.einsum("bte,eh->bth", x, weights["decay"]),
    weights["decay_log"],
    weights["decay_bias"],
  )
  gate = jnp.einsum("bte,ehv->bthv", x, weights["output_gate"])
  # The gate is float32, because the reference code multiplies in float32.
  gate = jax.nn.silu(gate.astype(jnp.float32))
  channels = jnp.concatenate(channels, axis=-1)
  return RecurrenceInputs(channels, beta, decay, gate)


def recur(
  weights: Params,
  inputs: tuple[jax.Array, jax.Array, jax.Array],
  states: dict[str, jax.Array],
  num_tokens: jax.Array,
  *,
  attention: DeltaNet,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Runs the convolution and the delta rule, as a `token_loop.Recurrence`."""
  a = attention
  channels, beta, decay = inputs
  channels, conv_state = delta_net.causal_conv(
    channels, weights["convolution"], states["convolution"], num_tokens
  )
  channels = jax.nn.silu(channels)
  # `project_recurrence` concatenates queries, keys and values in this order.
  keys = a.num_key_heads * a.key_dim
  parts = jnp.split(channels, [keys, 2 * keys], axis=-1)
  heads = (a.num_key_heads, a.num_key_heads, a.num_value_heads)
  q, k, v = (
    part.reshape(*part.shape[:2], count, -1)
    for part, count in zip(parts, heads, strict=True)
  )
  # With keys of norm 1, an update cannot move the stored value past v.
  q = delta_net.l2_normalized(q)
  k = delta_net.l2_normalized(k)
  out, delta = delta_net.gated_delta_rule(
    q, k, v, decay, beta, states["delta"], num_tokens
  )
  return out, {"convolution": conv_state, "delta": delta}


def output_recurrence(
  out: jax.Array,
  gate: jax.Array,
  weights: Params,
  decoder: Decoder,
  dtype: jnp.dtype,
) -> jax.Array:
  """Projects the recurrence's output [B, T, H, X] to [B, T, E]."""
  # This norm never has an offset, even if `decoder.norm_offset` is not 0.
  out = rms_norm(out, weights["output_norm"], decoder.norm_eps)
  out = out.astype(jnp.float32) * gate
  return jnp.einsum("bthv,hve->bte", out.astype(dtype), weights["output"])
