"""A block: attention and an MLP, each added to its input.

What a token does alone is in functions of tokens and weights, which
`numerics.token_wise` calls with all tokens, or with a tile of them at a time.
Between them tokens look at each other, through a memory.
"""

import functools
from typing import Any

import jax

from jaxkv._src.models.decoder import attention as attentions
from jaxkv._src.models.decoder import memories
from jaxkv._src.models.decoder import mlp as mlps
from jaxkv._src.models.decoder import routing
from jaxkv._src.models.decoder.attention import Angles
from jaxkv._src.models.decoder.attention import Rotations
from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import DeltaNet
from jaxkv._src.models.decoder.description import LatentAttention
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.decoder.description import Mlp
from jaxkv._src.models.decoder.memories import Memory
from jaxkv._src.models.decoder.memories import Place
from jaxkv._src.models.decoder.norms import rms_norm
from jaxkv._src.models.decoder.numerics import recurrence
from jaxkv._src.models.decoder.numerics import token_wise
from jaxkv._src.models.decoder.params import Params

Carry = tuple[jax.Array, Memory]
"""[B, T, E] and the memory."""


def run(
  carry: Carry,
  layer: Layer,
  weights: Params,
  place: Place,
  turned: Rotations,
  keep: Any,
  decoder: Decoder,
) -> Carry:
  """The tokens after a layer, and the memory.

  Args:
    carry: before it.
    layer: static.
    weights: of the layer.
    place: where it keeps what it keeps.
    turned: the angles of the tokens.
    keep: one of `memories`.
    decoder: static; of which it is a layer.
  """
  (x, memory), each = carry, token_wise(decoder)
  own = functools.partial
  angles = attentions.angles_of(layer, turned, decoder)
  seen = each(own(_before, layer, decoder), weights, x, angles)
  mixer = memories.Mixer(layer.attention, place, weights)
  out, memory = _look(seen, mixer, keep, memory, decoder)
  gate = None if isinstance(seen, attentions.Latents) else seen.gate
  given = None
  if not isinstance(layer.mlp, Mlp):
    given = routing.given_to(keep.experts, place.routed)
  x, used = each(own(_after, layer, decoder), weights, x, out, gate, given)
  if used is not None:
    memory = keep.routed(place, used, memory)
  return x, memory


def _norm(
  x: jax.Array, weights: Params, name: str, decoder: Decoder
) -> jax.Array:
  return rms_norm(x, weights[name], decoder.norm_eps, decoder.norm_offset)


def _before(
  layer: Layer,
  decoder: Decoder,
  weights: Params,
  x: jax.Array,
  angles: Angles | None,
) -> Any:
  """What tokens ask for and offer, see `attention`."""
  kind, y = layer.attention, _norm(x, weights, "attention_norm", decoder)
  if isinstance(kind, DeltaNet):
    return attentions.project_recurrence(y, weights)
  if isinstance(kind, Attention):
    return attentions.project_softmax(y, weights, kind, angles, decoder)
  assert angles is not None
  return attentions.project_latents(y, weights, kind, angles, decoder)


def _look(
  seen: Any,
  mixer: memories.Mixer,
  keep: Any,
  memory: Memory,
  decoder: Decoder,
) -> memories.Read:
  """What tokens read of each other."""
  if isinstance(mixer.kind, DeltaNet):
    inputs = (seen.channels, seen.beta, seen.decay)
    run = recurrence(decoder, mixer.kind, mixer.weights)
    return keep.recurrent(mixer, run, inputs, memory)
  if isinstance(mixer.kind, LatentAttention):
    return keep.latent(mixer, seen, memory)
  return keep.softmax(mixer, seen, memory)


def _attended(
  layer: Layer,
  decoder: Decoder,
  weights: Params,
  x: jax.Array,
  out: jax.Array,
  gate: jax.Array | None,
) -> jax.Array:
  """[B, T, E] with what tokens read of each other."""
  kind = layer.attention
  if isinstance(kind, DeltaNet):
    assert gate is not None
    out = attentions.output_recurrence(out, gate, weights, decoder, x.dtype)
  elif isinstance(kind, Attention):
    out = attentions.output_softmax(out, gate, weights, kind, x.dtype)
  else:
    out = attentions.output_latents(out, weights, x.dtype)
  if layer.post_norms:
    out = _norm(out, weights, "post_attention_norm", decoder)
  return x + out


def _after(
  layer: Layer,
  decoder: Decoder,
  weights: Params,
  x: jax.Array,
  out: jax.Array,
  gate: jax.Array | None,
  given: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
  """[B, T, E] after the MLP; int32[B, T, k], the experts that tokens used."""
  x = _attended(layer, decoder, weights, x, out, gate)
  y, used = _norm(x, weights, "mlp_norm", decoder), None
  if isinstance(layer.mlp, Mlp):
    out = mlps.gated(y, weights, layer.mlp)
  else:
    out, used = mlps.mixture(y, weights, layer.mlp, given)
  if layer.post_norms:
    out = _norm(out, weights, "post_mlp_norm", decoder)
  return x + out, used
