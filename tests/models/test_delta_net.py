"""The gated delta rule beside a loop over tokens in NumPy and float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxkv
from jaxkv import models
from jaxkv._src.models.decoder import delta_net
from tests.kv.memory import view
from tests.models import tiny_decoders as tiny

_ROWS, _HEADS, _KEY_HEADS, _KEY, _VALUE = 3, 4, 2, 8, 6


def _drawn(seed, *shape):
  return np.random.default_rng(seed).standard_normal(shape)


def _inputs(columns, seed=0):
  q, k = (_drawn(seed + i, _ROWS, columns, _KEY_HEADS, _KEY) for i in range(2))
  q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
  v = _drawn(seed + 2, _ROWS, columns, _HEADS, _VALUE)
  decay = -np.abs(_drawn(seed + 3, _ROWS, columns, _HEADS))
  beta = 1 / (1 + np.exp(_drawn(seed + 4, _ROWS, columns, _HEADS)))
  return q, k, v, decay, beta


def _loop(q, k, v, decay, beta, state, num_tokens):
  """Token after token, in float64."""
  state, out = state.astype(np.float64), np.zeros(v.shape)
  times = v.shape[2] // k.shape[2]
  for row, count in enumerate(num_tokens):
    for t in range(count):
      for head in range(v.shape[2]):
        key, query = k[row, t, head // times], q[row, t, head // times]
        matrix = state[row, head] * np.exp(decay[row, t, head])
        change = beta[row, t, head] * (v[row, t, head] - key @ matrix)
        state[row, head] = matrix + np.outer(key, change)
        out[row, t, head] = query @ state[row, head] * _KEY**-0.5
  return out, state


def _as_float32(*arrays):
  return [jnp.asarray(array, jnp.float32) for array in arrays]


_rule = jax.jit(delta_net.gated_delta_rule, static_argnames="chunk")


class TestRule:
  @pytest.mark.parametrize(
    ("columns", "chunk", "decay_factor"),
    [
      (1, 64, 1),
      (2, 1, 1),
      (7, 3, 1),
      (7, 64, 1),
      (70, 16, 1),
      # A sum of logarithms that no float32 exponential could undo.
      (40, 64, 60),
    ],
  )
  def test_equals_the_loop(self, columns, chunk, decay_factor):
    q, k, v, decay, beta = _inputs(columns)
    inputs = (q, k, v, decay * decay_factor, beta)
    state = _drawn(9, _ROWS, _HEADS, _KEY, _VALUE)
    num_tokens = np.asarray([columns, columns // 2, 0], np.int32)
    expected, end_state = _loop(*inputs, state, num_tokens)
    # Whatever is behind a row's tokens changes nothing.
    for array in inputs:
      array[1, num_tokens[1] :] = array[2] = np.nan
    out, new_state = _rule(
      *_as_float32(*inputs, state), num_tokens, chunk=chunk
    )
    np.testing.assert_allclose(out, expected, atol=5e-6)
    np.testing.assert_allclose(new_state, end_state, atol=5e-6)
    np.testing.assert_array_equal(new_state[2], state[2].astype(np.float32))

  def test_bfloat16_has_a_float32_state(self):
    inputs = [x.astype(jnp.bfloat16) for x in _as_float32(*_inputs(3))]
    state = jnp.zeros((_ROWS, _HEADS, _KEY, _VALUE))
    out, new_state = _rule(*inputs, state, jnp.full(_ROWS, 3, jnp.int32))
    assert (out.dtype, new_state.dtype) == (jnp.bfloat16, jnp.float32)

  @pytest.mark.slow
  def test_gradients(self):
    inputs = _as_float32(*_inputs(5))
    state = jnp.asarray(_drawn(9, _ROWS, _HEADS, _KEY, _VALUE), jnp.float32)
    num_tokens = jnp.asarray([5, 3, 0], jnp.int32)

    def outputs(*arrays):
      return delta_net.gated_delta_rule(*arrays, num_tokens, chunk=3)

    check_grads(
      outputs, (*inputs, state), order=1, modes=["rev"], atol=2e-2, rtol=2e-2
    )


class TestConvolution:
  @pytest.mark.parametrize("columns", [1, 2, 9])
  @pytest.mark.parametrize("width", [1, 4])
  def test_equals_the_loop(self, columns, width):
    x, weight = _drawn(0, _ROWS, columns, 5), _drawn(1, 5, width)
    state = _drawn(2, _ROWS, 5, width - 1)
    num_tokens = np.asarray([columns, columns // 2, 0], np.int32)
    out, new_state = jax.jit(delta_net.causal_conv)(
      *_as_float32(x, weight, state), num_tokens
    )
    for row, count in enumerate(num_tokens):
      inputs = np.concatenate([state[row].T, x[row, :count]])
      for t in range(count):
        expected = (inputs[t : t + width] * weight.T).sum(axis=0)
        np.testing.assert_allclose(out[row, t], expected, atol=2e-6)
      expected = inputs[len(inputs) - (width - 1) :].T
      np.testing.assert_allclose(new_state[row], expected, atol=1e-7)

  def test_packed_tokens_become_rows_and_return(self):
    packed = _drawn(0, 9, 2)
    num_tokens = jnp.asarray([3, 0, 4], jnp.int32)
    rows = delta_net.to_rows(jnp.float32(packed), num_tokens, 4)
    np.testing.assert_array_equal(rows[0, :3], packed[:3].astype(np.float32))
    np.testing.assert_array_equal(rows[2], packed[3:7].astype(np.float32))
    back = delta_net.to_columns(rows, num_tokens, 9)
    np.testing.assert_array_equal(back[:7], packed[:7].astype(np.float32))
    np.testing.assert_array_equal(back[7:], 0)


@pytest.mark.slow
class TestForward:
  config = tiny.decoder((tiny.layer(tiny.DELTA_NET),))

  def arguments(self, tokens, where, num_pages):
    """Parameters, a batch and zeros as its memory, with pages of 4 tokens."""
    cache_config = jaxkv.CacheConfig(
      num_pages=num_pages,
      page_size=4,
      num_slots=3,
      pages_per_slot=2,
      groups=models.cache_groups(self.config),
    )
    tokens = jnp.asarray(tokens, jnp.int32)
    batch = jaxkv.kv.Batch(
      tokens=tokens, positions=jnp.zeros_like(tokens), views=(where,)
    )
    params = models.init_params(jax.random.key(0), self.config)
    return params, batch, models.init_kv(self.config, cache_config)

  def test_tokens_outside_the_vocabulary_stay_in_their_sequence(self):
    """Also in packed columns, where the next sequence follows a row's end."""
    pages = [[1], [2], [3]]
    where = jaxkv.kv.PackedView(
      decode=view(pages, [0] * 3, [0] * 3),
      prefill=view(pages, [0] * 3, [2, 3, 1]),
    )
    healthy = [0, 0, 0, 1, 2, 3, 4, 5, 6]
    broken = [0, 0, 0, 1, 2, -1, tiny.VOCABULARY, 5, 6]
    (expected, expected_kv), (logits, kv) = (
      jax.device_get(
        models.forward(
          *self.arguments([tokens], where, num_pages=4), config=self.config
        )
      )
      for tokens in (healthy, broken)
    )
    assert np.isfinite(expected).all() and np.isnan(logits[0, 5:8]).all()
    np.testing.assert_array_equal(logits[0, [3, 4, 8]], expected[0, [3, 4, 8]])
    for name, states in kv.states.items():
      expected = expected_kv.states[name]
      np.testing.assert_array_equal(states[[1, 3]], expected[[1, 3]])

  def test_under_shard_map(self):
    """Rows that go past the end of a page, on two devices with own pages."""
    where = view([[1, 2], [1, 2]], [1, 2], [5, 5])
    arguments = self.arguments(np.ones((2, 5)), where, num_pages=6)
    rows = P("data")
    run = jax.shard_map(
      functools.partial(models.forward, config=self.config),
      mesh=jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)),
      in_specs=(P(), rows, rows),
      out_specs=rows,
    )
    logits, _ = jax.eval_shape(run, *arguments)
    assert logits.shape == (2, 5, tiny.VOCABULARY)


def test_equals_the_definition_of_qwen3_next():
  """The functions of `transformers` themselves, if it is there."""
  torch = pytest.importorskip("torch", reason="needs torch")
  qwen = pytest.importorskip(
    "transformers.models.qwen3_next.modeling_qwen3_next",
    reason="needs transformers",
  )
  q, k, v, decay, beta = _inputs(70)
  q, k = (3 * np.repeat(x, 2, axis=2) for x in (q, k))
  state = _drawn(9, _ROWS, _HEADS, _KEY, _VALUE)
  inputs = (q, k, v, decay, beta)
  expected, end_state = qwen.torch_recurrent_gated_delta_rule(
    *(torch.tensor(x, dtype=torch.float32) for x in inputs),
    initial_state=torch.tensor(state, dtype=torch.float32),
    output_final_state=True,
    use_qk_l2norm_in_kernel=True,
  )
  q, k, v, decay, beta = _as_float32(*inputs)
  out, new_state = _rule(
    delta_net.l2_normalized(q),
    delta_net.l2_normalized(k),
    v,
    decay,
    beta,
    jnp.float32(state),
    jnp.full(_ROWS, 70, jnp.int32),
  )
  np.testing.assert_allclose(out, expected.numpy(), atol=5e-6)
  np.testing.assert_allclose(new_state, end_state.numpy(), atol=5e-6)
