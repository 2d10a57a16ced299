"""The tokens of an encoder, written when their sequence gets pages for them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.cache import ops
from jaxkv._src.rollout import packing
from jaxkv._src.rollout import sequences as queue
from jaxkv._src.rollout import slots
from jaxkv._src.rollout.state import RolloutState
from jaxkv.kv import Pools

Encode = Callable[..., Any]
"""`(params, inputs, lengths int32[1], kv, views) -> kv`: writes the keys and
values of an encoder's tokens for one sequence. `inputs` are those of its
prompt, a pytree of arrays [1, ...], and `views` has a `View` with one row for
each layer group. `jaxkv.models.write_encoded` is one, where the inputs are what
`jaxkv.models.encode` returns. It is called when a sequence enters a slot, again
after a preemption or with new weights, but not for samples that fork. To run
the encoder there, too, with the weights of the day, on tokens of its input:

  def encode(params, tokens, lengths, kv, views):
    encoded = models.encode(params, tokens, lengths, config=config)
    return models.write_encoded(
      params, encoded, lengths, kv, views, config=config
    )
"""


def check_encode(state: RolloutState, encode: Encode | None) -> None:
  """Raises unless there is a function exactly if there is an encoder."""
  if (encode is None) != (state.encoder is None):
    wanted = "None" if state.encoder is None else "given"
    raise ValueError(
      f"`encode` must be {wanted}, because the rollout has "
      f"{'no' if state.encoder is None else 'some'} `encoder_inputs`."
    )


def write_encoded(
  params: Any, state: RolloutState, held: Array, encode: Encode
) -> RolloutState:
  """Calls `encode` for each slot that has just got pages of an encoder.

  One after another: few sequences enter in a step, and none pays for others.

  Args:
    params: the model's.
    state: the rollout, after `slots.grow`.
    held: int32[B, G], the pages of each slot before.
    encode: see `Encode`.
  """
  inputs, cache = state.encoder, state.cache
  lengths = slots.encoder_tokens(state, state.running)
  assert inputs is not None and lengths is not None
  theirs = cache.config.sizes.holds_encoder(held)
  fresh = jnp.any(theirs & (held == 0) & (cache.num_pages > 0), axis=1)
  order = queue.first_of(fresh, fresh.shape[0])
  total = jnp.sum(fresh, dtype=jnp.int32)

  def trip(loop: tuple[Pools, Array]) -> tuple[Pools, Array]:
    kv, number = loop
    slot = ops.take(order, number[None])
    prompt = ops.quotient(
      ops.take(state.running, slot), state.config.num_samples
    )
    values = jax.tree.map(lambda leaf: ops.take(leaf, prompt), inputs.values)
    none = ops.zeros_like(slot)
    views = packing.views(cache, slot, none, none, lengths)
    kv = encode(params, values, ops.take(lengths, slot), kv, views)
    return kv, number + 1

  start = ops.alike((state.kv, ops.zeros_like(total)))
  kv, _ = lax.while_loop(lambda loop: loop[1] < total, trip, start)
  return dataclasses.replace(state, kv=kv)
