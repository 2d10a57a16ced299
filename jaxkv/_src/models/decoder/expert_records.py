"""Records the experts that each token uses, so that a trainer can replay them.

Letters: J layers with experts, k experts per token in each such layer.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.kv.expert_ids import ExpertIdPages
from jaxkv._src.kv.expert_ids import init_expert_ids
from jaxkv._src.models.decoder import groups
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import Experts


class Routing(NamedTuple):
  """Sizes of the expert records of a decoder.

  Attributes:
    num_layers: J.
    num_chosen: k.
    num_experts: the largest number of experts in a layer.
  """

  num_layers: int
  num_chosen: int
  num_experts: int


@functools.cache
def routing_of(decoder: Decoder, name: str = "decoder") -> Routing:
  """Returns the `Routing` of a decoder, which error messages call `name`."""
  mlps = [
    layer.mlp for layer in decoder.layers if isinstance(layer.mlp, Experts)
  ]
  option = "record_experts" if name == "decoder" else "experts"
  if not mlps:
    raise ValueError(
      f"`{name}` must have a layer with `Experts`, got none; leave out "
      f"`{option}`."
    )
  # The records of all layers are one array, so all layers need the same k.
  chosen = sorted({mlp.num_chosen for mlp in mlps})
  if len(chosen) > 1:
    raise ValueError(
      f"`{name}` must have one `num_chosen` in all layers with `Experts`, got "
      f"{chosen}; leave out `{option}`."
    )
  num_experts = max(mlp.num_experts for mlp in mlps)
  return Routing(len(mlps), chosen[0], num_experts)


def init_pool(decoder: Decoder, config: CacheConfig) -> ExpertIdPages:
  """Creates the pool that records expert ids, see `init_kv`."""
  routing = routing_of(decoder)
  return init_expert_ids(
    config,
    num_layers=routing.num_layers,
    width=routing.num_chosen,
    # The smaller dtype that fits, because each token has J * k ids.
    dtype=jnp.uint8 if routing.num_experts <= 2**8 else jnp.uint16,
    group=_full_group(decoder),
  )


def _full_group(decoder: Decoder) -> int:
  """Returns the index of the first layer group that keeps all tokens."""
  # A group with a window frees pages when their tokens leave the window, and
  # the records in these pages would be lost.
  kinds = groups.groups_of(decoder).kinds
  is_full = [isinstance(group_kind, FullAttention) for group_kind in kinds]
  if True not in is_full:
    raise ValueError(
      "`decoder` must have a layer with full attention, because its pages hold "
      f"the expert ids, got layer groups of {kinds}; leave out "
      "`record_experts`."
    )
  return is_full.index(True)


def check_pool(pool: ExpertIdPages, decoder: Decoder) -> None:
  """Raises ValueError unless a pool fits the expert records of a decoder."""
  routing = routing_of(decoder, "config")
  expected = (*routing[:2], _full_group(decoder))
  got = (pool.num_layers, pool.width, pool.group)
  if got != expected:
    fields = "num_layers={}, width={} and group={}"
    raise ValueError(
      f"`kv` must have ExpertIdPages with {fields.format(*expected)} for "
      f"`config`, got {fields.format(*got)}; make it with "
      "init_kv(record_experts=True)."
    )


def check_experts(
  experts: jax.Array | np.ndarray | None, tokens: jax.Array, decoder: Decoder
) -> None:
  """Raises an error unless recorded experts fit the tokens and the decoder."""
  if experts is None:
    return
  num_layers, num_chosen, _ = routing_of(decoder, "config")
  expected = (*tokens.shape, num_layers, num_chosen)
  if experts.shape != expected:
    raise ValueError(
      f"`experts` must have the shape {list(expected)}, {num_chosen} experts "
      f"for each token in each of {num_layers} layers with experts, got "
      f"{list(experts.shape)}; pass the experts that a rollout recorded."
    )
  # The type must be signed, because negative ids mark tokens without a record.
  if not jnp.issubdtype(experts.dtype, jnp.signedinteger):
    raise TypeError(
      f"`experts` must be signed integers, got {experts.dtype.name}; cast them."
    )


def of_layer(
  experts: jax.Array | None, layer: jax.Array | int
) -> jax.Array | None:
  """Selects one layer's records: int32[B, T, k] from experts [B, T, J, k]."""
  if experts is None:
    return None
  records = jax.lax.dynamic_index_in_dim(experts, layer, axis=2, keepdims=False)
  return records.astype(jnp.int32)
