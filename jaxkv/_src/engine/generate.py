"""generate: runs steps of a rollout in a loop on the device."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import sharding
from jaxkv._src.engine.hooks import Draft
from jaxkv._src.engine.hooks import Process
from jaxkv._src.engine.model_call import Model
from jaxkv._src.engine.model_call import check_expert_axis
from jaxkv._src.engine.model_call import check_model
from jaxkv._src.engine.model_call import check_numerics
from jaxkv._src.engine.model_call import shape_of_logits
from jaxkv._src.engine.queue import check_single
from jaxkv._src.engine.queue import has_ended
from jaxkv._src.engine.sample_and_verify import init_tally
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.step import Buffers
from jaxkv._src.engine.step import step
from jaxkv._src.engine.until import Until
from jaxkv._src.engine.until import as_until
from jaxkv._src.engine.until import calls_left
from jaxkv._src.engine.until import goes_on
from jaxkv._src.sampling import penalties

_Loop = tuple[RolloutState, Buffers]


def generate(
  params: Any,
  state: RolloutState,
  until: Until | None = None,
  *,
  model: Model,
  process: Process | None = None,
  draft: Draft | None = None,
) -> RolloutState:
  """Generates tokens until all sequences have ended, or a limit is reached.

  The loop is one `lax.while_loop`, without callbacks to Python. On a GPU, the
  host reads the predicate before each iteration; a larger
  `RolloutConfig.decode_steps` means fewer iterations. Jit this function with
  the state donated, as
  `jax.jit(functools.partial(generate, model=model), donate_argnums=1)`, so that
  the K/V memory is updated in place.

  A sequence gets the status FAILED if it needs more pages than can become free,
  or if the log-prob of its next token is not finite. `state.queue.code` has
  the reason, and the sequence keeps its earlier tokens.

  Args:
    params: the model's parameters.
    state: from `init`, or from an earlier call.
    until: when to return; None to return after all sequences have ended.
    model: such as `functools.partial(models.forward, config=config)`; see
      `Model`.
    process: changes logits before a token is sampled, see `Process`.
    draft: proposes tokens, see `Draft`; None for n-gram matches. Used only if
      `RolloutConfig.draft_tokens` is positive.

  Returns:
    The state; test it with `is_done`, and read its tokens with `generated`.

  Raises:
    TypeError: `model` returns a memory with other arrays, or `process` returns
      other types or shapes than those of its arguments.
    ValueError: a number of `until` is out of range; `model` returns a memory
      that it did not write; or the `config` or `expert_axis` of `model` does
      not fit `RolloutConfig.numerics` or `lockstep_axis`.
  """
  check_single(state.queue)
  check_model(model)
  check_numerics(state.config, model)
  check_expert_axis(state.config, model)
  limits = as_until(until)
  buffers = _init_buffers(params, state, model)
  params, state, limits, buffers = sharding.match_varying_axes(
    (params, state, limits, buffers)
  )
  begin = state.counters.steps

  def one_step(loop: _Loop) -> _Loop:
    max_calls = calls_left(limits, loop[0], begin)
    return step(
      params,
      *loop,
      model=model,
      process=process,
      draft=draft,
      max_calls=max_calls,
    )

  def is_unfinished(loop: _Loop) -> Array:
    goes = goes_on(limits, loop[0], begin)
    return sharding.any_shard(goes, state.config.lockstep_axis)

  had_ended = has_ended(state.queue.status)
  state = lax.while_loop(is_unfinished, one_step, (state, buffers))[0]
  is_new = has_ended(state.queue.status) & ~had_ended
  queue = dataclasses.replace(state.queue, is_new=is_new)
  return dataclasses.replace(state, queue=queue)


def _init_buffers(params: Any, state: RolloutState, model: Model) -> Buffers:
  """Returns the initial buffers of the loop."""
  queue, slots, config = state.queue, state.slots, state.config
  has_drafts = config.draft_tokens > 0
  if not has_drafts and not penalties.needs_seen(queue.sampling):
    # No buffer needs the size of the vocabulary. To find it, `shape_of_logits`
    # traces the model, which takes seconds if many layers are unrolled.
    return Buffers()
  logits = shape_of_logits(
    params, queue, slots, state.memory, config, model=model
  )
  tally, draft_logits = init_tally(queue, slots, logits.shape[1]), None
  if has_drafts:
    shape = config.draft_columns, logits.shape[1]
    draft_logits = jnp.zeros(shape, logits.dtype)
  return Buffers(tally=tally, draft_logits=draft_logits)
