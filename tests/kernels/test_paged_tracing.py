"""Bitwise properties of the XLA backend, and tracing."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv_kernels as kernels
from tests.kernels import reference
from tests.kernels.backends import call_of
from tests.kernels.shapes import SHAPES
from tests.kernels.shapes import Shape
from tests.kernels.shapes import assert_matches
from tests.kernels.shapes import problem
from tests.kernels.shapes import put
from tests.kernels.shapes import queries

STATIC = ("scale", "soft_cap", "window")


def jitted(function, *static):
  """The function, jitted; it takes its options by their names."""

  def call(*arguments, **keywords):
    return function(*arguments, **call_of(**keywords))

  return jax.jit(call, static_argnames=(*STATIC, *static))


decode = jitted(kernels.paged_decode)
padded = jitted(kernels.paged_attention_padded)
packed = jitted(kernels.paged_attention, "max_query_len")

PLAIN = SHAPES["page16_gqa4_d128"]
FULL = SHAPES["everything"]


def on_device(options):
  """Options with arrays as jax arrays."""
  return {
    name: jnp.asarray(value) if isinstance(value, np.ndarray) else value
    for name, value in options.items()
  }


def run_decode(case, q):
  """Output and log-sum-exp of the jitted decode, as NumPy."""
  out = decode(
    *put(q, *case.pools, case.lengths),
    **on_device(case.options),
  )
  return [np.asarray(x) for x in out]


class TestReference:
  def test_the_reference_is_softmax_attention(self):
    """On a dense cache it agrees with jax.nn.dot_product_attention."""
    shape = Shape(heads=(8, 2), head_dim=32, page_size=4, lengths=(40, 9))
    case = problem(shape)
    q = queries(case, shape, 2)
    out, _ = reference.paged_decode(q, *case.pools, case.lengths)
    dense = np.zeros((2, 2, 40, 2, 32), np.float32)
    for b, length in enumerate(case.lengths):
      for side, pool in enumerate(case.pools[:2]):
        dense[side, b, :length] = reference.sequence(
          pool, case.page_table[b], length
        )
    expected = jax.nn.dot_product_attention(
      jnp.asarray(q)[:, None],
      *put(*dense),
      key_value_seq_lengths=jnp.asarray(case.lengths),
    )
    np.testing.assert_allclose(out, expected[:, 0], atol=2e-6)


class TestBits:
  def test_page_size_does_not_matter(self):
    """Bitwise, for page sizes that divide the block."""
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((2, 3, 192, 2, 32)).astype(np.float32)
    q = rng.standard_normal((3, 4, 32)).astype(np.float32)
    lengths = np.array([192, 100, 7], np.int32)
    results = []
    for page_size in (1, 4, 16, 64):
      pools = tokens.reshape(2, -1, page_size, 2, 32).swapaxes(2, 3)
      table = np.arange(3 * 192 // page_size, dtype=np.int32).reshape(3, -1)
      results.append(decode(*put(q, *pools, table, lengths))[0])
    for result in results[1:]:
      np.testing.assert_array_equal(results[0], result)

  def test_the_three_functions_agree_on_single_tokens(self):
    case = problem(FULL)
    options = on_device(case.options)
    batch = len(FULL.lengths)
    q, *pools = put(queries(case, FULL, batch), *case.pools)
    lengths = jnp.maximum(jnp.asarray(case.lengths), 1)
    pools[2] = jnp.where(lengths[:, None] == 1, pools[2][1:2], pools[2])
    ones = jnp.ones(batch, jnp.int32)
    ends = jnp.arange(batch + 1, dtype=jnp.int32)
    decoded = decode(q, *pools, lengths, **options)
    rectangle = padded(q[:, None], *pools, lengths - 1, ones, **options)
    rows = packed(q, *pools, lengths, ends, max_query_len=1, **options)
    for a, b, c in zip(decoded, rectangle, rows, strict=True):
      np.testing.assert_array_equal(a, b[:, 0])
      np.testing.assert_array_equal(a, c)

  def test_chunks_equal_one_shot(self):
    case = problem(FULL)
    row, length, chunk = 6, 150, 19
    q = queries(case, FULL, length)
    expected, expected_lse = reference.paged_attention_padded(
      q[None],
      *case.pools[:2],
      case.page_table[row : row + 1],
      [0],
      [length],
      **case.options,
    )
    pieces = []
    for start in range(0, length, chunk):
      count = min(chunk, length - start)
      part = np.zeros((1, chunk, *q.shape[1:]), q.dtype)
      part[0, :count] = q[start : start + count]
      out, lse = padded(
        *put(part, *case.pools[:2], case.page_table[row : row + 1]),
        jnp.asarray([start], jnp.int32),
        jnp.asarray([count], jnp.int32),
        **on_device(case.options),
      )
      pieces.append((out[0, :count], lse[0, :count]))
    out, lse = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    assert_matches(out, lse, expected[0], expected_lse[0], case.dtype)

  def test_packed_queries_past_the_longest_give_nothing(self):
    case = problem(PLAIN)
    q = queries(case, PLAIN, 9)
    ends = np.array([0, 0, 0, 5, 5, 5, 5, 9], np.int32)
    out, lse = packed(
      *put(q, *case.pools, case.lengths, ends),
      max_query_len=3,
    )
    out, lse = jax.device_get((out, lse))
    left_out = [3, 4, 8]
    np.testing.assert_array_equal(out[left_out], 0)
    np.testing.assert_array_equal(lse[left_out], -np.inf)
    assert np.isfinite(np.delete(lse, left_out, axis=0)).all()


class TestTracing:
  def test_layers_share_a_pool(self):
    """A traced page_offset reads the same as a slice of the layer."""
    cases = [problem(PLAIN, seed=seed) for seed in range(2)]
    q = queries(cases[0], PLAIN, len(PLAIN.lengths))
    k_pages, v_pages = (
      np.concatenate([case.pools[side] for case in cases]) for side in (0, 1)
    )
    for layer, case in enumerate(cases):
      out, _ = decode(
        *put(q, k_pages, v_pages, case.page_table, case.lengths),
        page_offset=jnp.int32(layer * len(case.k_pages)),
      )
      np.testing.assert_array_equal(out, run_decode(case, q)[0])

  def test_values_do_not_retrace(self):
    traces = []

    @jax.jit
    def step(q, k_pages, v_pages, table, lengths, offset, window):
      traces.append(1)
      return kernels.paged_decode(
        q,
        k_pages,
        v_pages,
        table,
        lengths,
        page_offset=offset,
        options=kernels.AttentionOptions(window=window),
      )

    case = problem(PLAIN)
    q, *pools = put(queries(case, PLAIN, len(PLAIN.lengths)), *case.pools)
    for shift in range(3):
      lengths = jnp.maximum(jnp.asarray(case.lengths) - shift, 0)
      step(q, *pools, lengths, jnp.int32(shift), jnp.int32(5 + shift))
    assert len(traces) == 1

  def test_a_traced_window_equals_a_static_one(self):
    shape = SHAPES["window20"]
    case = problem(shape)
    q = queries(case, shape, len(shape.lengths))
    traced, _ = jax.jit(kernels.paged_decode)(
      *put(q, *case.pools, case.lengths),
      options=kernels.AttentionOptions(window=20),
    )
    np.testing.assert_array_equal(run_decode(case, q)[0], traced)

  def test_vmap(self):
    shape = Shape(heads=(2, 1), head_dim=32, page_size=4, lengths=(9, 0, 70))
    cases = [problem(shape, seed=seed) for seed in range(2)]
    q = [queries(case, shape, 3, seed=3) for case in cases]
    stacked = [
      jnp.stack(parts)
      for parts in zip(
        *((qs, *c.pools, c.lengths) for qs, c in zip(q, cases, strict=True)),
        strict=True,
      )
    ]
    out, _ = jax.jit(jax.vmap(kernels.paged_decode))(*stacked)
    for index, case in enumerate(cases):
      np.testing.assert_allclose(
        out[index], run_decode(case, q[index])[0], atol=1e-6
      )
