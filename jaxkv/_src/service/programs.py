"""The compiled programs of engines, which donate the state.

They are at module level, so that engines with equal functions and sizes share
them. All take `axes`, the mesh of the state; None for one device.
"""

import functools
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays.compiler_options import of_backend
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.verbs.admit import match as match_rows
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
from jaxkv._src.service import sharded_programs
from jaxkv._src.sharding import submit as sharded_submit
from jaxkv._src.sharding.mesh_axes import MeshAxes
from jaxkv._src.sharding.shards import placed
from jaxkv._src.sharding.state_shardings import tree_shardings
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
  *,
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


def _advance_shards(
  state: RolloutState, *arguments: Any, **options: Any
) -> tuple[RolloutState, Progress]:
  state, num_steps = sharded_programs.advance(state, *arguments, **options)
  return state, progress_of(state)._replace(num_steps=num_steps)


def _match(
  cache: CacheState,
  tokens: Array,
  lengths: Array,
  salts: Array | None,
  *,
  axes: MeshAxes | None,
) -> Array:
  """Returns the number of cached tokens of each prompt, int32[P]."""
  if axes is not None and axes.data is not None:
    return sharded_programs.match(cache, tokens, lengths, salts, axes=axes)
  return match_rows(cache, tokens, lengths, salts=salts).num_cached_tokens


def progress_of(state: RolloutState) -> Progress:
  """Returns the ids, statuses and lengths of a state, in new arrays."""
  queue = state.queue
  ids, status, lengths = (
    jnp.copy(array).reshape(-1)
    for array in (queue.ids, queue.status, queue.length)
  )
  return Progress(ids, status, lengths, num_steps=jnp.int32(0))


def _tokens_of(state: RolloutState, start: Array, count: int) -> Array:
  """Returns the tokens of each row from column `start`, int32[Q, count]."""
  tokens = state.queue.tokens
  tokens = tokens.reshape(-1, tokens.shape[-1])
  row = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
  column = start[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
  return indexing.take(tokens, row, column)


def _program(
  function: Callable, *static: str, on_shards: Callable | None = None
) -> Callable:
  """Compiles a function that changes a state, which is donated.

  `function` maps the state and its arguments to the new state and a result.
  `static` are the names of static arguments. `on_shards` is a function of a
  state with several shards, which also takes `axes`.
  """

  def run(
    state: RolloutState,
    *arguments: Any,
    axes: MeshAxes | None = None,
    **options: Any,
  ) -> tuple[RolloutState, Any]:
    if axes is None or axes.data is None:
      state, out = function(state, *arguments, **options)
      return _placed(state, axes), out
    if on_shards is None:
      raise ValueError(
        f"An engine with `axes.data` cannot {function.__name__}; make an "
        "engine for each shard."
      )
    return on_shards(state, *arguments, axes=axes, **options)

  run.__name__ = function.__name__

  # Not at import, because the default backend would then be initialized.
  @functools.cache
  def compiled() -> Callable:
    return jax.jit(
      run,
      static_argnames=("axes", *static),
      donate_argnums=0,
      compiler_options=of_backend(),
    )

  return lambda *arguments, **options: compiled()(*arguments, **options)


def _placed(state: RolloutState, axes: MeshAxes | None) -> RolloutState:
  # XLA could choose other shardings, for which all programs would be compiled
  # again.
  return state if axes is None else placed(state, tree_shardings(state, axes))


@functools.partial(jax.jit, static_argnames="axes")
def copy(state: RolloutState, *, axes: MeshAxes | None) -> RolloutState:
  """Returns a copy of a state."""
  return _placed(jax.tree.map(jnp.copy, state), axes)


advance = _program(_advance, "functions", on_shards=_advance_shards)
submit = _program(submit_verb.submit, on_shards=sharded_submit.submit)
harvest = _program(
  harvest_rows, "whole_prompts", on_shards=sharded_programs.harvest
)
extend = _program(
  extend_verb.extend, on_shards=sharded_programs.of_ids(extend_verb.extend)
)
branch = _program(
  branch_verb.branch, "num_branches", on_shards=sharded_programs.branch
)
abort = _program(
  abort_verbs.abort, on_shards=sharded_programs.of_ids(abort_verbs.abort)
)
export = _program(export_verb.export, "max_pages")
import_sequences = _program(import_verb.import_sequences)
update_weights = _program(
  _update_weights, "policy", on_shards=sharded_programs.update_weights
)
score = _program(
  _score, "function", *_OPTIONS_OF_SCORE, on_shards=sharded_programs.score
)
match = jax.jit(_match, static_argnames="axes")
read_progress = jax.jit(progress_of)
read_tokens = jax.jit(_tokens_of, static_argnums=2)
