"""A NaN costs the sequences that computed it, and no later one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxkv
import jaxkv_kernels as kernels
from jaxkv import kv as kv_memory
from jaxkv import rollout
from tests.engine import by_hand

_VOCABULARY, _WIDTH, _PAGE, _BAD = 16, 4, 2, 9
_WINDOWS = (None, 4)
_RNG = np.random.default_rng(3)
_EMBEDDINGS = _RNG.normal(size=(_VOCABULARY, _WIDTH)).astype(np.float32)
_HEAD = _RNG.normal(size=(_WIDTH, _VOCABULARY)).astype(np.float32)
# No sequence samples the token whose embedding is NaN.
_HEAD[:, _BAD] = 0
_BIAS = np.where(np.arange(_VOCABULARY) == _BAD, -100, 0)[None]
_BIAS = _BIAS.astype(np.float32)
_GOOD = jnp.asarray(_EMBEDDINGS)
_ALL_BAD = _GOOD * jnp.nan
_ONE_BAD = _GOOD.at[_BAD].set(jnp.nan)
_COMMON = [1, 2, 3, 4, 5, 6, 7, 8]
_DONE, _FAILED = rollout.SequenceStatus.DONE, rollout.SequenceStatus.FAILED


def _model(params, batch, kv):
  """Runs full attention and a window, in two layer groups."""
  x = params[batch.tokens][:, :, None]
  output = x
  for view, window in zip(batch.views, _WINDOWS, strict=True):
    kv = kv_memory.write(kv, view, 0, x, x)
    options = kernels.AttentionOptions(window=window)
    output = output + kv_memory.attend(kv, view, 0, x, options=options)
  columns = jnp.clip(batch.columns, 0, output.shape[1] - 1)
  return output[0, columns, 0] @ _HEAD + _BIAS, kv


def _memory(offload_pages=30) -> rollout.Memory:
  config = jaxkv.CacheConfig(
    num_pages=60,
    page_size=_PAGE,
    num_slots=6,
    pages_per_slot=12,
    groups=(jaxkv.FullAttention(), jaxkv.SlidingWindow(4)),
    offload_pages=offload_pages,
  )
  kv = kv_memory.init(
    config,
    num_layers=1,
    num_kv_heads=1,
    head_dim=_WIDTH,
    dtype=jnp.float32,
  )
  cache = jaxkv.init(config, jax.random.key(0))
  offload = None
  if offload_pages:
    offload = kv_memory.init_offload(kv, config)
  return rollout.Memory(cache=cache, kv=kv, offload=offload)


def _rollout(
  memory, prompts, num_samples=2, max_prompts=8, **options
) -> rollout.RolloutState:
  """Returns a rollout with spare rows, so that one program serves all tests."""
  num_spare = max_prompts - len(prompts)
  counts = [num_samples] * len(prompts) + [0] * num_spare
  config = rollout.RolloutConfig(
    num_samples=2,
    decode_steps=3,
    max_new_tokens=5,
    prefill_chunk=5,
    admissions=2,
    **options,
  )
  return rollout.init(
    memory.cache,
    memory.kv,
    by_hand.requests_of([*prompts, *[[0]] * num_spare], 14, num_samples=counts),
    jax.random.key(1),
    config,
    version=0,
    offload=memory.offload,
  )


_program = jax.jit(functools.partial(rollout.generate, model=_model))


def _generate(params, state, num_steps=by_hand.NO_LIMIT):
  """Calls `generate` with a limit, so that one program serves all tests."""
  return _program(params, state, rollout.Until(steps=jnp.int32(num_steps)))


def _statuses(state: rollout.RolloutState) -> list[int]:
  """Returns the status of all sequences; rows without one have none."""
  status = np.asarray(state.queue.status)
  return status[status != rollout.SequenceStatus.EMPTY].tolist()


def _cached_tokens(cache: jaxkv.CacheState, prompt: list[int]) -> int:
  """Returns the cached tokens of a prompt, by a query with one more token."""
  tokens = jnp.asarray([[*prompt, 0]], jnp.int32)
  match = jaxkv.match(cache, tokens, jnp.asarray([len(prompt) + 1]))
  return int(match.num_cached_tokens[0])


def _num_cached(cache: jaxkv.CacheState) -> int:
  """Returns the number of pages in the index, on the device or offloaded."""
  return int(np.count_nonzero(cache.pool.index.buckets))


def test_bad_weights_leave_nothing_in_the_index():
  """Pages that a window has freed leave the index, too."""
  prompts = [[*_COMMON, 1, 2, 3, 4], [*_COMMON, 5], [3, 1, 4, 1, 5, 9, 2, 6]]
  good = _generate(_GOOD, _rollout(_memory(), prompts))
  bad = _generate(_ALL_BAD, _rollout(_memory(), prompts))
  rollout.check(bad)
  assert set(_statuses(bad)) == {_FAILED}
  assert set(bad.queue.code.tolist()) == {0, jaxkv.Status.BAD_LOGITS}
  assert _num_cached(bad.memory.cache) == 0
  state = _generate(_GOOD, _rollout(bad.memory, prompts))
  rollout.check(state)
  assert set(_statuses(state)) == {_DONE}
  expected = rollout.generated(good)
  actual = rollout.generated(state)
  np.testing.assert_array_equal(actual.tokens, expected.tokens)
  np.testing.assert_array_equal(actual.log_probs, expected.log_probs)


def test_pages_that_others_hold_stay():
  """Of two prompts with a common head, the one with the NaN fails."""
  prompts = [[*_COMMON, 1, 2], [*_COMMON, _BAD, 2, 3]]
  state = _generate(_ONE_BAD, _rollout(_memory(), prompts))
  rollout.check(state)
  assert _statuses(state) == [_DONE, _DONE, _FAILED, _FAILED]
  cache = state.memory.cache
  assert _cached_tokens(cache, [*_COMMON, 1, 2]) == 10
  # Nobody holds the head any more, so the next failure takes it along.
  state = _rollout(state.memory, [[*_COMMON, _BAD]])
  state = _generate(_ONE_BAD, state)
  assert set(_statuses(state)) == {_FAILED}
  assert _cached_tokens(state.memory.cache, [*_COMMON, 1, 2]) == 0


def test_pages_of_an_aborted_prompt_fail_one_sequence_only():
  """The next sequence finds its offloaded pages, and fails."""
  prompt = [*_COMMON, 1, 2, 3, 4]
  state = _rollout(_memory(), [prompt], num_samples=1)
  state = _generate(_ALL_BAD, state, num_steps=2)
  state, _ = rollout.abort(state, state.queue.ids)
  assert _num_cached(state.memory.cache) > 0
  prompts = [[n, *range(12)] for n in range(4)]
  state = _generate(_GOOD, _rollout(state.memory, prompts, num_samples=1))
  assert jaxkv.stats(state.memory.cache).saved_pages > 0
  assert _cached_tokens(state.memory.cache, prompt) > 0
  state = _rollout(state.memory, [prompt], num_samples=1)
  state = _generate(_GOOD, state)
  assert state.queue.code[0] == jaxkv.Status.BAD_LOGITS
  assert _cached_tokens(state.memory.cache, prompt) == 0
  state = _rollout(state.memory, [prompt], num_samples=1)
  state = _generate(_GOOD, state)
  rollout.check(state)
  assert _statuses(state) == [_DONE]


@pytest.mark.slow
@pytest.mark.parametrize("lockstep", [False, True])
def test_failure_in_one_shard(lockstep):
  """Sequences of one shard fail, and the other shard continues."""
  auto = jax.sharding.AxisType.Auto
  mesh = jax.make_mesh((2,), ("data",), axis_types=(auto,))
  options: dict = {"lockstep_axis": "data"} if lockstep else {}
  options["max_prompts"] = 2
  states = [
    _rollout(_memory(0), [[*_COMMON, 1], [*_COMMON, token]], **options)
    for token in (2, _BAD)
  ]
  state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)

  @jax.jit
  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(P(), P("data")),
    out_specs=P("data"),
  )
  def generate(params, state):
    state = jax.tree.map(lambda leaf: leaf[0], state)
    state = rollout.generate(params, state, model=_model)
    return jax.tree.map(lambda leaf: leaf[None], state)

  state = generate(_ONE_BAD, state)
  expected = [[_DONE] * 4, [_DONE, _DONE, _FAILED, _FAILED]]
  assert state.queue.status.tolist() == expected
  for index in range(2):
    rollout.check(jax.tree.map(lambda leaf, i=index: leaf[i], state))
