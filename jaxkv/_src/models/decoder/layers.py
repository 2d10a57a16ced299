"""The layers of a decoder, one after another.

A loop over layers carries the whole memory, not one slice per layer: a scan
with slices as inputs and outputs would copy the memory at every token.

Dimension letters besides the project's own (B rows, T tokens, H query heads, K
key-value heads, D head size, L layers): E width, V vocabulary, P layers of a
pattern, R repetitions.
"""

from typing import Any
from typing import Literal

import jax
import jax.numpy as jnp

from jaxkv._src.cache import ops
from jaxkv._src.models.decoder import attention as attentions
from jaxkv._src.models.decoder import layout
from jaxkv._src.models.decoder import mlp as mlps
from jaxkv._src.models.decoder import routing
from jaxkv._src.models.decoder.attention import Rotations
from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import Experts
from jaxkv._src.models.decoder.description import LatentAttention
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.decoder.description import Mlp
from jaxkv._src.models.decoder.memories import Place
from jaxkv._src.models.decoder.norms import rms_norm
from jaxkv._src.models.decoder.params import Params

Wanted = Literal["all", "last", "none"]
_Memory = tuple[Any, ...]


def run(
  params: Params,
  tokens: jax.Array,
  positions: jax.Array,
  memory: _Memory,
  keep: Any,
  counts: jax.Array | None,
  wanted: Wanted | jax.Array,
  config: Decoder,
) -> tuple[jax.Array, _Memory]:
  """All of the decoder: (float32[B, P, V] logits, memory)."""
  _check_inputs(params, tokens, positions, counts, wanted, config)
  turned = attentions.rotations(config, positions)
  x = (
    params["embed"]
    .at[tokens]
    .get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
  )
  if config.embed_scale != 1.0:
    x = x * jnp.asarray(config.embed_scale, x.dtype)
  for stretch, weights in zip(
    layout.stretches(config), params["layers"], strict=True
  ):
    x, memory = _repeat(x, memory, stretch, weights, turned, keep, config)
  x = rms_norm(
    _pick(x, counts, wanted),
    params["final_norm"],
    config.norm_eps,
    config.norm_offset,
  )
  unembed = params["embed"].T if config.tied_embeddings else params["unembed"]
  logits = jnp.einsum(
    "bte,ev->btv", x, unembed, preferred_element_type=jnp.float32
  )
  if config.logit_cap is not None:
    logits = config.logit_cap * jnp.tanh(logits / config.logit_cap)
  return logits, memory


def _repeat(
  x: jax.Array,
  memory: _Memory,
  stretch: layout.Stretch,
  weights: tuple[Params, ...],
  turned: Rotations,
  keep: Any,
  config: Decoder,
) -> tuple[jax.Array, _Memory]:
  """Runs the layers of a stretch."""
  num_groups, size = len(layout.groups(config)), len(stretch.pattern)
  routed = sum(isinstance(layer.mlp, Experts) for layer in stretch.pattern)

  def block(
    number: int, repetition: jax.Array | int, own: Params, carry: Any
  ) -> tuple[jax.Array, _Memory]:
    layer = stretch.pattern[number]
    index = stretch.first + number
    place = Place(
      group=index % num_groups,
      layer=index // num_groups + repetition * (size // num_groups),
      pool=layout.pools(config).index(layout.pool_of(layer)),
      routed=routing.num_routed(config, index) + repetition * routed,
    )
    x, memory = carry
    return _block(x, memory, layer, own, place, turned, keep, config)

  carry = (x, memory)
  if stretch.repetitions == 1:
    for number, leaves in enumerate(weights):
      own = jax.tree.map(lambda leaf: leaf[0], leaves)
      carry = block(number, 0, own, carry)
    return carry

  def repeat(carry: Any, inputs: Any) -> tuple[Any, None]:
    repetition, own = inputs
    if size == 1:
      return block(0, repetition, own[0], carry), None
    for number in range(size):
      leaves = _read(weights[number], repetition, carry[0])
      carry = block(number, repetition, leaves, carry)
    return carry, None

  repetitions = jnp.arange(stretch.repetitions, dtype=jnp.int32)
  sliced = weights if size == 1 else None
  return jax.lax.scan(repeat, carry, (repetitions, sliced))[0]


def _read(weights: Params, repetition: jax.Array, x: jax.Array) -> Params:
  """The weights of one layer of a repetition, read when its input x is known.

  Otherwise XLA copies the weights of all layers of the repetition before the
  first one: as much more memory, and on a CPU twice the time of a decode step.
  """
  known = (x[0, 0, 0] > 0).astype(jnp.int32)
  index = ops.read_before(known, repetition)
  return jax.tree.map(
    lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False),
    weights,
  )


def _block(
  x: jax.Array,
  memory: _Memory,
  layer: Layer,
  weights: Params,
  place: Place,
  turned: Rotations,
  keep: Any,
  config: Decoder,
) -> tuple[jax.Array, _Memory]:
  """Attention and an MLP, each added to [B, T, E]."""

  def norm(values: jax.Array, name: str) -> jax.Array:
    return rms_norm(values, weights[name], config.norm_eps, config.norm_offset)

  kind = layer.attention
  attend: Any = attentions.recurrent
  if isinstance(kind, LatentAttention):
    attend = attentions.latent
  elif isinstance(kind, Attention):
    attend = attentions.softmax
  y = norm(x, "attention_norm")
  out, memory = attend(y, weights, kind, place, turned, keep, memory, config)
  x = x + (norm(out, "post_attention_norm") if layer.post_norms else out)
  y = norm(x, "mlp_norm")
  if isinstance(layer.mlp, Mlp):
    out = mlps.gated(y, weights, layer.mlp)
  else:
    given = routing.given_to(keep.experts, place.routed)
    out, used = mlps.mixture(y, weights, layer.mlp, given)
    memory = keep.routed(place, used, memory)
  return x + (norm(out, "post_mlp_norm") if layer.post_norms else out), memory


def _pick(
  x: jax.Array, counts: jax.Array | None, wanted: Wanted | jax.Array
) -> jax.Array:
  """[B, T, E] to [B, P, E]: the tokens that get logits."""
  if not isinstance(wanted, str):
    return x.at[:, wanted].get(mode="clip")
  if wanted == "all" or counts is None:
    return x
  if wanted == "none":
    return x[:, :0]
  last = jnp.maximum(counts - 1, 0)[:, None, None]
  return jnp.take_along_axis(x, last, axis=1, mode="fill")


def _check_inputs(
  params: Params,
  tokens: jax.Array,
  positions: jax.Array,
  counts: jax.Array | None,
  wanted: Wanted | jax.Array,
  config: Decoder,
) -> None:
  if tokens.ndim != 2:
    raise ValueError(f"`tokens` must be [B, T], got shape {tokens.shape}.")
  if positions.shape != tokens.shape:
    raise ValueError(
      f"`positions` must have the shape of tokens, {tokens.shape}, got "
      f"{positions.shape}."
    )
  if counts is not None and counts.shape != tokens.shape[:1]:
    raise ValueError(
      f"`counts` must have shape {tokens.shape[:1]}, got {counts.shape}."
    )
  if isinstance(wanted, str) and wanted not in ("all", "last", "none"):
    raise ValueError(
      f'`logits` must be "all", "last" or "none", got {wanted!r}.'
    )
  embed = (config.vocab_size, config.embed_dim)
  if params["embed"].shape != embed or params["embed"].dtype != config.dtype:
    raise ValueError(
      f'`params["embed"]` must be {config.dtype.name}{list(embed)}, as in '
      f"config, got {params['embed'].dtype.name}"
      f"{list(params['embed'].shape)}."
    )
