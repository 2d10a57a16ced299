"""Which experts tokens use: kept beside their pages, and used again.

Letters: J layers with experts, k experts of a token in each of them.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.kv.expert_ids import ExpertIdPages
from jaxkv._src.kv.expert_ids import init_tokens
from jaxkv._src.models.decoder import layout
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import Experts


class Routing(NamedTuple):
  """What there is to choose in a decoder.

  Attributes:
    num_layers: J.
    num_chosen: k.
    num_experts: the most of a layer.
  """

  num_layers: int
  num_chosen: int
  num_experts: int


@functools.cache
def routing_of(decoder: Decoder, name: str = "decoder") -> Routing:
  """What there is to choose in a decoder, which messages call `name`.

  Raises:
    ValueError: no layer has experts, or k differs from layer to layer.
  """
  found = [
    layer.mlp for layer in decoder.layers if isinstance(layer.mlp, Experts)
  ]
  chosen = sorted({mlp.num_chosen for mlp in found})
  if len(chosen) != 1:
    raise ValueError(
      f"`{name}` must have layers with `Experts` of one `num_chosen`, got "
      f"{chosen or 'no such layer'}; leave out `experts`."
    )
  most = max(mlp.num_experts for mlp in found)
  return Routing(len(found), chosen[0], most)


@functools.cache
def num_routed(decoder: Decoder, stop: int) -> int:
  """Layers with experts among the first `stop`."""
  return sum(isinstance(x.mlp, Experts) for x in decoder.layers[:stop])


def init_pool(decoder: Decoder, config: CacheConfig) -> ExpertIdPages:
  """Memory for the experts of all tokens, see `init_kv`.

  Raises:
    ValueError: the decoder has no experts, or no layer keeps all tokens.
  """
  routing = routing_of(decoder)
  return init_tokens(
    config,
    num_layers=routing.num_layers,
    width=routing.num_chosen,
    dtype=jnp.uint8 if routing.num_experts <= 2**8 else jnp.uint16,
    group=_whole_group(decoder),
  )


def _whole_group(decoder: Decoder) -> int:
  """The first layer group that keeps all tokens."""
  groups = layout.groups(decoder)
  whole = [isinstance(kind, FullAttention) for kind in groups]
  if True not in whole:
    raise ValueError(
      "`decoder` must have layers that keep all tokens, to keep the experts of "
      f"tokens beside them, got groups of {groups}."
    )
  return whole.index(True)


def check_pool(pool: ExpertIdPages, decoder: Decoder) -> None:
  """Raises unless a pool is for the experts of a decoder."""
  routing = routing_of(decoder, "config")
  wanted = (*routing[:2], _whole_group(decoder))
  got = (pool.num_layers, pool.width, pool.group)
  if got != wanted:
    names = "ExpertIdPages of {} layers, {} experts of a token, and group {}"
    raise ValueError(
      f"`kv` must have {names.format(*wanted)} for config, got "
      f"{names.format(*got)}; make it with init_kv(experts=True)."
    )


def check_experts(
  experts: jax.Array | np.ndarray | None, tokens: jax.Array, decoder: Decoder
) -> None:
  """Raises unless experts that are given are of these tokens and layers."""
  if experts is None:
    return
  wanted = (*tokens.shape, *routing_of(decoder, "config")[:2])
  if experts.shape != wanted:
    raise ValueError(
      f"`experts` must be {list(wanted)}, for all layers with experts, got "
      f"{list(experts.shape)}; give those of `generated`."
    )
  if not jnp.issubdtype(experts.dtype, jnp.signedinteger):
    raise TypeError(
      f"`experts` must be signed integers, got {experts.dtype.name}; cast them."
    )


def given_to(
  experts: jax.Array | None, layer: jax.Array | int
) -> jax.Array | None:
  """int32[B, T, k]: the experts given to a layer, from [B, T, J, k]."""
  if experts is None:
    return None
  own = jax.lax.dynamic_index_in_dim(experts, layer, axis=2, keepdims=False)
  return own.astype(jnp.int32)
