"""The stack of layers: embeds tokens and loops over the layers.

Letters: E embedding width, R repeats of a pattern (see `groups`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._src.arrays import loops
from jaxkv._src.models.decoder import attention as attentions
from jaxkv._src.models.decoder import groups
from jaxkv._src.models.decoder import layer as layers
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import Experts
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.decoder.kv_access import Location
from jaxkv._src.models.decoder.kv_access import Pools
from jaxkv._src.models.decoder.layer import Carry
from jaxkv._src.models.decoder.numerics import token_wise
from jaxkv._src.models.decoder.params import Params

LayerFunction = Callable[[Carry, Layer, Params, Location], Carry]
"""`(carry, layer, weights of the layer, location) -> carry`."""


def run(
  params: Params,
  tokens: jax.Array,
  positions: jax.Array,
  pools: Pools,
  access: Any,
  decoder: Decoder,
  *,
  remat: bool = False,
) -> Carry:
  """Returns the last layer's output [B, T, E], not yet normalized, and pools.

  With `remat`, only each layer's input is saved for the backward pass, which
  then recomputes the layer.
  """
  embed = functools.partial(_embed, decoder)
  x, rotations = token_wise(decoder)(embed, params["embed"], tokens, positions)

  def run_layer(
    carry: Carry, layer: Layer, weights: Params, location: Location
  ) -> Carry:
    def apply(carry: Carry, weights: Params) -> Carry:
      return layers.run(
        carry, layer, weights, location, rotations, access, decoder
      )

    return (jax.checkpoint(apply) if remat else apply)(carry, weights)

  carry = (x, pools)
  for segment, weights in zip(
    groups.segments(decoder), params["layers"], strict=True
  ):
    carry = _repeat(carry, segment, weights, run_layer, decoder)
  return carry


def _embed(
  decoder: Decoder, embed: jax.Array, tokens: jax.Array, positions: jax.Array
) -> tuple[jax.Array, attentions.Rotations]:
  """Returns embeddings [B, T, E] and the rotary angles of positions."""
  # A token out of range must give NaN. By default jax would read the embedding
  # of another token, because it clamps large indices and wraps negative ones.
  x = embed.at[tokens].get(
    mode="fill", fill_value=jnp.nan, wrap_negative_indices=False
  )
  if decoder.embed_scale != 1.0:
    # Gemma rounds the factor to the dtype of the weights.
    x = x * jnp.asarray(decoder.embed_scale, x.dtype)
  return x, attentions.rotations(decoder, positions)


def _repeat(
  carry: Carry,
  segment: groups.Segment,
  weights: tuple[Params, ...],
  function: LayerFunction,
  decoder: Decoder,
) -> Carry:
  """Applies `function` to each layer of a segment."""
  pattern_size = len(segment.pattern)

  def apply(
    carry: Carry, pattern_index: int, repeat: jax.Array | int, leaves: Params
  ) -> Carry:
    location = _location(decoder, segment, pattern_index, repeat)
    return function(carry, segment.pattern[pattern_index], leaves, location)

  if segment.num_repeats == 1:
    for index, leaves in enumerate(weights):
      leaves = jax.tree.map(lambda leaf: leaf[0], leaves)
      carry = apply(carry, index, 0, leaves)
    return carry

  def run_repeat(carry: Any, inputs: Any) -> tuple[Any, None]:
    repeat, slices = inputs
    if pattern_size == 1:
      return apply(carry, 0, repeat, slices[0]), None
    for pattern_index in range(pattern_size):
      leaves = _read_weights(weights[pattern_index], repeat, carry[0])
      carry = apply(carry, pattern_index, repeat, leaves)
    return carry, None

  repeats = jnp.arange(segment.num_repeats, dtype=jnp.int32)
  # If the pattern has several layers, `_read_weights` slices the weights.
  slices = weights if pattern_size == 1 else None
  # The carry has the whole pools. If the scan sliced them by layer, as inputs
  # and outputs, XLA would copy the pools in each step.
  return jax.lax.scan(run_repeat, carry, (repeats, slices))[0]


def _location(
  decoder: Decoder,
  segment: groups.Segment,
  pattern_index: int,
  repeat: jax.Array | int,
) -> Location:
  """Returns the `Location` of a layer of the pattern in a repeat."""
  layer_groups = groups.groups_of(decoder)
  index = segment.first + pattern_index
  # Equal layers are in the same group, so the group does not depend on the
  # repeat, and can be static.
  group, memory_layer = layer_groups.locations[index]
  end_layer = segment.first + len(segment.pattern)
  num_in_group = sum(
    layer_group == group
    for layer_group, _ in layer_groups.locations[segment.first : end_layer]
  )
  num_experts = sum(isinstance(x.mlp, Experts) for x in segment.pattern)
  first_experts = sum(
    isinstance(x.mlp, Experts) for x in decoder.layers[:index]
  )
  return Location(
    group=group,
    layer=memory_layer + repeat * num_in_group,
    pool=layer_groups.kinds[group].pool,
    expert_layer=first_experts + repeat * num_experts,
  )


def _read_weights(weights: Params, repeat: jax.Array, x: jax.Array) -> Params:
  """Slices the weights of one layer, after its input x is computed."""
  # Without the dependency on x, XLA copies the weights of all layers of the
  # repeat before it runs the first layer. The copy takes as much memory as
  # these weights, and doubles the time of a decode step on a CPU.
  computed = (x[0, 0, 0] > 0).astype(jnp.int32)
  index = loops.read_before(computed, repeat)
  return jax.tree.map(
    lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False),
    weights,
  )
