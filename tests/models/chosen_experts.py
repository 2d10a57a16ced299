"""The experts that tokens use in a forward pass without pages."""

import functools

import jax
import jax.numpy as jnp

from jaxkv import models
from jaxkv._src.models.decoder import logits as all_logits
from jaxkv._src.models.decoder import prompt_tree
from jaxkv._src.models.decoder.expert_records import routing_of
from jaxkv._src.models.decoder.kv_access import UncachedKV


class _Recorded(UncachedKV):
  """An `UncachedKV` with int32[B, T, J, k] as its only pool."""

  def record_experts(self, location, experts, pools):
    (chosen,) = pools
    layer = location.expert_layer
    return (
      jax.lax.dynamic_update_index_in_dim(chosen, experts, layer, axis=2),
    )


@functools.partial(jax.jit, static_argnames="config")
def chosen_experts(params, tokens, positions, *, config, experts=None):
  """int32[B, T, J, k], those of `forward_uncached` with the same arguments.

  Args:
    params: as `models.init_params` returns.
    tokens: int32[B, T].
    positions: int32[B, T].
    config: a `models.Decoder`.
    experts: see `models.forward_uncached`.
  """
  assert isinstance(config, models.Decoder)
  shape = routing_of(config, "config")[:2]
  pools = (jnp.zeros((*tokens.shape, *shape), jnp.int32),)
  access = _Recorded(prompt_tree.of_sequences(*tokens.shape), experts)
  no_columns = jnp.zeros((0,), jnp.int32)
  return all_logits.run(
    params, tokens, positions, pools, access, no_columns, config
  )[1][0]
