"""generate: runs steps of a rollout in a loop on the device."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.engine.counters import Count
from jaxkv._src.engine.hooks import Draft
from jaxkv._src.engine.hooks import Model
from jaxkv._src.engine.hooks import Process
from jaxkv._src.engine.hooks import StaticFunction
from jaxkv._src.engine.hooks import check_model
from jaxkv._src.engine.hooks import vocab_size_of
from jaxkv._src.engine.model_call.call_model import shape_of_logits
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.queue import has_ended
from jaxkv._src.engine.queue.requests import check_tokens
from jaxkv._src.engine.run_steps import run_steps
from jaxkv._src.engine.sampling.sample_and_verify import Tally
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import check_single
from jaxkv._src.engine.step import Buffers
from jaxkv._src.engine.step import no_bad_rows
from jaxkv._src.engine.step import step
from jaxkv._src.sampling import penalties

_Loop = tuple[RolloutState, Buffers]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Until:
  """Limits of a `generate` call, which returns when it reaches one of them.

  The call also returns when all sequences have ended. If the numbers are
  traced, other values need no new compilation. `prompts` and `sequences` also
  count sequences that ended before the call and are still in the queue, so a
  call may return at once.

  Attributes:
    steps: the number of model calls; None for no limit.  # int32[]
    prompts: the number of prompts whose samples have all ended; None for no
      limit.  # int32[]
    sequences: the number of ended sequences; None for no limit. With 1, a
      server can harvest each sequence when it ends.  # int32[]

  Examples:
    >>> from jaxkv import rollout
    >>> rollout.Until(prompts=16, steps=10_000).prompts
    16
  """

  steps: Array | int | None = None
  prompts: Array | int | None = None
  sequences: Array | int | None = None


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
  the K/V memory is updated in place. Outside of `jit`, calls with equal shapes
  and functions compile once, but each of them copies the K/V memory.

  A sequence gets the status FAILED if it can never be admitted, if it needs
  more pages than can become free, or if the log-prob of its next token is not
  finite. `state.queue.code` has the reason, and the sequence keeps its earlier
  tokens. If the log-prob is not finite, the sequence's pages leave the prefix
  index, on the device and in offload memory, unless a running sequence holds
  them. So no later sequence finds K/V that holds NaN.

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
      that it did not write; or the `expert_axis` of `model` is not
      `RolloutConfig.lockstep_axis`.
  """
  check_single(state)
  check_model(model, state.config)
  check_tokens(
    "tokens",
    state.queue.tokens,
    state.queue.length,
    vocab_size=vocab_size_of(model),
  )
  functions = tuple(map(StaticFunction, (model, process, draft)))
  return _generate(params, state, as_until(until), functions)


# Inlined into the caller's program. Outside of `jit`, calls with equal shapes
# and functions share one program.
@functools.partial(jax.jit, static_argnums=3, inline=True)
def _generate(
  params: Any,
  state: RolloutState,
  limits: Until,
  functions: tuple[StaticFunction, ...],
) -> RolloutState:
  model, process, draft = (static.function for static in functions)
  buffers = _init_buffers(params, state, model)
  params, state, limits, buffers = sharding.match_varying_axes(
    (params, state, limits, buffers)
  )
  first_step = state.counters.steps

  def one_step(loop: _Loop) -> _Loop:
    max_calls = calls_left(limits, loop[0], first_step)
    return step(
      params,
      *loop,
      model=model,
      process=process,
      draft=draft,
      max_calls=max_calls,
    )

  had_ended = has_ended(state.queue.status)
  state, _ = run_steps(
    lambda state: goes_on(limits, state, first_step), one_step, state, buffers
  )
  is_new = has_ended(state.queue.status) & ~had_ended
  queue = dataclasses.replace(state.queue, is_new=is_new)
  return dataclasses.replace(state, queue=queue)


def _init_buffers(params: Any, state: RolloutState, model: Model) -> Buffers:
  """Returns the initial buffers of the loop."""
  queue, slots, config = state.queue, state.slots, state.config
  has_drafts = config.draft_tokens > 0
  has_penalties = penalties.needs_seen(queue.sampling)
  if not has_drafts and not has_penalties:
    # No buffer needs the size of the vocabulary. To find it, `shape_of_logits`
    # traces the model, which takes seconds if many layers are unrolled.
    return Buffers(bad_rows=no_bad_rows(state))
  logits = shape_of_logits(params, state, model=model)
  tally, draft_logits = None, None
  if has_penalties:
    rows = jnp.full((slots.size,), queue.no_row, jnp.int32)
    tally = Tally(rows, jnp.zeros((slots.size, logits.shape[1]), jnp.uint16))
  if has_drafts:
    shape = config.draft_columns, logits.shape[1]
    draft_logits = jnp.zeros(shape, logits.dtype)
  return Buffers(
    tally=tally, draft_logits=draft_logits, bad_rows=no_bad_rows(state)
  )


def as_until(until: Until | None) -> Until:
  """Returns `until` with int32[] numbers; traced signs are not checked."""
  if until is None:
    return Until()
  if not isinstance(until, Until):
    raise TypeError(
      f"`until` must be a jaxkv.rollout.Until or None, got {until!r}; for a "
      f"number of steps write Until(steps=...)."
    )
  return Until(
    **{
      field.name: _as_count(field.name, getattr(until, field.name))
      for field in dataclasses.fields(until)
    }
  )


def _as_count(name: str, value: Any) -> Array | None:
  if value is None:
    return None
  count = as_int32(f"until.{name}", value, ())
  if not isinstance(count, Tracer) and int(count) < 0:
    raise ValueError(
      f"`until.{name}` must be at least 0, got {int(count)}; use None for no "
      "limit."
    )
  return jnp.asarray(count, jnp.int32)


def goes_on(until: Until, state: RolloutState, first_step: Count) -> Array:
  """Returns bool[], True if a call that began at `first_step` continues."""
  status = state.queue.status
  going = jnp.any(status < SequenceStatus.DONE)
  num_left = calls_left(until, state, first_step)
  if num_left is not None:
    going &= num_left > 0
  if until.prompts is not None:
    group_status = status.reshape(-1, state.config.num_samples)
    # The rows of a group without sequences are EMPTY.
    exists = jnp.any(has_ended(group_status), axis=1)
    ended = exists & jnp.all(group_status >= SequenceStatus.DONE, axis=1)
    going &= jnp.sum(ended, dtype=jnp.int32) < until.prompts
  if until.sequences is not None:
    ended = jnp.sum(has_ended(status), dtype=jnp.int32)
    going &= ended < until.sequences
  return going


def calls_left(
  until: Until, state: RolloutState, first_step: Count
) -> Array | None:
  """Returns the number of model calls left, int32[]; None for no limit."""
  if until.steps is None:
    return None
  return until.steps - state.counters.steps.since(first_step)
