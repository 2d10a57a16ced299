"""The compiled programs of engines, which donate the state.

They are at module level, so that engines with equal functions and sizes share
them.
"""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.engine.generate import Until
from jaxkv._src.engine.generate import generate
from jaxkv._src.engine.hooks import StaticFunction
from jaxkv._src.engine.results.generated import harvest as harvest_rows
from jaxkv._src.engine.score import Scored
from jaxkv._src.engine.score import score as score_groups
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.verbs import abort as abort_verbs
from jaxkv._src.engine.verbs import branch as branch_verb
from jaxkv._src.engine.verbs import extend as extend_verb
from jaxkv._src.engine.verbs import submit as submit_verb
from jaxkv._src.engine.verbs import update_weights as weights_verb
from jaxkv._src.engine.verbs.update_weights import Policy
from jaxkv._src.transfer import export as export_verb
from jaxkv._src.transfer import import_sequences as import_verb

_OPTIONS_OF_SCORE = ("entropy", "top_log_probs", "chunk")


class Progress(NamedTuple):
  """The state of all sequences after a call.

  Attributes:
    ids: int32[Q].
    status: int32[Q], a `SequenceStatus` for each row.
    lengths: int32[Q].
    num_steps: int32[], the steps of this call.
  """

  ids: Array
  status: Array
  lengths: Array
  num_steps: Array


def _advance(
  state: RolloutState,
  params: Any,
  until: Until,
  functions: tuple[StaticFunction, ...],
) -> tuple[RolloutState, Progress]:
  """Generates tokens with a model, a `Process` and a `Draft`."""
  model, process, draft = (static.function for static in functions)
  first_step = state.counters.steps
  state = generate(
    params, state, until, model=model, process=process, draft=draft
  )
  num_steps = state.counters.steps.since(first_step)
  return state, progress_of(state)._replace(num_steps=num_steps)


def _score(
  state: RolloutState,
  params: Any,
  *groups: Array,
  function: StaticFunction,
  **options: Any,
) -> tuple[RolloutState, Scored]:
  return score_groups(
    params, state, *groups, model=function.function, **options
  )


def _update_weights(
  state: RolloutState, policy: Policy
) -> tuple[RolloutState, None]:
  return weights_verb.update_weights(state, policy), None


def progress_of(state: RolloutState) -> Progress:
  """Returns the ids, statuses and lengths of a state, in new arrays."""
  queue = state.queue
  arrays = map(jnp.copy, (queue.ids, queue.status, queue.length))
  return Progress(*arrays, num_steps=jnp.int32(0))


def _tokens_of(state: RolloutState, start: Array, count: int) -> Array:
  """Returns the tokens of each row from column `start`, int32[Q, count]."""
  tokens = state.queue.tokens
  row = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
  column = start[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
  return indexing.take(tokens, row, column)


advance = jax.jit(_advance, static_argnums=3, donate_argnums=0)
submit = jax.jit(submit_verb.submit, donate_argnums=0)
harvest = jax.jit(
  harvest_rows, static_argnames="whole_prompts", donate_argnums=0
)
extend = jax.jit(extend_verb.extend, donate_argnums=0)
branch = jax.jit(
  branch_verb.branch, static_argnames="num_branches", donate_argnums=0
)
abort = jax.jit(abort_verbs.abort, donate_argnums=0)
export = jax.jit(
  export_verb.export, static_argnames="max_pages", donate_argnums=0
)
import_sequences = jax.jit(import_verb.import_sequences, donate_argnums=0)
update_weights = jax.jit(
  _update_weights, static_argnames="policy", donate_argnums=0
)
score = jax.jit(
  _score, static_argnames=("function", *_OPTIONS_OF_SCORE), donate_argnums=0
)
copy = jax.jit(lambda state: jax.tree.map(jnp.copy, state))
read_progress = jax.jit(progress_of)
read_tokens = jax.jit(_tokens_of, static_argnums=2)
