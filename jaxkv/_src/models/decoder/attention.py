"""What attention makes of tokens, before and after they look at each other.

Each kind has a `project_` function, whose result a memory takes, and an
`output_` function of what the tokens then read. Both are about each token
alone.

| kind              | `project_`              | what is read |
|-------------------|-------------------------|--------------|
| `Attention`       | `Softmax`               | [B, T, H, D] |
| `LatentAttention` | `Latents`               | [B, T, H, X] |
| `DeltaNet`        | `Recurrence`            | [B, T, H, X] |
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
"""Cosines and sines, see `rope.rotation`."""

Rotations = tuple[Angles, ...]
"""The angles of each of a decoder's different rotary encodings."""


class Softmax(NamedTuple):
  """Of tokens in a layer with `Attention`.

  Attributes:
    q: [B, T, H, D].
    k: [B, T, K, D].
    v: [B, T, K, D].
    gate: [B, T, H, D], a factor of what is read; None for none.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  gate: jax.Array | None


class Latents(NamedTuple):
  """Of tokens in a layer with `LatentAttention`.

  Attributes:
    plain: [B, T, H, plain_dim], of queries.
    turned: [B, T, H, rotated_dim], of queries.
    latent: [B, T, latent_dim].
    rotated: [B, T, 1, rotated_dim], the part of keys that heads share.
  """

  plain: jax.Array
  turned: jax.Array
  latent: jax.Array
  rotated: jax.Array


class Recurrence(NamedTuple):
  """Of tokens in a layer with `DeltaNet`.

  Attributes:
    channels: [B, T, C], queries, keys and values before the convolution.
    beta: [B, T, H].
    decay: float32[B, T, H].
    gate: float32[B, T, H, X], a factor of what is read.
  """

  channels: jax.Array
  beta: jax.Array
  decay: jax.Array
  gate: jax.Array


def rotations(decoder: Decoder, positions: jax.Array) -> Rotations:
  """The angles of all layers, each once, of positions int32[B, T]."""
  return tuple(
    ropes.rotation(rope, dim, positions) for rope, dim in _encodings(decoder)
  )


def angles_of(
  layer: Layer, turned: Rotations, decoder: Decoder
) -> Angles | None:
  """The angles of a layer; None if it has none."""
  key = _rotation_of(layer)
  return None if key is None else turned[_encodings(decoder).index(key)]


@functools.cache
def _encodings(decoder: Decoder) -> tuple[tuple[ropes.Rope, int], ...]:
  """The different rotary encodings of a decoder, in the order of its layers.

  A `Rope` has no order, so a dictionary of them would be no pytree.
  """
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
) -> Softmax:
  """What normed tokens [B, T, E] ask for, and what they offer.

  Args:
    x: the tokens.
    weights: of the layer.
    attention: its sizes.
    angles: of the tokens' positions; None for no rotations.
    decoder: for norms.
  """
  q = queries(x, weights, attention, decoder)
  k, v = keys_and_values(x, weights, attention, decoder)
  if attention.rope is not None and angles is not None:
    q = ropes.rotate(q, angles, attention.rope)
    k = ropes.rotate(k, angles, attention.rope)
  return Softmax(q, k, v, gate(x, weights, attention))


def queries(
  x: jax.Array, weights: Params, attention: Attention, decoder: Decoder
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
  x: jax.Array, weights: Params, attention: Attention, decoder: Decoder
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


def gate(
  x: jax.Array, weights: Params, attention: Attention
) -> jax.Array | None:
  """[B, T, H, D]: a factor of what queries read; None for none."""
  if not attention.gated:
    return None
  return jax.nn.sigmoid(jnp.einsum("bte,ehd->bthd", x, weights["query_gate"]))


def output_softmax(
  out: jax.Array,
  gate: jax.Array | None,
  weights: Params,
  attention: Attention,
  dtype: jnp.dtype,
) -> jax.Array:
  """[B, T, E] of what queries read, [B, T, H, D]."""
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
) -> Latents:
  """Like `project_softmax`: multi-head latent attention."""
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
  plain, turned = jnp.split(q, [attention.plain_dim], axis=-1)
  turned = ropes.rotate(turned, angles, attention.rope)
  rotated = ropes.rotate(rotated, angles, attention.rope)
  return Latents(plain, turned, kept, rotated)


def output_latents(
  out: jax.Array, weights: Params, dtype: jnp.dtype
) -> jax.Array:
  """[B, T, E] of what queries read, [B, T, H, value_dim]."""
  return jnp.einsum("bthv,hve->bte", out.astype(dtype), weights["output"])


def project_recurrence(x: jax.Array, weights: Params) -> Recurrence:
  """Like `project_softmax`: the gated delta rule, as in Qwen3-Next."""
  mixed = [
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
  gate = jax.nn.silu(gate.astype(jnp.float32))
  return Recurrence(jnp.concatenate(mixed, axis=-1), beta, decay, gate)


def recur(
  weights: Params,
  inputs: tuple[jax.Array, jax.Array, jax.Array],
  states: dict[str, jax.Array],
  counts: jax.Array,
  *,
  attention: DeltaNet,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Runs the recurrence of a layer.

  Args:
    weights: of the layer; its convolution is used.
    inputs: channels, beta and decay of `Recurrence`, [R, T, ...].
    states: of each row, before the tokens.
    counts: int32[R], tokens of each row.
    attention: its sizes.

  Returns:
    [R, T, H, X], and the states after so many tokens.
  """
  a, (channels, beta, decay) = attention, inputs
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


def output_recurrence(
  out: jax.Array,
  gate: jax.Array,
  weights: Params,
  decoder: Decoder,
  dtype: jnp.dtype,
) -> jax.Array:
  """[B, T, E] of what the recurrence gives, [B, T, H, X]."""
  out = rms_norm(out, weights["output_norm"], decoder.norm_eps)
  out = out.astype(jnp.float32) * gate
  return jnp.einsum("bthv,hve->bte", out.astype(dtype), weights["output"])
