"""Every attention backend against the float64 reference."""

import dataclasses

import numpy as np
import pytest

from tests.kernels import reference
from tests.kernels.backends import backends
from tests.kernels.backends import cases
from tests.kernels.shapes import SHAPES
from tests.kernels.shapes import Shape
from tests.kernels.shapes import assert_matches
from tests.kernels.shapes import problem
from tests.kernels.shapes import queries
from tests.tools.tiers import slow_except

_RECTANGLES = (
  "page1_mha_d32",
  "page16_gqa4_d128",
  "page64_gqa8_d64",
  "head_dim_96_values_of_160",
  "bits_gqa4",
  "float16_gqa8",
  "int8_scale_per_token",
  "e4m3_bits_scale_per_head",
  "window20",
  "alibi",
  "everything",
  "everything_bits",
  "everything_int8",
  "everything_int8_d128",
)
_FEW = (
  "page16_gqa4_d128",
  "everything",
  "everything_int8",
  "everything_bfloat16_d128",
)
# Of the default run: plain pages, all options with each kind of element, and
# two shapes that every backend serves where its interpreter runs.
_FAST = (
  "page16_gqa4_d128",
  "everything",
  "everything_int8",
  "everything_bfloat16_d128",
  "bfloat16_mqa",
)
over_all_shapes = pytest.mark.parametrize(("runner", "name"), cases())
over_few_shapes = pytest.mark.parametrize(("runner", "name"), cases(*_FEW))
over_backends = pytest.mark.parametrize("runner", backends())


def same(results, expected):
  for a, b in zip(results, expected, strict=True):
    np.testing.assert_array_equal(a, b)


class TestDecode:
  @slow_except("name", SHAPES, *_FAST)
  @over_all_shapes
  def test_equals_the_reference(self, runner, name):
    shape = SHAPES[name]
    case = problem(shape)
    q = queries(case, shape, len(shape.lengths))
    expected = reference.paged_decode(
      q, *case.pools, case.lengths, **case.options
    )
    out, lse = runner(
      "paged_decode", q, *case.pools, case.lengths, **case.options
    )
    assert out.dtype == case.dtype
    assert lse.dtype == np.float32
    assert_matches(out, lse, *expected, case.dtype, runner.float32_l2)


def rectangle(name):
  """Rows of up to 19 queries; what is after them may be anything."""
  shape = SHAPES[name]
  case = problem(shape)
  counts = np.minimum(case.lengths, [19, 1, 3, 7, 18, 0, 19]).astype(np.int32)
  q = queries(case, shape, len(counts), 19)
  for b, count in enumerate(counts):
    q[b, count:] = np.nan
  return case, (q, *case.pools, case.lengths - counts, counts)


class TestRectangle:
  @slow_except("name", _RECTANGLES, *_FAST[:3])
  @pytest.mark.parametrize(("runner", "name"), cases(*_RECTANGLES))
  def test_equals_the_reference(self, runner, name):
    case, arguments = rectangle(name)
    expected = reference.paged_attention_padded(*arguments, **case.options)
    out, lse = runner("paged_attention_padded", *arguments, **case.options)
    assert_matches(out, lse, *expected, case.dtype, runner.float32_l2)

  @pytest.mark.slow
  @over_few_shapes
  @pytest.mark.parametrize("query_tile", [4, 32])
  def test_columns_in_turn_equal_the_reference(self, runner, name, query_tile):
    case, arguments = rectangle(name)
    expected = reference.paged_attention_padded(*arguments, **case.options)
    options = {**case.options, "query_tile": query_tile}
    out, lse = runner("paged_attention_padded", *arguments, **options)
    assert_matches(out, lse, *expected, case.dtype, runner.float32_l2)

  @pytest.mark.slow
  @over_few_shapes
  def test_columns_in_turn_do_not_depend_on_others(self, runner, name):
    """Other columns, and their number, change no bit of a column."""
    case, (q, *pools, starts, counts) = rectangle(name)
    options = {**case.options, "query_tile": 2}
    all_columns = runner(
      "paged_attention_padded", q, *pools, starts, counts, **options
    )
    some_columns = runner(
      "paged_attention_padded",
      q[:, 6:9],
      *pools,
      starts + 6,
      np.clip(counts - 6, 0, 3),
      **options,
    )
    same([x[:, 6:9] for x in all_columns], some_columns)

  @slow_except("name", SHAPES, "everything")
  @slow_except("nodes", [7, 5], 7)
  @pytest.mark.parametrize(
    ("runner", "name"),
    cases(
      "page16_gqa4_d128",
      "everything",
      "everything_int8",
      "everything_int8_d128",
      "everything_bfloat16_d128",
    ),
  )
  @pytest.mark.parametrize("nodes", [7, 5])
  def test_trees_equal_the_reference(self, runner, name, nodes):
    """Drafts of 7 tokens in trees; keys past `nodes` are seen as usual."""
    shape = SHAPES[name]
    case = problem(shape)
    counts = np.minimum(case.lengths, 7).astype(np.int32)
    q = queries(case, shape, len(counts), 7)
    parents = np.array([-1, 0, 0, 1, 1, 2, -1])
    mask = np.eye(7, dtype=bool)
    for node, parent in enumerate(parents):
      if parent >= 0:
        mask[node] |= mask[parent]
    mask = np.tile(mask[:, :nodes], (len(counts), 1, 1))
    mask[3] = False  # sees none of its row's queries, itself included
    arguments = (q, *case.pools, case.lengths - counts, counts)
    options = {**case.options, "tree_mask": mask}
    expected = reference.paged_attention_padded(*arguments, **options)
    out, lse = runner("paged_attention_padded", *arguments, **options)
    assert_matches(out, lse, *expected, case.dtype, runner.float32_l2)


def packed(name):
  """Queries of all rows; what is after them may be anything."""
  shape = SHAPES[name]
  case = problem(shape)
  runs = np.minimum(case.lengths, [5, 1, 0, 2, 1, 20, 70])
  ends = np.concatenate([[0], np.cumsum(runs)]).astype(np.int32)
  q = queries(case, shape, int(ends[-1]) + 3)
  q[ends[-1] :] = np.nan
  return case, (q, *case.pools, case.lengths, ends)


@slow_except("name", SHAPES, "everything")
class TestPacked:
  @pytest.mark.parametrize(
    ("runner", "name"),
    cases(
      "page8_mqa_d64",
      "everything",
      "everything_int8",
      "everything_bfloat16_d128",
    ),
  )
  @pytest.mark.parametrize("longest", [None, 70])
  def test_equals_the_reference(self, runner, name, longest):
    case, arguments = packed(name)
    expected = reference.paged_attention(*arguments, **case.options)
    out, lse = runner(
      "paged_attention", *arguments, max_query_len=longest, **case.options
    )
    assert_matches(out, lse, *expected, case.dtype, runner.float32_l2)

  @over_few_shapes
  def test_trees_across_tiles(self, runner, name):
    """A draft longer than a tile, beside prompts and single tokens."""
    case, arguments = packed(name)
    mask = np.random.default_rng(3).random((len(arguments[0]), 70)) < 0.5
    mask[: arguments[-1][-2]] = True
    options = {**case.options, "tree_mask": mask}
    expected = reference.paged_attention(*arguments, **options)
    out, lse = runner("paged_attention", *arguments, **options)
    assert_matches(out, lse, *expected, case.dtype, runner.float32_l2)


def decoded(runner, name):
  """A problem, its queries, and the backend's answer."""
  shape = SHAPES[name]
  case = problem(shape)
  q = queries(case, shape, len(shape.lengths))
  return (
    case,
    q,
    runner("paged_decode", q, *case.pools, case.lengths, **case.options),
  )


@slow_except("name", SHAPES, "everything", "window_without_short_rows")
class TestProperties:
  @over_few_shapes
  @pytest.mark.parametrize("poison", [np.inf, -np.inf, 0.0])
  def test_unused_memory_does_not_matter(self, runner, name, poison):
    shape = SHAPES[name]
    q = queries(problem(shape), shape, len(shape.lengths))
    results = []
    for case in (problem(shape), problem(shape, poison=poison)):
      results.append(
        runner("paged_decode", q, *case.pools, case.lengths, **case.options)
      )
    same(*results)

  @pytest.mark.parametrize(
    ("runner", "name"), cases("window_without_short_rows")
  )
  def test_pages_behind_the_window_do_not_matter(self, runner, name):
    case, q, expected = decoded(runner, name)
    for b, length in enumerate(case.lengths):
      skipped_pages = (length - case.options["window"]) // case.k_pages.shape[2]
      case.k_pages[case.page_table[b, :skipped_pages]] = np.nan
      case.v_pages[case.page_table[b, :skipped_pages]] = np.inf
      case.page_table[b, :skipped_pages] = 0
    out = runner("paged_decode", q, *case.pools, case.lengths, **case.options)
    same(expected, out)

  @over_few_shapes
  def test_page_numbers_do_not_matter(self, runner, name):
    case, q, expected = decoded(runner, name)
    order = np.random.default_rng(5).permutation(len(case.k_pages))
    back = np.argsort(order)
    named = (case.page_table >= 0) & (case.page_table < len(order))
    table = np.where(named, order[np.where(named, case.page_table, 0)], -1)
    options = {
      key: value[back] if key.endswith("_scale") else value
      for key, value in case.options.items()
    }
    results = runner(
      "paged_decode",
      q,
      case.k_pages[back],
      case.v_pages[back],
      table.astype(np.int32),
      case.lengths,
      **options,
    )
    same(expected, results)

  @over_few_shapes
  def test_neighbours_do_not_matter(self, runner, name):
    case, q, expected = decoded(runner, name)
    row = 5
    changed = case.lengths.copy()
    changed[[0, 6]] = 0, 3
    q[6] = np.nan
    results = runner("paged_decode", q, *case.pools, changed, **case.options)
    same([x[row] for x in expected], [x[row] for x in results])

  @over_few_shapes
  def test_row_order_does_not_matter(self, runner, name):
    case, q, expected = decoded(runner, name)
    order = np.array([3, 6, 0, 5, 1, 4, 2])
    results = runner(
      "paged_decode",
      q[order],
      case.k_pages,
      case.v_pages,
      case.page_table[order],
      case.lengths[order],
      **case.options,
    )
    same([x[order] for x in expected], results)


class TestNumerics:
  @pytest.mark.slow
  @over_backends
  def test_extreme_logits_do_not_overflow(self, runner):
    """Logits of +-5e5: no overflow, and the largest takes all."""
    keys = np.zeros((4, 1, 16, 128), runner.dtype)
    keys[..., 0] = -512.0
    keys[2, 0, 3, 0] = 512.0
    values = np.random.default_rng(0).standard_normal(keys.shape)
    values = values.astype(runner.dtype)
    q = np.zeros((2, 1, 128), runner.dtype)
    q[:, :, 0] = [[1024.0], [-1024.0]]
    table = np.array([[0, 2, 3], [1, 3, 0]], np.int32)
    arguments = (q, keys, values, table, np.array([40, 33], np.int32))
    expected = reference.paged_decode(*arguments, scale=1.0)
    out, lse = runner("paged_decode", *arguments, scale=1.0)
    assert_matches(out, lse, *expected, runner.dtype)
    np.testing.assert_array_equal(out[0, 0], values[2, 0, 3])

  @pytest.mark.slow
  @over_backends
  def test_float16_sums_do_not_overflow(self, runner):
    """8,192 values of 10 sum to more than float16 holds."""
    pages = np.full((128, 1, 64, 64), 10.0, np.float16)
    out, _ = runner(
      "paged_decode",
      np.zeros((1, 2, 64), np.float16),
      pages,
      pages,
      np.arange(128, dtype=np.int32)[None],
      np.array([8192], np.int32),
    )
    np.testing.assert_array_equal(out, np.full((1, 2, 64), 10.0))

  @pytest.mark.slow
  @over_backends
  def test_two_halves_merge_by_their_log_sum_exp(self, runner):
    """As for a shared prefix: attend to both parts, weigh them by lse."""
    shape = Shape(
      heads=(8, 2),
      head_dim=128,
      page_size=16,
      lengths=(150,),
      dtype=np.dtype(runner.dtype).name,
    )
    case = problem(shape)
    q = queries(case, shape, 1)
    whole = runner("paged_decode", q, *case.pools, case.lengths)
    cut = 64
    part_0 = runner("paged_decode", q, *case.pools, np.array([cut], np.int32))
    moved = np.roll(case.page_table, -cut // shape.page_size, axis=1)
    part_1 = runner(
      "paged_decode", q, *case.pools[:2], moved, case.lengths - cut
    )
    out, lse = reference.merge_states(
      *(np.stack(part) for part in zip(part_0, part_1, strict=True))
    )
    # Three results are rounded, but the tolerances are for one.
    atol = 1e-6 if runner.dtype == np.float32 else 2e-2
    np.testing.assert_allclose(out, whole[0].astype(np.float32), atol=atol)
    np.testing.assert_allclose(lse, whole[1], atol=1e-6)

  @pytest.mark.slow
  @over_backends
  def test_a_table_smaller_than_the_length(self, runner):
    """Tokens past the table's capacity do not exist."""
    shape = Shape(
      heads=(4, 2),
      head_dim=128,
      page_size=16,
      lengths=(48, 33),
      dtype=np.dtype(runner.dtype).name,
    )
    case = problem(shape)
    q = queries(case, shape, 2)
    arguments = (q, *case.pools[:2], case.page_table[:, :2])
    clipped = np.array([32, 32], np.int32)
    want = runner("paged_decode", *arguments, clipped)
    same(want, runner("paged_decode", *arguments, case.lengths))

  @slow_except("columns", [1, 3], 3)
  @slow_except("name", SHAPES, "everything", "bfloat16_mqa")
  @pytest.mark.parametrize(
    ("runner", "name"),
    cases("page16_gqa4_d128", "bfloat16_mqa", "everything"),
  )
  @pytest.mark.parametrize("columns", [1, 3])
  def test_a_window_counts_from_the_query(self, runner, name, columns):
    """Also if the query is past the last token of the table."""
    page_size = SHAPES[name].page_size
    lengths = (page_size + 1, 2 * page_size, 2 * page_size + 5, 3 * page_size)
    shape = dataclasses.replace(SHAPES[name], lengths=lengths)
    case = problem(shape)
    pools = (*case.pools[:2], case.page_table[:, :2])
    counts = np.full(len(lengths), columns, np.int32)
    q = queries(case, shape, len(lengths), columns)
    arguments = (q, *pools, case.lengths - columns, counts)
    # The last row of 3 * size tokens sees no token that exists.
    options = {**case.options, "window": page_size}
    expected = reference.paged_attention_padded(*arguments, **options)
    out = runner("paged_attention_padded", *arguments, **options)
    assert_matches(*out, *expected, case.dtype, runner.float32_l2)
