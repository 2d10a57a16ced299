"""The experts that tokens use in a forward pass without pages."""

import functools

import jax
import jax.numpy as jnp

from jaxkv import models
from jaxkv._src.models.decoder import logits as all_logits
from jaxkv._src.models.decoder.memories import Nowhere
from jaxkv._src.models.decoder.routing import routing_of


class _Recorded(Nowhere):
  """Like `Nowhere`, with int32[B, T, J, k] as its memory."""

  def routed(self, place, used, memory):
    (chosen,) = memory
    return (
      jax.lax.dynamic_update_index_in_dim(chosen, used, place.routed, axis=2),
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
  sizes = routing_of(config, "config")[:2]
  memory = (jnp.zeros((*tokens.shape, *sizes), jnp.int32),)
  keep = _Recorded(experts)
  return all_logits.run(
    params, tokens, positions, memory, keep, None, "none", config
  )[1][0]
