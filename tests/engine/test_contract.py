"""Properties of every verb of a rollout, over one table of all verbs."""

import dataclasses
import functools
import inspect
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import rollout
from jaxkv._src.engine.queue.queue import FIRST_DRAFT_RATE
from tests.engine import random_calls
from tests.tools.tiers import slow_except
from tests.tools.transforms import on_devices

# Any of them compiles the rollout that they share.
pytestmark = pytest.mark.slow

_VERBS = (
  "jaxkv._src.engine.verbs",
  "jaxkv._src.engine.results.generated",
  "jaxkv._src.transfer",
)
_OK, _SKIPPED = int(jaxkv.Status.OK), int(jaxkv.Status.SKIPPED)


def _update(how):
  return lambda state: (rollout.update_weights(state, how), None)


@jax.jit
def _generate(state, params, until):
  return rollout.generate(params, state, until, model=random_calls.model), None


def _submit(state, ids=None, mask=None, **requests):
  return rollout.submit(state, rollout.Requests(**requests), ids=ids, mask=mask)


def _branch(state, ids, mask=None):
  return rollout.branch(state, ids, 1, mask=mask)


TABLE = {
  "submit": _submit,
  "extend": rollout.extend,
  "branch": _branch,
  "abort": rollout.abort,
  "requeue": rollout.requeue,
  "harvest": rollout.harvest,
  "harvest groups": functools.partial(rollout.harvest, whole_prompts=True),
  "recompute": _update("recompute"),
  "keep": _update("keep"),
  "drop": _update("drop"),
  "export": rollout.export,
  "import_sequences": rollout.import_sequences,
  "generated": lambda state: (state, rollout.generated(state)),
  "generate": _generate,
}
"""Every verb, as `(state, **arrays) -> (state, result)`."""

_PUBLIC = {"update_weights", *(name.split()[0] for name in TABLE)}
_PUBLIC -= {"recompute", "keep", "drop"}

NAMING = [
  "submit",
  "extend",
  "branch",
  "abort",
  "requeue",
  "harvest",
  "harvest groups",
  "export",
]
"""The verbs that give each row a code."""


@functools.cache
def _state_and_weights(seed: int) -> tuple[rollout.RolloutState, np.ndarray]:
  """Returns a rollout after random calls, and its model's weights."""
  calls = random_calls.Calls(seed)
  while not _is_busy(np.asarray(calls.state.queue.status).reshape(-1, 2)):
    calls.step()
  return calls.state, calls._weights[calls.version]


def _is_busy(status: np.ndarray) -> bool:
  """Returns True if each verb applies to some row; statuses are [P, G]."""
  has_active = {
    rollout.SequenceStatus.WAITING,
    rollout.SequenceStatus.RUNNING,
  } <= set(status.ravel().tolist())
  free = np.all(status == rollout.SequenceStatus.EMPTY, axis=1)
  return has_active and bool(np.any(free)) and bool(np.any(_complete(status)))


def _complete(status: np.ndarray) -> np.ndarray:
  """Returns the groups that can be harvested, bool[P], of statuses [P, G]."""
  done = np.any(status == rollout.SequenceStatus.DONE, axis=1)
  return done & np.all(status >= rollout.SequenceStatus.DONE, axis=1)


def example(verb: str, seed: int = 0):
  """Returns a state and arrays for which some rows succeed and some fail."""
  state, weights = _state_and_weights(seed)
  if verb == "generate":
    until = rollout.Until(steps=jnp.int32(1))
    return state, {"params": jnp.asarray(weights), "until": until}
  # With rates of drafts, which `generate` would take long to compile for.
  options = {"draft_tokens": 3, "draft_match": 1, "draft_columns": 4}
  config = dataclasses.replace(state.config, **options)
  rates = jnp.full((state.queue.size,), FIRST_DRAFT_RATE, jnp.float32)
  queue = dataclasses.replace(state.queue, draft_rates=rates)
  state = dataclasses.replace(state, config=config, queue=queue)
  if verb == "import_sequences":
    arguments = _arguments("export", state)
    state, exported = rollout.export(state, **arguments)
    return state, {"exported": exported}
  return state, _arguments(verb, state)


def _arguments(verb: str, state: rollout.RolloutState) -> dict:
  sequences = jax.device_get((state.queue.ids, state.queue.status))
  ids, status = sequences
  mask = jnp.asarray([True, True, False])
  if verb in ("recompute", "keep", "drop", "generated"):
    return {}
  if verb == "submit":
    return {
      "tokens": jnp.asarray([[4, 5, 6, 7], [8, 9, 4, 5], [6] * 4], jnp.int32),
      "lengths": jnp.asarray([3, 9, 2], jnp.int32),
      "salts": jnp.ones((6, 4), jnp.uint32),
      "extra": {"adapter": jnp.ones((6,), jnp.int32)},
      "mask": mask,
    }
  statuses = {
    "extend": rollout.SequenceStatus.DONE,
    "harvest": rollout.SequenceStatus.DONE,
  }
  if verb == "harvest groups":
    is_ready = np.repeat(_complete(status.reshape(-1, 2)), 2)
    rows = np.flatnonzero(is_ready & (status == rollout.SequenceStatus.DONE))
  else:
    row_status = statuses.get(verb, rollout.SequenceStatus.RUNNING)
    rows = np.flatnonzero(status == row_status)
  named = int(ids[rows[0]])
  arguments = {"ids": jnp.asarray([named, -3, named], jnp.int32), "mask": mask}
  if verb == "extend":
    arguments |= {
      "tokens": jnp.asarray([[4, 5]] * 3, jnp.int32),
      "lengths": jnp.asarray([1, 2, 0], jnp.int32),
      "max_tokens": jnp.asarray([1, 2, 3], jnp.int32),
    }
  return arguments


def _plain(tree):
  """Replaces random keys by their bits."""
  return jax.tree.map(
    lambda leaf: (
      jax.random.key_data(leaf)
      if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
      else leaf
    ),
    tree,
  )


def assert_same(left, right) -> None:
  """Checks for equal structures, shapes, types and bits."""
  chex.assert_trees_all_equal(_plain(left), _plain(right), strict=True)


def test_table_is_complete():
  verbs = {
    name
    for name, value in vars(rollout).items()
    if inspect.isfunction(value) and value.__module__.startswith(_VERBS)
  }
  assert verbs | {"generate"} == _PUBLIC


_LONG = {"generate", "submit", "export", "import_sequences"}
"""Verbs that take seconds to compile."""


@slow_except("verb", TABLE, *(TABLE.keys() - _LONG))
@pytest.mark.parametrize("verb", TABLE)
class TestEveryVerb:
  @pytest.mark.deep
  def test_eval_shape_equals_a_call(self, verb):
    """Shapes are those of a call, and the state keeps its shapes."""
    state, args = example(verb)
    shapes = jax.eval_shape(TABLE[verb], state, **args)
    out = TABLE[verb](state, **args)
    assert _shapes(shapes) == _shapes(out)
    chex.assert_trees_all_equal_structs(out[0], state)
    # Weak types too: what comes out may go in again.
    assert _types(out[0]) == _types(state)

  def test_equal_shapes_trace_once(self, verb):
    state, args = example(verb)
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def counted(state, **args):
      return TABLE[verb](state, **args)

    counted.trace(state, **args)
    counted.trace(TABLE[verb](state, **args)[0], **args)
    other_state, other_args = example(verb, 1)
    counted.trace(other_state, **other_args)

  @pytest.mark.slow
  def test_donated_call_equals_a_call_of_copies(self, verb):
    """Two donated calls under jit equal two without, and buffers are reused."""
    state, args = example(verb)
    new_state, out = TABLE[verb](state, **args)
    donated = jax.tree.map(jnp.copy, state)
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      # What a verb does not read is dropped, and not donated, by default.
      step = jax.jit(
        lambda state, args: TABLE[verb](state, **args),
        donate_argnums=0,
        keep_unused=True,
      )
      jit_state, jit_out = step(donated, args)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
    assert_same((jit_state, jit_out), (new_state, out))
    second_state, _ = step(jit_state, args)
    assert_same(second_state, TABLE[verb](new_state, **args)[0])
    assert step._cache_size() == 1


# All of it holds for `generate`, too, but takes long to compile; see also
# test_devices.
@pytest.mark.parametrize(
  "verb",
  [
    pytest.param(verb, marks=pytest.mark.deep) if verb == "generate" else verb
    for verb in TABLE
  ],
)
@pytest.mark.slow
class TestTransformations:
  @pytest.mark.deep
  def test_scan_equals_repeated_calls(self, verb):
    """The verb and `abort`, in a scan, in a jit."""
    state, args = example(verb)
    ids = state.queue.ids[:2]

    def once(state):
      return rollout.abort(TABLE[verb](state, **args)[0], ids)[0]

    @jax.jit
    def program(state):
      return jax.lax.scan(lambda s, _: (once(s), None), state, length=2)[0]

    assert_same(program(state), once(once(state)))

  def test_vmap_equals_single_calls(self, verb):
    calls = [example(verb, seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *calls)
    verbs = jax.jit(jax.vmap(lambda state, args: TABLE[verb](state, **args)))
    together = verbs(*stacked)
    for i, (state, args) in enumerate(calls):
      single = TABLE[verb](state, **args)
      assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], together), single)

  @pytest.mark.deep
  def test_shard_map_equals_single_calls(self, verb):
    calls = [example(verb, seed) for seed in range(2)]
    _, results = on_devices(TABLE[verb], calls)
    for (state, args), result in zip(calls, results, strict=True):
      assert_same(result, jax.device_get(TABLE[verb](state, **args)))


def _shapes(tree):
  return jax.tree.map(lambda x: (*x.shape, str(x.dtype)), tree)


def _types(tree):
  return jax.tree.map(jax.typeof, tree)


# Operation by operation, each compiled by itself.
@pytest.mark.deep
@pytest.mark.parametrize("verb", NAMING)
def test_disable_jit_gives_the_same(verb):
  state, args = example(verb)
  with jax.disable_jit():
    plain = TABLE[verb](state, **args)
  assert_same(TABLE[verb](state, **args), plain)


@pytest.mark.parametrize("verb", NAMING)
class TestRows:
  def test_each_row_has_its_code(self, verb):
    state, args = example(verb)
    _, out = TABLE[verb](state, **args)
    codes = out.code.tolist()
    assert codes[0] == _OK and codes[1] not in (_OK, _SKIPPED)
    assert codes[2] == _SKIPPED

  @pytest.mark.fast
  @slow_except("verb", NAMING, "submit", "extend", "harvest groups")
  def test_masked_and_failed_rows_change_nothing(self, verb):
    """Masked rows and rows with wrong ids leave the state bit-identical."""
    state, args = example(verb)
    state_copy = jax.device_get(_plain(state))
    no_rows = jnp.zeros_like(args["mask"])
    new_state, out = TABLE[verb](state, **(args | {"mask": no_rows}))
    assert out.code.tolist() == [_SKIPPED] * 3
    assert_same(new_state, state)
    wrong = {"mask": jnp.ones_like(args["mask"])}
    if verb == "submit":
      wrong["lengths"] = jnp.asarray([-1, 9, 2**31 - 1], jnp.int32)
    else:
      wrong["ids"] = jnp.asarray([-1, 10**6, -(2**31)], jnp.int32)
    new_state, out = TABLE[verb](state, **(args | wrong))
    assert not set(out.code.tolist()) & {_OK, _SKIPPED}
    assert_same(new_state, state)
    # The old state stays as it was.
    TABLE[verb](state, **args)
    assert_same(jax.device_get(_plain(state)), state_copy)
