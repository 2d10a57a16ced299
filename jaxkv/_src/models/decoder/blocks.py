"""The layers of a decoder: loops over blocks.

A loop over layers carries the whole memory, not one slice per layer: a scan
with slices as inputs and outputs would copy the memory at every token.

Letters: E width, R repetitions of a pattern.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._src.arrays import loops
from jaxkv._src.models.decoder import attention as attentions
from jaxkv._src.models.decoder import block
from jaxkv._src.models.decoder import layout
from jaxkv._src.models.decoder import routing
from jaxkv._src.models.decoder.block import Carry
from jaxkv._src.models.decoder.block import Memory
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import Experts
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.decoder.memories import Place
from jaxkv._src.models.decoder.numerics import token_wise
from jaxkv._src.models.decoder.params import Params

Visit = Callable[[Carry, Layer, Params, Place], Carry]
"""What is done in a layer: `(carry, layer, its weights, place) -> carry`."""


def run(
  params: Params,
  tokens: jax.Array,
  positions: jax.Array,
  memory: Memory,
  keep: Any,
  decoder: Decoder,
  *,
  remat: bool = False,
) -> Carry:
  """All layers: [B, T, E] before the last norm, and the memory.

  Args:
    params: of the decoder.
    tokens: int32[B, T]; those outside the vocabulary become NaN.
    positions: int32[B, T].
    memory: what `keep` keeps.
    keep: one of `memories`.
    decoder: static.
    remat: static; whether a gradient keeps the input of each layer alone, and
      computes the layer again.
  """
  begin = functools.partial(_begin, decoder)
  x, turned = token_wise(decoder)(begin, params["embed"], tokens, positions)

  def visit(carry: Carry, layer: Layer, own: Params, place: Place) -> Carry:
    def one(carry: Carry, own: Params) -> Carry:
      return block.run(carry, layer, own, place, turned, keep, decoder)

    return (jax.checkpoint(one) if remat else one)(carry, own)

  return visit_layers((x, memory), params, visit, decoder)


def _begin(
  decoder: Decoder, embed: jax.Array, tokens: jax.Array, positions: jax.Array
) -> tuple[jax.Array, attentions.Rotations]:
  """[B, T, E] of tokens, and the angles of their positions."""
  x = embed.at[tokens].get(
    mode="fill", fill_value=jnp.nan, wrap_negative_indices=False
  )
  if decoder.embed_scale != 1.0:
    x = x * jnp.asarray(decoder.embed_scale, x.dtype)
  return x, attentions.rotations(decoder, positions)


def visit_layers(
  carry: Carry, params: Params, visit: Visit, decoder: Decoder
) -> Carry:
  """Calls a function in every layer, from the first to the last."""
  for stretch, weights in zip(
    layout.stretches(decoder), params["layers"], strict=True
  ):
    carry = _repeat(carry, stretch, weights, visit, decoder)
  return carry


def _repeat(
  carry: Carry,
  stretch: layout.Stretch,
  weights: tuple[Params, ...],
  visit: Visit,
  decoder: Decoder,
) -> Carry:
  """Visits the layers of a stretch."""
  size = len(stretch.pattern)

  def visited(
    carry: Carry, number: int, repetition: jax.Array | int, own: Params
  ) -> Carry:
    place = _place(decoder, stretch, number, repetition)
    return visit(carry, stretch.pattern[number], own, place)

  if stretch.repetitions == 1:
    for number, leaves in enumerate(weights):
      own = jax.tree.map(lambda leaf: leaf[0], leaves)
      carry = visited(carry, number, 0, own)
    return carry

  def repeat(carry: Any, inputs: Any) -> tuple[Any, None]:
    repetition, own = inputs
    if size == 1:
      return visited(carry, 0, repetition, own[0]), None
    for number in range(size):
      leaves = _read(weights[number], repetition, carry[0])
      carry = visited(carry, number, repetition, leaves)
    return carry, None

  repetitions = jnp.arange(stretch.repetitions, dtype=jnp.int32)
  sliced = weights if size == 1 else None
  return jax.lax.scan(repeat, carry, (repetitions, sliced))[0]


def _place(
  decoder: Decoder,
  stretch: layout.Stretch,
  number: int,
  repetition: jax.Array | int,
) -> Place:
  """Where a layer of a pattern keeps what it keeps."""
  period, index = layout.period(decoder), stretch.first + number
  group = index % period
  size = len(stretch.pattern)
  routed = sum(isinstance(layer.mlp, Experts) for layer in stretch.pattern)
  return Place(
    group=group,
    layer=index // period + repetition * (size // period),
    pool=layout.group_pools(decoder)[group],
    routed=routing.num_routed(decoder, index) + repetition * routed,
  )


def _read(weights: Params, repetition: jax.Array, x: jax.Array) -> Params:
  """The weights of one layer of a repetition, read when its input x is known.

  Otherwise XLA copies the weights of all layers of the repetition before the
  first one: as much more memory, and on a CPU twice the time of a decode step.
  """
  known = (x[0, 0, 0] > 0).astype(jnp.int32)
  index = loops.read_before(known, repetition)
  return jax.tree.map(
    lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False),
    weights,
  )
