"""A decoder layer: a token mixer and an MLP, each with a residual connection.

Steps that compute each token independently run through `numerics.token_wise`,
on all tokens together or on one tile of tokens at a time. Between these steps
the token mixer runs as a method of a class of `kv_access`, such as `PagedKV`.
"""

import functools
from typing import Any

import jax

from jaxkv._src.models.decoder import attention as attentions
from jaxkv._src.models.decoder import expert_records
from jaxkv._src.models.decoder import kv_access
from jaxkv._src.models.decoder import mlp as mlps
from jaxkv._src.models.decoder.attention import Angles
from jaxkv._src.models.decoder.attention import Rotations
from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import DeltaNet
from jaxkv._src.models.decoder.description import LatentAttention
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.decoder.description import Mlp
from jaxkv._src.models.decoder.kv_access import Location
from jaxkv._src.models.decoder.kv_access import Pools
from jaxkv._src.models.decoder.norms import rms_norm
from jaxkv._src.models.decoder.numerics import recurrence
from jaxkv._src.models.decoder.numerics import token_wise
from jaxkv._src.models.decoder.params import Params

Carry = tuple[jax.Array, Pools]
"""The residual stream [B, T, E] and the pools."""


def run(
  carry: Carry,
  layer: Layer,
  weights: Params,
  location: Location,
  rotations: Rotations,
  access: Any,
  decoder: Decoder,
) -> Carry:
  """Runs one layer, with a `PagedKV` or `UncachedKV` as `access`."""
  x, pools = carry
  call = token_wise(decoder)
  # The functions that `call` runs must not close over arrays. So they get all
  # arrays as arguments, and `bind` binds only static arguments.
  bind = functools.partial
  angles = attentions.angles_of(layer, rotations, decoder)
  inputs = call(bind(_mixer_inputs, layer, decoder), weights, x, angles)
  mixer = kv_access.Mixer(layer.attention, location, weights)
  out, pools = _mix(inputs, mixer, access, pools, decoder)
  # `LatentInputs` is the only class of inputs without a field `gate`.
  gate = None if isinstance(inputs, attentions.LatentInputs) else inputs.gate
  replay = None
  if not isinstance(layer.mlp, Mlp):
    mlps.check_experts(weights, layer.mlp, access.expert_axis)
    replay = expert_records.of_layer(access.experts, location.expert_layer)
  after_mixer = bind(_after_mixer, layer, decoder, access.expert_axis)
  x, experts = call(after_mixer, weights, x, out, gate, replay)
  if experts is not None:
    pools = access.record_experts(location, experts, pools)
  return x, pools


def _norm(
  x: jax.Array, weights: Params, name: str, decoder: Decoder
) -> jax.Array:
  return rms_norm(x, weights[name], decoder.norm_eps, decoder.norm_offset)


def _mixer_inputs(
  layer: Layer,
  decoder: Decoder,
  weights: Params,
  x: jax.Array,
  angles: Angles | None,
) -> Any:
  """Returns the token mixer's inputs: x normalized and then projected."""
  attention = layer.attention
  y = _norm(x, weights, "attention_norm", decoder)
  if isinstance(attention, DeltaNet):
    return attentions.project_recurrence(y, weights)
  if isinstance(attention, Attention):
    return attentions.project_softmax(y, weights, attention, angles, decoder)
  assert angles is not None
  return attentions.project_latents(y, weights, attention, angles, decoder)


@jax.named_scope("attention")
def _mix(
  inputs: Any,
  mixer: kv_access.Mixer,
  access: Any,
  pools: Pools,
  decoder: Decoder,
) -> kv_access.MixerOutput:
  """Runs the token mixer, the only step that depends on other tokens."""
  if isinstance(mixer.kind, DeltaNet):
    # `output_recurrence` applies the gate, so the recurrence does not need it.
    arrays = (inputs.channels, inputs.beta, inputs.decay)
    run = recurrence(decoder, mixer.kind, mixer.weights)
    return access.recurrent(mixer, run, arrays, pools)
  if isinstance(mixer.kind, LatentAttention):
    return access.latent(mixer, inputs, pools)
  return access.softmax(mixer, inputs, pools)


def _add_mixer_output(
  layer: Layer,
  decoder: Decoder,
  weights: Params,
  x: jax.Array,
  out: jax.Array,
  gate: jax.Array | None,
) -> jax.Array:
  """Projects the mixer's output and adds it to x."""
  attention = layer.attention
  if isinstance(attention, DeltaNet):
    assert gate is not None
    out = attentions.output_recurrence(out, gate, weights, decoder, x.dtype)
  elif isinstance(attention, Attention):
    out = attentions.output_softmax(out, gate, weights, attention, x.dtype)
  else:
    out = attentions.output_latents(out, weights, x.dtype)
  if layer.post_norms:
    out = _norm(out, weights, "post_attention_norm", decoder)
  return x + out


@jax.named_scope("mlp")
def _after_mixer(
  layer: Layer,
  decoder: Decoder,
  expert_axis: str | None,
  weights: Params,
  x: jax.Array,
  out: jax.Array,
  gate: jax.Array | None,
  replay: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
  """Adds the outputs of mixer and MLP to x. Also returns expert ids or None."""
  x = _add_mixer_output(layer, decoder, weights, x, out, gate)
  y = _norm(x, weights, "mlp_norm", decoder)
  experts = None
  if isinstance(layer.mlp, Mlp):
    out = mlps.gated(y, weights, layer.mlp)
  else:
    out, experts = mlps.mixture(y, weights, layer.mlp, replay, expert_axis)
  if layer.post_norms:
    out = _norm(out, weights, "post_mlp_norm", decoder)
  return x + out, experts
