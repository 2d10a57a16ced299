"""Arguments of a rollout: bad ones raise and are named."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import guides
from jaxkv import kv as kv_memory
from jaxkv import rollout
from tests.engine import by_hand
from tests.tools.compiled_programs import num_compiled

_VOCABULARY = 7
_FIELDS = (
  "num_samples",
  "prefill_chunk",
  "admissions",
  "window",
)
_SIZES = jaxkv.CacheConfig(
  num_pages=20, page_size=2, num_slots=2, pages_per_slot=5
)


def _begin(
  prompts=((1, 2, 3), (4, 5, 0)),
  lengths=(3, 2),
  key=None,
  first_sequence=0,
  **options,
) -> rollout.RolloutState:
  config = rollout.RolloutConfig(**{"max_new_tokens": 4, **options})
  return rollout.init(
    jaxkv.init(_SIZES, jax.random.key(0)),
    kv_memory.init(_SIZES, num_layers=1, num_kv_heads=1, head_dim=2),
    rollout.Requests(prompts, lengths),
    jax.random.key(0) if key is None else key,
    config,
    first_sequence=first_sequence,
  )


def _model(params, batch, kv, change=lambda logits: logits):
  """Returns logits that favour the token after the last one."""
  del params, kv
  ahead = (batch.tokens + 1) % _VOCABULARY
  return change(4 * jax.nn.one_hot(ahead, _VOCABULARY)), None


def _generate(temperature=0.0, until=None, change=lambda logits: logits):
  state = _begin()
  temperatures = jnp.full((2,), temperature, jnp.float32)
  sampling = rollout.Sampling(temperature=temperatures)
  queue = dataclasses.replace(state.queue, sampling=sampling)
  state = dataclasses.replace(state, queue=queue)
  return rollout.generate(None, state, until, model=_all_logits(change))


def _all_logits(change):
  return by_hand.all_logits(functools.partial(_model, change=change))


class TestConfig:
  @pytest.mark.parametrize("name", _FIELDS)
  @pytest.mark.parametrize("value", [0, -1, 2**31, 2**40])
  def test_numbers_out_of_range(self, name, value):
    message = rf"RolloutConfig.{name}` must be at least 1 and .* got {value}"
    with pytest.raises(ValueError, match=message):
      rollout.RolloutConfig(**{name: value})

  def test_requests_of_no_tokens_need_log_probs(self):
    with pytest.raises(ValueError, match="without `log_probs_from`, got 0"):
      _begin(max_new_tokens=0)

  @pytest.mark.parametrize("name", (*_FIELDS, "max_new_tokens", "stop_token"))
  @pytest.mark.parametrize("value", [1.5, 4.0, True, (1, 2), "3", None])
  def test_types_other_than_int_are_refused(self, name, value):
    with pytest.raises(TypeError, match=rf"{name}` must be an int, got .*type"):
      rollout.RolloutConfig(**{name: value})

  def test_range_of_stop_token(self):
    assert rollout.RolloutConfig(stop_token=-1).stop_token == -1
    assert rollout.RolloutConfig(stop_token=np.int64(3)).stop_token == 3
    assert rollout.RolloutConfig(max_overtaken=0).max_overtaken == 0
    for value in (-2, 2**40):
      with pytest.raises(ValueError, match=rf"at least -1 and .* got {value}"):
        rollout.RolloutConfig(stop_token=value)


class TestPrompts:
  @pytest.mark.parametrize(
    ("prompts", "lengths", "error", "message"),
    [
      ([[1, 2**40]], [2], ValueError, "`requests.tokens` must fit int32"),
      ([[1, 2]], [2**40], ValueError, "`requests.lengths` must fit int32"),
      ([[1.0, 2.0]], [2], TypeError, "`requests.tokens` must hold integers"),
      ([[True, False]], [2], TypeError, "`requests.tokens` must hold integers"),
      (
        (t for t in [[1, 2]]),
        [2],
        TypeError,
        "`requests.tokens` must hold integers",
      ),
      (
        [(t for t in [1, 2])],
        [2],
        TypeError,
        "`requests.tokens` must hold integers",
      ),
      (
        [[1, 2], [3]],
        [2, 1],
        ValueError,
        "`requests.tokens` must be a rectangular",
      ),
      (
        [1, 2],
        [2],
        ValueError,
        r"`requests.tokens` must have the shape \[P, L\]",
      ),
      (
        [[1, 2]],
        [2, 2],
        ValueError,
        "`requests.lengths` must have .* for each prompt",
      ),
      (
        [[1, 2]],
        (n for n in [2]),
        TypeError,
        "`requests.lengths` must hold integers",
      ),
    ],
  )
  def test_bad_prompts_are_refused(self, prompts, lengths, error, message):
    with pytest.raises(error, match=message):
      _begin(prompts, lengths)

  def test_lists_and_arrays_give_equal_queues(self):
    lists = _begin([[1, 2, 3]], [3]).queue
    arrays = _begin(np.array([[1, 2, 3]], np.int64), jnp.array([3])).queue
    np.testing.assert_array_equal(lists.tokens, arrays.tokens)

  def test_too_many_samples(self):
    with pytest.raises(ValueError, match=r"num_samples` times .* got 2147483"):
      _begin(num_samples=2**31 - 1)


def test_sampling_holds_any_leaves():
  sampling = rollout.Sampling(temperature=[0.0, 1.0], top_k=jnp.int32(3))
  shapes = jax.eval_shape(lambda: rollout.Sampling(top_p=jnp.ones(2)))
  assert shapes.top_p.shape == (2,)
  names = jax.tree_util.tree_map_with_path(
    lambda path, _: jax.tree_util.keystr(path), sampling
  )
  assert names.top_k == ".top_k"
  assert names.temperature == [".temperature[0]", ".temperature[1]"]


class TestKeysAndIds:
  @pytest.mark.parametrize("key", [0, np.uint32([0, 1])])
  def test_raw_keys_are_refused(self, key):
    with pytest.raises(TypeError, match=r"`key` must be a jax\.random"):
      _begin(key=key)

  @pytest.mark.parametrize("seq_id", [-1, 2**31 - 4])
  def test_first_sequence_out_of_range(self, seq_id):
    with pytest.raises(ValueError, match=f"`first_sequence` .* got {seq_id}"):
      _begin([[1, 2]], [2], num_samples=4, first_sequence=seq_id)

  def test_empty_calls_change_no_token(self):
    state = _begin()
    for new_state, out in (
      rollout.abort(state, []),
      rollout.requeue(state, []),
      rollout.harvest(state, []),
      rollout.extend(state, [], np.zeros((0, 1), np.int32), []),
    ):
      assert out.code.shape == (0,)
      jax.tree.map(
        np.testing.assert_array_equal,
        *(jax.tree.leaves(x.queue.tokens) for x in (new_state, state)),
      )


class TestRequests:
  """Shapes that disagree raise in `submit` and `init`."""

  @pytest.mark.parametrize(
    ("name", "value", "message"),
    [
      ("lengths", [2, 2, 2], r"\[2\], one for each prompt, got \[3\]"),
      ("num_samples", [1], r"\[2\], one for each prompt, got \[1\]"),
      ("priority", [1, 2], r"\[4\], one for each sample, got \[2\]"),
      (
        "salts",
        np.zeros((2, 4), np.uint32),
        r"\[4, 4\], one for each sample, got \[2, 4\]",
      ),
      ("extra", np.zeros(2), r"\[4, \.\.\.\], got \[2\]; .* each sample"),
    ],
  )
  def test_shapes_that_disagree_are_refused(self, name, value, message):
    fields = {"tokens": [[1, 2], [3, 4]], "lengths": [2, 2]}
    requests = rollout.Requests(**(fields | {name: value}))
    message = rf"`requests\.{name}` must have the shape {message}"
    state = _begin(num_samples=2)
    with pytest.raises(ValueError, match=message):
      rollout.submit(state, requests)
    memory = state.memory
    with pytest.raises(ValueError, match=message):
      rollout.init(
        memory.cache, memory.kv, requests, jax.random.key(0), state.config
      )

  @pytest.mark.parametrize("field", ["temperature", "max_tokens"])
  def test_settings_of_wrong_length_are_refused(self, field):
    sampling = rollout.Sampling(**{field: [1, 1, 1]})
    requests = rollout.Requests([[1, 2], [3, 4]], [2, 2], sampling=sampling)
    with pytest.raises(ValueError, match=rf"`{field}.*` must .*\[4\].*\[3\]"):
      rollout.submit(_begin(num_samples=2), requests)

  def test_lists_instead_of_requests_are_refused(self):
    message = r"`requests` must be a Requests, got list; make one with"
    with pytest.raises(TypeError, match=message):
      rollout.submit(_begin(), [[1, 2]])


def test_init_has_few_arguments():
  assert len(inspect.signature(rollout.init).parameters) <= 8


def test_init_compiles_one_program():
  """A program for each operation would take seconds."""
  # Compiles the copy of the key, which all calls share.
  memory = _begin().memory
  key = jax.random.key(0)
  config = rollout.RolloutConfig(max_new_tokens=4)
  # No other test has prompts of this shape.
  tokens = np.ones((7, 5), np.int32)
  num_programs = num_compiled()
  for lengths in ([5] * 7, [1, 2, 3, 4, 5, 1, 2]):
    requests = rollout.Requests(tokens, lengths)
    rollout.init(memory.cache, memory.kv, requests, key, config)
    assert num_compiled() - num_programs == 1


class TestUntil:
  @pytest.mark.parametrize(
    ("value", "error", "message"),
    [
      (-1, ValueError, "must be at least 0, got -1; use None for no limit"),
      (2**40, ValueError, "must fit int32"),
      (1.5, TypeError, "must hold integers, got float64"),
      (True, TypeError, "must hold integers, got bool"),
      ([3], ValueError, r"must have the shape \[\], got \[1\]"),
    ],
  )
  def test_bad_limits_are_refused(self, value, error, message):
    for name in ("steps", "prompts", "sequences"):
      with pytest.raises(error, match=f"`until.{name}` {message}"):
        _generate(until=rollout.Until(**{name: value}))

  def test_int_instead_of_until_is_refused(self):
    with pytest.raises(TypeError, match=r"`until` must be .* write Until"):
      _generate(until=3)

  @pytest.mark.deep
  def test_traced_limits(self):
    """Types are checked while tracing; values are unknown."""

    def run(steps):
      return _generate(until=rollout.Until(steps=steps))

    with pytest.raises(TypeError, match=r"`until\.steps` must hold integers"):
      jax.eval_shape(run, 1.5)
    state = jax.jit(run)(-1)
    assert int(state.counters.steps) == 0


class TestLogits:
  @pytest.mark.deep
  def test_half_precision_is_sampled_in_float32(self):
    """The logits are integers, exact in both, so results are equal."""
    full = jax.jit(_generate)
    half = jax.jit(
      functools.partial(
        _generate, change=lambda logits: logits.astype(jnp.bfloat16)
      )
    )
    for temperature in (0.0, 1.0):
      half_queue = half(temperature).queue
      full_queue = full(temperature).queue
      assert half_queue.log_probs.dtype == jnp.float32
      np.testing.assert_array_equal(half_queue.tokens, full_queue.tokens)
      np.testing.assert_array_equal(half_queue.log_probs, full_queue.log_probs)

  def test_integer_logits_are_refused(self):
    with pytest.raises(TypeError, match="`logits` must be floats, got int32"):
      _generate(change=lambda x: x.astype(jnp.int32))

  def test_logits_of_wrong_columns_are_refused(self):
    def model(params, batch, kv):
      del params, kv
      return jnp.zeros((batch.tokens.shape[1] + 1, _VOCABULARY)), None

    with pytest.raises(ValueError, match=r"`logits` must have .* \[2, V\].*3,"):
      rollout.generate(None, _begin(), model=model)


@pytest.mark.parametrize(
  ("process", "message"),
  [
    (
      lambda logits, rows, extra: logits,
      r"`process` must return \(logits, extra\), got float32\[2, 7\]",
    ),
    (
      lambda logits, rows, extra: (logits[:, 1:], extra),
      r"`logits` that `process` returns must .* 7\], got float32\[2, 6\]",
    ),
    (
      lambda logits, rows, extra: (logits, extra / 2),
      r"`extra` that `process` returns must .*int32\[2\], got float32\[2\]",
    ),
  ],
)
def test_bad_results_of_process_are_refused(process, message):
  state = _begin()
  queue = dataclasses.replace(state.queue, extra=jnp.zeros(2, jnp.int32))
  state = dataclasses.replace(state, queue=queue)
  model = _all_logits(lambda logits: logits)
  with pytest.raises(TypeError, match=message):
    rollout.generate(None, state, model=model, process=process)


def test_donation_keeps_the_callers_arrays():
  """Arguments of `init` may be used by several rollouts."""
  tokens = guides.token_bytes([bytes([65 + n]) for n in range(16)])
  requests = rollout.Requests(
    jnp.ones((2, 5), jnp.int32),
    jnp.full(2, 5),
    sampling=rollout.Sampling(
      temperature=jnp.ones(4), stop_strings=rollout.stop_strings(["AB"], tokens)
    ),
    num_samples=jnp.full(2, 2),
    priority=jnp.arange(4),
    salts=jnp.ones((4, 4), jnp.uint32),
    extra={"adapter": jnp.zeros((4, 2))},
  )
  key = jax.random.key(0)
  version = jnp.int32(0)
  sizes = jaxkv.CacheConfig(
    num_pages=40, page_size=4, num_slots=2, pages_per_slot=8
  )
  state = rollout.init(
    jaxkv.init(sizes),
    jaxkv.kv.init(sizes, num_layers=1, num_kv_heads=1, head_dim=1),
    requests,
    key,
    rollout.RolloutConfig(num_samples=2, max_new_tokens=4),
    version=version,
  )
  jax.jit(lambda state: jax.tree.map(jnp.copy, state), donate_argnums=0)(state)
  assert state.queue.tokens.is_deleted()
  for path, leaf in jax.tree_util.tree_leaves_with_path(
    (requests, key, version)
  ):
    if isinstance(leaf, jax.Array):
      assert not leaf.is_deleted(), jax.tree_util.keystr(path)


def test_numpy_integers_become_python_ints():
  config = rollout.RolloutConfig(max_new_tokens=np.int64(4))
  assert repr(config) == repr(rollout.RolloutConfig(max_new_tokens=4))


@pytest.mark.parametrize(
  ("group", "length", "pages"),
  [
    # Tokens 3 to 5 are one chunk, and in two pages.
    (jaxkv.ChunkedLocal(3), 8, 2),
    (jaxkv.ChunkedLocal(4), 8, 2),
    (jaxkv.ChunkedLocal(4), 4, 1),
    # A window never holds more than all pages of the sequence.
    (jaxkv.SlidingWindow(64), 8, 2),
    (jaxkv.SlidingWindow(2), 40, 2),
    (jaxkv.FullAttention(), 40, 10),
    (jaxkv.Recurrent(), 40, 2),
  ],
)
def test_max_pages_of_a_sequence(group, length, pages):
  sizes = jaxkv.CacheConfig(
    num_pages=20, page_size=4, num_slots=1, pages_per_slot=10, groups=(group,)
  )
  assert sizes.sizes.max_pages(1, length) == (pages,)
