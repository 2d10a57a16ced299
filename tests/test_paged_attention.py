"""The attention functions against their float64 definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv_kernels as kernels
from jaxkv_kernels.attention import definition
from tests.kernels_shapes import SHAPES
from tests.kernels_shapes import Shape
from tests.kernels_shapes import assert_matches
from tests.kernels_shapes import problem
from tests.kernels_shapes import put
from tests.kernels_shapes import queries

STATIC = ("scale", "soft_cap", "window", "return_lse")
decode = jax.jit(kernels.paged_decode, static_argnames=STATIC)
padded = jax.jit(kernels.paged_attention_padded, static_argnames=STATIC)
packed = jax.jit(
  kernels.paged_attention, static_argnames=(*STATIC, "max_query_len")
)

PLAIN = SHAPES["page16_gqa4_d128"]
FULL = SHAPES["everything"]


def on_device(options):
  """Options with sinks as a jax array."""
  return {
    name: jnp.asarray(value) if name == "sinks" else value
    for name, value in options.items()
  }


def run_decode(case, q):
  """Output and log-sum-exp of the jitted decode, as NumPy."""
  out = decode(
    *put(q, *case.pools, case.lengths),
    return_lse=True,
    **on_device(case.options),
  )
  return [np.asarray(x) for x in out]


class TestDefinition:
  @pytest.mark.parametrize("name", SHAPES)
  def test_decode(self, name):
    shape = SHAPES[name]
    case = problem(shape)
    q = queries(case, shape, len(shape.lengths))
    wanted = definition.paged_decode(
      q, *case.pools, case.lengths, **case.options
    )
    out, lse = run_decode(case, q)
    assert out.dtype == case.dtype
    assert lse.dtype == np.float32
    assert_matches(out, lse, *wanted, case.dtype)

  @pytest.mark.parametrize(
    "name",
    [
      "page1_mha_d32",
      "page16_gqa4_d128",
      "page64_gqa8_d64",
      "bits_gqa4",
      "float16_gqa8",
      "window20",
      "everything",
      "everything_bits",
    ],
  )
  def test_padded(self, name):
    shape = SHAPES[name]
    case = problem(shape)
    columns = 19
    counts = np.minimum(case.lengths, [19, 1, 3, 7, 18, 0, 19]).astype(np.int32)
    starts = case.lengths - counts
    q = queries(case, shape, len(counts), columns)
    for b, count in enumerate(counts):
      q[b, count:] = np.nan  # padding may be anything
    wanted = definition.paged_attention_padded(
      q, *case.pools, starts, counts, **case.options
    )
    out, lse = padded(
      *put(q, *case.pools, starts, counts),
      return_lse=True,
      **on_device(case.options),
    )
    assert_matches(out, lse, *wanted, case.dtype)

  @pytest.mark.parametrize("name", ["page8_mqa_d64", "everything"])
  @pytest.mark.parametrize("longest", [None, 70])
  def test_packed(self, name, longest):
    shape = SHAPES[name]
    case = problem(shape)
    runs = np.minimum(case.lengths, [5, 1, 0, 2, 1, 20, 70])
    ends = np.concatenate([[0], np.cumsum(runs)]).astype(np.int32)
    q = queries(case, shape, int(ends[-1]) + 3)
    q[ends[-1] :] = np.nan
    arguments = (q, *case.pools, case.lengths, ends)
    wanted = definition.paged_attention(*arguments, **case.options)
    out, lse = packed(
      *put(*arguments),
      return_lse=True,
      max_query_len=longest,
      **on_device(case.options),
    )
    assert_matches(out, lse, *wanted, case.dtype)

  def test_packed_queries_past_the_longest_give_nothing(self):
    case = problem(PLAIN)
    q = queries(case, PLAIN, 9)
    ends = np.array([0, 0, 0, 5, 5, 5, 5, 9], np.int32)
    out, lse = packed(
      *put(q, *case.pools, case.lengths, ends),
      return_lse=True,
      max_query_len=3,
    )
    out, lse = np.asarray(out), np.asarray(lse)
    left_out = [3, 4, 8]
    np.testing.assert_array_equal(out[left_out], 0)
    np.testing.assert_array_equal(lse[left_out], -np.inf)
    assert np.isfinite(np.delete(lse, left_out, axis=0)).all()

  def test_the_definition_is_softmax_attention(self):
    """On a dense cache it agrees with jax.nn.dot_product_attention."""
    shape = Shape(heads=(8, 2), head_dim=32, page_size=4, lengths=(40, 9))
    case = problem(shape)
    q = queries(case, shape, 2)
    out, _ = definition.paged_decode(q, *case.pools, case.lengths)
    dense = np.zeros((2, 2, 40, 2, 32), np.float32)
    for b, length in enumerate(case.lengths):
      for side, pool in enumerate(case.pools[:2]):
        dense[side, b, :length] = definition.sequence(
          pool, case.page_table[b], length
        )
    wanted = jax.nn.dot_product_attention(
      jnp.asarray(q)[:, None],
      *put(*dense),
      key_value_seq_lengths=jnp.asarray(case.lengths),
    )
    np.testing.assert_allclose(out, wanted[:, 0], atol=2e-6)


class TestProperties:
  @pytest.mark.parametrize("poison", [np.inf, -np.inf, 0.0])
  def test_what_is_not_used_does_not_matter(self, poison):
    shape = FULL
    case, other = problem(shape), problem(shape, poison=poison)
    q = queries(case, shape, len(shape.lengths))
    for a, b in zip(run_decode(case, q), run_decode(other, q), strict=True):
      np.testing.assert_array_equal(a, b)

  def test_pages_behind_the_window_do_not_matter(self):
    shape = SHAPES["window_without_short_rows"]
    case = problem(shape)
    q = queries(case, shape, len(shape.lengths))
    before = run_decode(case, q)
    for b, length in enumerate(shape.lengths):
      behind = (length - case.options["window"]) // shape.page_size
      case.k_pages[case.page_table[b, :behind]] = np.nan
      case.v_pages[case.page_table[b, :behind]] = np.inf
      case.page_table[b, :behind] = 0
    for a, b in zip(before, run_decode(case, q), strict=True):
      np.testing.assert_array_equal(a, b)

  def test_page_numbers_do_not_matter(self):
    case = problem(PLAIN)
    q = queries(case, PLAIN, len(PLAIN.lengths))
    before = run_decode(case, q)
    order = np.random.default_rng(5).permutation(len(case.k_pages))
    k_pages, v_pages = np.empty_like(case.k_pages), np.empty_like(case.v_pages)
    k_pages[order], v_pages[order] = case.k_pages, case.v_pages
    named = (case.page_table >= 0) & (case.page_table < len(order))
    table = np.where(named, order[np.where(named, case.page_table, 0)], -1)
    out = decode(
      *put(q, k_pages, v_pages, table.astype(np.int32), case.lengths),
      return_lse=True,
    )
    for a, b in zip(before, out, strict=True):
      np.testing.assert_array_equal(a, b)

  def test_neighbours_do_not_matter(self):
    case = problem(FULL)
    q = queries(case, FULL, len(FULL.lengths))
    before = run_decode(case, q)
    row = 5
    changed = case.lengths.copy()
    changed[[0, 6]] = 0, 3
    q[6] = np.nan
    out = decode(
      *put(q, *case.pools, changed), return_lse=True, **on_device(case.options)
    )
    for a, b in zip(before, out, strict=True):
      np.testing.assert_array_equal(a[row], b[row])

  def test_place_in_the_batch_does_not_matter(self):
    case = problem(FULL)
    q = queries(case, FULL, len(FULL.lengths))
    before = run_decode(case, q)
    order = np.array([3, 6, 0, 5, 1, 4, 2])
    out = decode(
      *put(
        q[order],
        *case.pools[:2],
        case.page_table[order],
        case.lengths[order],
      ),
      return_lse=True,
      **on_device(case.options),
    )
    for a, b in zip(before, out, strict=True):
      np.testing.assert_array_equal(a[order], b)

  def test_page_size_does_not_matter(self):
    """Bitwise, for page sizes that divide the block."""
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((2, 3, 192, 2, 32)).astype(np.float32)
    q = rng.standard_normal((3, 4, 32)).astype(np.float32)
    lengths = np.array([192, 100, 7], np.int32)
    results = []
    for size in (1, 4, 16, 64):
      pools = tokens.reshape(2, 3 * 192 // size, size, 2, 32).swapaxes(2, 3)
      table = np.arange(3 * 192 // size, dtype=np.int32).reshape(3, -1)
      results.append(decode(*put(q, *pools, table, lengths)))
    for result in results[1:]:
      np.testing.assert_array_equal(results[0], result)

  def test_the_three_functions_agree_on_single_tokens(self):
    case = problem(FULL)
    options = {"return_lse": True, **on_device(case.options)}
    batch = len(FULL.lengths)
    q, *pools = put(queries(case, FULL, batch), *case.pools)
    lengths = jnp.maximum(jnp.asarray(case.lengths), 1)
    pools[2] = jnp.where(lengths[:, None] == 1, pools[2][1:2], pools[2])
    ones = jnp.ones(batch, jnp.int32)
    ends = jnp.arange(batch + 1, dtype=jnp.int32)
    first = decode(q, *pools, lengths, **options)
    second = padded(q[:, None], *pools, lengths - 1, ones, **options)
    third = packed(q, *pools, lengths, ends, max_query_len=1, **options)
    for a, b, c in zip(first, second, third, strict=True):
      np.testing.assert_array_equal(a, b[:, 0])
      np.testing.assert_array_equal(a, c)

  def test_chunks_equal_one_shot(self):
    case = problem(FULL)
    row, length, chunk = 6, 150, 19
    q = queries(case, FULL, length)
    wanted, wanted_lse = definition.paged_attention_padded(
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
        return_lse=True,
        **on_device(case.options),
      )
      pieces.append((out[0, :count], lse[0, :count]))
    out, lse = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    assert_matches(out, lse, wanted[0], wanted_lse[0], case.dtype)

  def test_two_halves_merge_by_their_log_sum_exp(self):
    """What a shared prefix does: attend to both parts, weigh by lse."""
    case = problem(PLAIN)
    q = queries(case, PLAIN, len(PLAIN.lengths))
    whole, whole_lse = run_decode(case, q)
    row, cut = 6, 64
    first = decode(
      *put(q, *case.pools, np.minimum(case.lengths, cut)), return_lse=True
    )
    moved = np.roll(case.page_table, -cut // PLAIN.page_size, axis=1)
    second = decode(
      *put(q, *case.pools[:2], moved, np.maximum(case.lengths - cut, 0)),
      return_lse=True,
    )
    lse = np.logaddexp(first[1], second[1])[row]
    weights = [np.exp(part[1][row] - lse)[:, None] for part in (first, second)]
    out = weights[0] * first[0][row] + weights[1] * second[0][row]
    np.testing.assert_allclose(out, whole[row], atol=1e-6)
    np.testing.assert_allclose(lse, whole_lse[row], atol=1e-6)


class TestNumerics:
  def test_extreme_logits(self):
    """Logits of +-5e5: no overflow, and the largest takes all."""
    keys = np.zeros((4, 1, 16, 32), np.float32)
    keys[..., 0] = -500.0
    keys[2, 0, 3, 0] = 500.0
    values = np.random.default_rng(0).standard_normal(keys.shape)
    q = np.zeros((2, 1, 32), np.float32)
    q[:, :, 0] = [[1000.0], [-1000.0]]
    table = np.array([[0, 2, 3], [1, 3, 0]], np.int32)
    arguments = (q, keys, values.astype(np.float32), table)
    lengths = np.array([40, 33], np.int32)
    options = {"scale": 1.0}
    wanted = definition.paged_decode(*arguments, lengths, **options)
    out, lse = decode(*put(*arguments, lengths), return_lse=True, **options)
    np.testing.assert_allclose(out, wanted[0], atol=1e-6)
    np.testing.assert_allclose(lse, wanted[1], rtol=1e-6)
    np.testing.assert_array_equal(out[0, 0], arguments[2][2, 0, 3])

  def test_float16_sums_do_not_overflow(self):
    """8,192 values of 10 sum to more than float16 holds."""
    pages = jnp.full((128, 1, 64, 32), 10.0, jnp.float16)
    out = decode(
      jnp.zeros((1, 2, 32), jnp.float16),
      pages,
      pages,
      jnp.arange(128, dtype=jnp.int32)[None],
      jnp.asarray([8192], jnp.int32),
    )
    np.testing.assert_array_equal(out, np.full((1, 2, 32), 10.0))

  def test_keys_and_values_of_different_size(self):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 2, 32)).astype(np.float32)
    keys = rng.standard_normal((3, 2, 16, 32)).astype(np.float32)
    values = rng.standard_normal((3, 2, 16, 48)).astype(np.float32)
    arguments = (q, keys, values, np.array([[2, 0]], np.int32))
    lengths = np.array([20], np.int32)
    wanted = definition.paged_decode(*arguments, lengths)
    out, lse = decode(*put(*arguments, lengths), return_lse=True)
    assert_matches(out, lse, *wanted, np.float32)


class TestTracing:
  def test_layers_share_a_pool(self):
    """A traced page_offset reads what slicing the layer out would."""
    cases = [problem(PLAIN, seed=seed) for seed in range(2)]
    q = queries(cases[0], PLAIN, len(PLAIN.lengths))
    k_pages, v_pages = (
      np.concatenate([case.pools[side] for case in cases]) for side in (0, 1)
    )
    for layer, case in enumerate(cases):
      out = decode(
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
        window=window,
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
    traced = jax.jit(kernels.paged_decode)(
      *put(q, *case.pools, case.lengths), window=jnp.int32(20)
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
    out = jax.jit(jax.vmap(kernels.paged_decode))(*stacked)
    for index, case in enumerate(cases):
      np.testing.assert_allclose(
        out[index], run_decode(case, q[index])[0], atol=1e-6
      )
