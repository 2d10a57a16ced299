"""Multi-head latent attention: every backend that serves it."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv_kernels as kernels
from tests.kernels import reference
from tests.kernels.backends import RUNNERS
from tests.kernels.backends import call_of
from tests.kernels.shapes import Shape
from tests.kernels.shapes import assert_matches
from tests.kernels.shapes import edges
from tests.kernels.shapes import problem
from tests.kernels.shapes import queries
from tests.tools.tiers import slow_except

# DeepSeek-V2 and V3 (512 + 64 elements), and MiniCPM3 (256 + 32).
DEEPSEEK, MINICPM3 = (576, 512), (288, 256)
# Heads, elements of a vector and of its value, page size, format, scales,
# window, soft cap.
CASES = {
  "float32": (16, DEEPSEEK, 16, "float32", None, None, None),
  "bfloat16_window": (16, DEEPSEEK, 64, "bfloat16", None, 50, None),
  "bits_of_many_heads": (128, DEEPSEEK, 16, "bits", None, None, None),
  "float16_soft_cap": (5, MINICPM3, 24, "float16", None, None, 30.0),
  "bits8_scale_per_token": (16, DEEPSEEK, 16, "bits8", "token", 50, None),
  "int8_scale_per_head": (40, MINICPM3, 1, "int8", "head", None, 1.0),
  "nothing_behind_the_value": (4, (64, 64), 8, "float32", None, 3, None),
}


def backends():
  """The backends that serve it."""
  return [pytest.param(RUNNERS[name], id=name) for name in ("xla", "triton")]


def problem_of(name, lengths, most_heads=128):
  """A case's shape, its arrays, and the options of a call."""
  heads, (dim, value_dim), size, dtype, scales, window, soft_cap = CASES[name]
  shape = Shape(
    heads=(min(heads, most_heads), 1),
    head_dim=dim,
    page_size=size,
    lengths=lengths,
    dtype=dtype,
    scales=scales,
  )
  case = problem(shape)
  options = {"value_dim": value_dim, "scale": 192**-0.5}
  options |= {"window": window, "soft_cap": soft_cap}
  if scales is not None:
    options["k_scale"] = case.options["k_scale"]
  return shape, case, options


def three_rows(*lengths):
  """A problem of DeepSeek's size in float32, and its queries."""
  shape = Shape(heads=(16, 1), head_dim=576, page_size=16, lengths=lengths)
  case = problem(shape)
  return case, queries(case, shape, 3)


class TestDecode:
  @slow_except("name", CASES, "float32")
  @pytest.mark.parametrize("runner", backends())
  @pytest.mark.parametrize("name", CASES)
  def test_equals_the_reference(self, runner, name):
    shape, case, options = problem_of(name, (*edges(CASES[name][2]), 100))
    q = queries(case, shape, len(shape.lengths))
    where = (case.page_table, case.lengths)
    expected = reference.mla_decode(q, case.k_pages, *where, **options)
    out, lse = runner("paged_decode", q, case.k_pages, None, *where, **options)
    dims = (shape.heads[0], options["value_dim"])
    assert out.shape == (len(shape.lengths), *dims)
    assert_matches(out, lse, *expected, case.dtype, runner.float32_l2)

  @pytest.mark.parametrize("runner", backends())
  def test_page_numbers_do_not_matter(self, runner):
    case, q = three_rows(33, 0, 80)
    order = np.random.default_rng(2).permutation(len(case.k_pages))
    moved = np.empty_like(case.k_pages)
    moved[order] = case.k_pages
    is_page = (case.page_table >= 0) & (case.page_table < len(order))
    table = np.where(
      is_page, order[np.where(is_page, case.page_table, 0)], case.page_table
    ).astype(np.int32)
    options = {"value_dim": 512, "scale": 0.1}
    a = runner(
      "paged_decode",
      q,
      case.k_pages,
      None,
      case.page_table,
      case.lengths,
      **options,
    )
    b = runner("paged_decode", q, moved, None, table, case.lengths, **options)
    for x, y in zip(a, b, strict=True):
      np.testing.assert_array_equal(x, y)

  @pytest.mark.parametrize("runner", backends())
  def test_neighbours_do_not_matter(self, runner):
    """A row gives the same bits if all other rows of the batch are empty."""
    case, q = three_rows(33, 17, 80)
    options = {"value_dim": 512, "scale": 0.1}
    batch_out, _ = runner(
      "paged_decode",
      q,
      case.k_pages,
      None,
      case.page_table,
      case.lengths,
      **options,
    )
    alone_out, _ = runner(
      "paged_decode",
      q,
      case.k_pages,
      None,
      case.page_table,
      np.where(np.arange(3) == 1, case.lengths, 0).astype(np.int32),
      **options,
    )
    np.testing.assert_array_equal(batch_out[1], alone_out[1])

  @pytest.mark.parametrize("runner", backends())
  def test_nan_in_an_unseen_node_stays_out(self, runner):
    rng = np.random.default_rng(4)
    pages = jnp.asarray(rng.standard_normal((4, 1, 8, 32)), jnp.float32)
    q = jnp.asarray(rng.standard_normal((1, 3, 4, 32)), jnp.float32)
    # The keys of the three queries are at positions 2 .. 4 of page 2.
    row = (jnp.asarray([[2, 1]]), jnp.asarray([2]), jnp.asarray([3]))
    mask = jnp.asarray([[[1, 0, 0], [0, 0, 0], [1, 0, 1]]], bool)
    options = {"value_dim": 16, "scale": 0.1, "tree_mask": mask}
    outputs = [
      runner("paged_attention_padded", q, pool, None, *row, **options)
      for pool in (pages, pages.at[2, 0, 3].set(jnp.nan))
    ]
    for finite, poisoned in zip(*outputs, strict=True):
      np.testing.assert_array_equal(poisoned, finite)

  def test_latents_written_in_8_bits(self):
    """With scales, as in the example of `append_pages`."""
    rng = np.random.default_rng(3)
    latents = jnp.asarray(rng.standard_normal((5, 1, 24)), jnp.float32)
    q = jnp.asarray(rng.standard_normal((1, 4, 24)), jnp.float32)
    ids = jnp.asarray([2, 2, 2, 2, 0], jnp.int32)
    offsets = jnp.asarray([0, 1, 2, 3, 0], jnp.int32)
    stored, factors = kernels.quantize(latents, "int8")
    pools = [
      kernels.append_pages(pool, new, ids, offsets)
      for pool, new in (
        (jnp.zeros((3, 1, 4, 24)), latents),
        (jnp.zeros((3, 1, 4, 24), jnp.int8), stored),
        (jnp.zeros((3, 1, 4)), factors),
      )
    ]
    (expected, _), (out, _) = (
      kernels.paged_decode(
        q,
        pages,
        None,
        jnp.asarray([[2, 0]], jnp.int32),
        jnp.asarray([5], jnp.int32),
        value_dim=20,
        options=kernels.AttentionOptions(scale=0.2, k_scale=scale),
      )
      for pages, scale in ((pools[0], None), (pools[1], pools[2]))
    )
    # Half a step of 1 / 127 for numbers of up to 4, in logits and values.
    np.testing.assert_allclose(out, expected, atol=0.05)

  def test_too_large_for_triton(self):
    with pytest.raises(NotImplementedError, match=r"`value_dim` .* 576 and 0"):
      kernels.paged_decode(
        jnp.ones((1, 4, 576)),
        jnp.ones((2, 1, 8, 576)),
        None,
        jnp.ones((1, 1), jnp.int32),
        jnp.ones(1, jnp.int32),
        value_dim=576,
        options=kernels.AttentionOptions(scale=1.0),
        backend="triton",
      )


# Columns of each row's queries: none, one, some, all.
_COUNTS = (0, 1, 5, 9)
# Formats and sizes are those of `whole`; a window, a cap and scales remain.
_RECTANGLES = [("whole", name) for name in CASES] + [
  (how, name)
  for how in ("tiles", "tree")
  for name in ("float32", "bits8_scale_per_token", "int8_scale_per_head")
]


@slow_except("name", CASES, "float32")
@pytest.mark.parametrize("runner", backends())
class TestSeveralQueries:
  """Chunks of prompts, and drafts."""

  def problem(self, name):
    """Rows that end with `_COUNTS` queries, and the options of a call."""
    shape, case, options = problem_of(name, (0, 3, 37, 80), most_heads=40)
    kwargs = {key: x for key, x in options.items() if key != "value_dim"}
    factors = options.get("k_scale")
    kwargs |= {"k_scale": factors, "v_scale": factors}
    values = case.k_pages[..., : options["value_dim"]]
    return shape, case, options, (case.k_pages, values), kwargs

  @pytest.mark.slow
  @pytest.mark.parametrize(("how", "name"), _RECTANGLES)
  def test_rectangle(self, runner, name, how):
    shape, case, options, pools, kwargs = self.problem(name)
    q = queries(case, shape, 4, max(_COUNTS))
    counts = np.asarray(_COUNTS, np.int32)
    where = (case.page_table, case.lengths - counts, counts)
    if how == "tiles":
      options["query_tile"] = 2
    if how == "tree":
      # Two branches, of even columns and of odd ones.
      column = np.arange(max(_COUNTS))
      tree = (column[:, None] - column) % 2 == 0
      options["tree_mask"] = np.broadcast_to(tree, (4, *tree.shape))
      kwargs["tree_mask"] = options["tree_mask"]
    expected = reference.paged_attention_padded(q, *pools, *where, **kwargs)
    out, lse = runner(
      "paged_attention_padded", q, case.k_pages, None, *where, **options
    )
    assert out.shape == (4, 9, shape.heads[0], options["value_dim"])
    assert_matches(out, lse, *expected, case.dtype, runner.float32_l2)

  @pytest.mark.parametrize("name", CASES)
  def test_packed(self, runner, name):
    shape, case, options, pools, kwargs = self.problem(name)
    q = queries(case, shape, sum(_COUNTS) + 3)
    ends = np.cumsum((0, *_COUNTS)).astype(np.int32)
    where = (case.page_table, case.lengths, ends)
    expected = reference.paged_attention(q, *pools, *where, **kwargs)
    out, lse = runner(
      "paged_attention", q, case.k_pages, None, *where, **options
    )
    assert_matches(out, lse, *expected, case.dtype, runner.float32_l2)


class TestArguments:
  @pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
      ({"value_dim": 9}, ValueError, "`value_dim` must be at most 8, .*got 9"),
      ({"value_dim": 0}, ValueError, "`value_dim` .* at least 1, got 0"),
      ({"k_pages": jnp.ones((5, 2, 4, 8))}, ValueError, "`k_pages` must be"),
      ({"k_pages": jnp.ones((5, 1, 4, 6))}, ValueError, "`k_pages` must be"),
      ({"v_pages": jnp.ones((5, 1, 4, 8))}, ValueError, "`v_pages` must be N"),
      ({"value_dim": None}, TypeError, "`v_pages` must be an array"),
      ({"scale": None}, TypeError, "`options.scale` must be a float .*None"),
      ({"k_scale": jnp.ones(2)}, ValueError, "`options.k_scale` .*got float32"),
      ({"v_scale": jnp.ones(1)}, ValueError, "`options.v_scale` must be N"),
      ({"sinks": jnp.ones(4)}, ValueError, "`options.sinks` must be No"),
      (
        {"backend": "mosaic_tpu"},
        NotImplementedError,
        "`value_dim` must be No",
      ),
      (
        {"backend": "mosaic_gpu"},
        NotImplementedError,
        "`value_dim` must be No",
      ),
      (
        {"backend": "cuda"},
        NotImplementedError,
        "`backend` must .* got 'cuda'",
      ),
      ({"interpret": True}, ValueError, "`interpret` .* backend='auto', got"),
    ],
  )
  def test_bad_arguments(self, changes, error, message):
    call = {
      "q": jnp.ones((2, 4, 8)),
      "k_pages": jnp.ones((5, 1, 4, 8)),
      "v_pages": None,
      "page_table": jnp.ones((2, 3), jnp.int32),
      "lengths": jnp.ones(2, jnp.int32),
      "value_dim": 6,
      "scale": 1.0,
      **changes,
    }
    with pytest.raises(error, match=message):
      kernels.paged_decode(**call_of(**call))
