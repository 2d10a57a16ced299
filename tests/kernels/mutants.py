"""Mistakes in the kernels: one each, such as people make.

For each a test of this package is named that notices it. One that no test
notices shows a behaviour that nothing checks.
"""

from tests.tools.mistakes import FailsTest
from tests.tools.mistakes import given
from tests.tools.mistakes import returned
from tests.tools.mistakes import text

_XLA = "attention.xla.backend"
_ATTENTION = "test_paged_attention.py::"
_DECODE = _ATTENTION + "TestDecode::test_equals_the_reference[xla-{}]"
_RECTANGLE = _ATTENTION + "TestRectangle::test_equals_the_reference[xla-{}]"
_IN_TURN = _ATTENTION + "TestRectangle::test_columns_in_turn[4-xla-{}]"
_TREE = _ATTENTION + "TestRectangle::test_tree[{}-xla-everything]"
_PACKED = _ATTENTION + "TestPacked::test_equals_the_reference[70-xla-{}]"
_TRACING = "test_paged_tracing.py::"
_MLA = "test_mla.py::TestDecode::test_equals_the_reference[{}-xla]"
_PLAN = "test_merge_and_plan.py::TestPlan::"
_COVERS = _PLAN + "test_pieces_cover_every_token_once[{}]"
_MERGE = "test_merge_and_plan.py::TestMerge::"
_PAGES = "test_pages.py::"
_DROPPED = _PAGES + "TestAppend::test_tokens_out_of_range_are_dropped[{}]"
_QUANTIZED = "test_quantized_pages.py::"
_SHARED = "test_shared_prefix.py::TestSharedPrefix::"
_SHARED_DECODE = _SHARED + "test_equals_the_reference[{}-auto]"

_ATTEND = {
  "a query sees the token after it": (
    "attention.query_tiles:span",
    returned(lambda out, g: (out[0], out[1] + 1)),
    _DECODE.format("page16_gqa4_d128"),
  ),
  "a window is a token too wide": (
    "attention.query_tiles:span",
    given(window=lambda g: None if g.window is None else g.window + 1),
    _DECODE.format("window20"),
  ),
  "a window is measured from the end of the table": (
    "attention.query_tiles:span",
    text("position + 1 - window", "end - window"),
    _ATTENTION
    + "TestNumerics::test_a_window_counts_from_the_query"
    + "[3-xla-page16_gqa4_d128]",
  ),
  "padding sees keys": (
    "attention.query_tiles:reach",
    text("jnp.where(real, x, 0)", "x"),
    _RECTANGLE.format("page16_gqa4_d128"),
  ),
  "queries of a rectangle stand at one position": (
    "attention.query_tiles:reach",
    text("starts[:, None] + column", "starts[:, None] + 0 * column"),
    _RECTANGLE.format("page16_gqa4_d128"),
  ),
  "the first block is left out": (
    f"{_XLA}:_blocks",
    returned(lambda out, g: (out[0] + 1, out[1])),
    _DECODE.format("page16_gqa4_d128"),
  ),
  "the last block is left out": (
    f"{_XLA}:_blocks",
    returned(lambda out, g: (out[0], out[1] - 1)),
    _DECODE.format("page16_gqa4_d128"),
  ),
  "the table has no spare columns": (
    f"{_XLA}:attend",
    text("((0, 0), (0, spare))", "((0, 0), (0, 0))"),
    _DECODE.format("page16_gqa4_d128"),
  ),
  "the scale is left out": (
    f"{_XLA}:attend",
    text("* jnp.asarray(options.scale, jnp.float32)", "* 1.0"),
    _DECODE.format("scale"),
  ),
  "the layer is left out": (
    f"{_XLA}:attend",
    text("ids + options.page_offset", "ids"),
    _TRACING + "TestTracing::test_layers_share_a_pool",
  ),
  "heads are read in another order": (
    f"{_XLA}:_read",
    returned(lambda out, g: out[:, ::-1]),
    _DECODE.format("page16_gqa4_d128"),
  ),
  "scales are those of the next page": (
    f"{_XLA}:_read_scale",
    given(ids=lambda g: g.ids + 1),
    _DECODE.format("int8_scale_per_token"),
  ),
  "scales of values are left out": (
    f"{_XLA}:_absorb",
    text("weights * block.v_scale[:, :, None]", "weights"),
    _DECODE.format("int8_scale_per_head"),
  ),
  "scales of values count in the sum of weights": (
    f"{_XLA}:_absorb",
    text(
      "total = carry.total * shrink",
      "weights = weights * (1 if block.v_scale is None else jnp.where("
      "jnp.any(seen, axis=1)[:, None, :], block.v_scale, 0.)[:, :, None])\n"
      "  total = carry.total * shrink",
    ),
    _DECODE.format("int8_scale_per_head"),
  ),
  "earlier weights do not shrink": (
    f"{_XLA}:_absorb",
    text("carry.total * shrink", "carry.total"),
    _DECODE.format("page16_gqa4_d128"),
  ),
  "earlier values do not shrink": (
    f"{_XLA}:_absorb",
    text("carry.weighted * shrink[..., None]", "carry.weighted"),
    _DECODE.format("page16_gqa4_d128"),
  ),
  "the largest logit is that of the block": (
    f"{_XLA}:_absorb",
    text(
      "jnp.maximum(carry.top, jnp.max(logits, axis=-1))",
      "jnp.maximum(_LOWEST, jnp.max(logits, axis=-1))",
    ),
    _DECODE.format("page16_gqa4_d128"),
  ),
  "logits are capped at half": (
    f"{_XLA}:_absorb",
    text("options.soft_cap * jnp.tanh", "options.soft_cap / 2 * jnp.tanh"),
    _DECODE.format("soft_cap1"),
  ),
  "ALiBi counts from the first token": (
    f"{_XLA}:_absorb",
    text("- positions[:, :, None]", "- 0 * positions[:, :, None]"),
    _DECODE.format("alibi"),
  ),
  "unused memory reaches the sum": (
    f"{_XLA}:_gather",
    text("jnp.where(used[..., None], values", "jnp.where(True, values"),
    _DECODE.format("page16_gqa4_d128"),
  ),
  "a draft sees its siblings": (
    f"{_XLA}:_seen",
    text("(allowed | ~inside[:, None])", "(allowed | True)"),
    _TREE.format(7),
  ),
  "tokens outside of a tree are hidden": (
    f"{_XLA}:_seen",
    text("(allowed | ~inside[:, None])", "(allowed & inside[:, None])"),
    _TREE.format(7),
  ),
  "a sink does not shrink with the sums": (
    f"{_XLA}:_finish",
    text("jnp.exp(sink - highest)", "jnp.exp(sink)"),
    _DECODE.format("sinks"),
  ),
  "padding has a sink": (
    f"{_XLA}:_finish",
    text("jnp.where(real[:, None, :, None], lse, -jnp.inf)", "lse"),
    _RECTANGLE.format("everything"),
  ),
  "the log-sum-exp lacks its largest logit": (
    f"{_XLA}:_finish",
    text("top + jnp.log(safe)", "jnp.log(safe)"),
    _DECODE.format("page16_gqa4_d128"),
  ),
  "the last tile of queries is left out": (
    f"{_XLA}:attend",
    text(
      "(jnp.max(counts) + query_tile - 1) // query_tile",
      "jnp.max(counts) // query_tile",
    ),
    _IN_TURN.format("page16_gqa4_d128"),
  ),
  "all queries are real": (
    f"{_XLA}:attend",
    text(
      "split(column < counts[:, None])",
      "split((column < counts[:, None]) | True)",
    ),
    _IN_TURN.format("everything"),
  ),
  "every query is at the place of its row's first": (
    f"{_XLA}:attend",
    text(
      "split(starts[:, None] + column)", "split(starts[:, None] + 0 * column)"
    ),
    _IN_TURN.format("everything"),
  ),
  "a decode is at the position behind its token": (
    "attention.choose:decode",
    text("lengths - 1", "lengths"),
    _DECODE.format("page16_gqa4_d128"),
  ),
}

_PACKING = {
  "tiles of a run begin where it does": (
    "attention.query_packing:tile",
    text("starts=run_start + done", "starts=run_start"),
    _PACKED.format("page8_mqa_d64"),
  ),
  "every tile of a run is full": (
    "attention.query_packing:tile",
    text("kept[sequence] - done, 0, size", "kept[sequence], 0, size"),
    _PACKED.format("page8_mqa_d64"),
  ),
  "a run begins at its sequence's end": (
    "attention.query_packing:tile",
    text("kv_lens[sequence] - runs[sequence]", "kv_lens[sequence]"),
    _PACKED.format("page8_mqa_d64"),
  ),
  "further queries of a run are those of the next": (
    "attention.query_packing:tile",
    text("(at < max_query_len)", "(at >= 0)"),
    _TRACING + "TestBits::test_packed_queries_past_the_longest_give_nothing",
  ),
  "an item at the end of a row belongs to it": (
    "attention.query_packing:row_of",
    text('side="right"', 'side="left"'),
    _PACKED.format("page8_mqa_d64"),
  ),
}

_PIECES = {
  "a row without tokens has no piece": (
    "attention.decode_plan:_plan",
    text(
      "pieces = jnp.maximum((blocks + share - 1) // share, 1)",
      "pieces = (blocks + share - 1) // share",
    ),
    _COVERS.format("None-5"),
  ),
  "pieces are cut as if there was no window": (
    "attention.decode_plan:_plan",
    given(window=lambda g: None),
    _COVERS.format("100-5"),
  ),
  "the last piece ends with the plan's lengths": (
    "attention.decode_plan:_plan",
    text("jnp.where(closes, _NO_END, ", "jnp.where(False, _NO_END, "),
    _COVERS.format("None-5"),
  ),
  "a piece is shorter than its share": (
    "attention.decode_plan:_plan",
    text("(begin + share) * block", "(begin + share) * block - 1"),
    _COVERS.format("None-64"),
  ),
  "pieces may be longer than a fair share": (
    "attention.decode_plan:_plan",
    text("(total + workers - 1) // workers", "1 + total // workers"),
    _COVERS.format("None-1"),
  ),
  "a part without keys counts": (
    "attention.merge:merge_states",
    text("share[..., None] > 0", "share[..., None] >= 0"),
    _MERGE + "test_equals_the_reference",
  ),
  "merged parts have the largest log-sum-exp": (
    "attention.merge:merge_states",
    text("top + jnp.log(jnp.where(empty, 1.0, total))", "top"),
    _MERGE + "test_equals_the_reference",
  ),
  "parts are not weighed from the largest": (
    "attention.merge:merge_states",
    text("lse - jnp.where(empty, jnp.float32(0), top)[None]", "lse"),
    _MERGE + "test_extreme_log_sum_exps",
  ),
}

_SHARING = {
  "the last token is shared": (
    "attention.shared_prefix:_find",
    text("fill_value=0) - 1", "fill_value=0)"),
    _SHARED + "test_the_last_token_is_never_shared",
  ),
  "pages that only some rows share are shared": (
    "attention.shared_prefix:_find",
    text("jnp.all(same, axis=1)", "jnp.any(same[:, 1:], axis=1)"),
    _SHARED + "test_a_cluster_shares_what_all_its_rows_share",
  ),
  "idle rows are in a cluster": (
    "attention.shared_prefix:_find",
    text("(lengths > 0) &", "(lengths >= 0) &"),
    _SHARED + "test_idle_rows_are_in_no_cluster",
  ),
  "a row alone is a cluster": (
    "attention.shared_prefix:_by_first_page",
    text("size > 1", "size > 0"),
    _SHARED_DECODE.format("page16_gqa4_d128"),
  ),
  "rows past a cluster's size are alone": (
    "attention.shared_prefix:_by_first_page",
    text("(begins | (rank % most == 0))", "begins"),
    _SHARED + "test_many_rows_with_one_first_page_make_several_clusters",
  ),
  "prefixes are read for nothing in the gate": (
    "attention.shared_prefix:_saved",
    text("jnp.sum(shared) - jnp.sum(tokens)", "jnp.sum(shared)"),
    _SHARED + "test_the_gate_counts_what_is_read[False]",
  ),
  "own pages begin a page too late": (
    "attention.shared_prefix:SharedPrefix.refreshed",
    text("own = column + (shared", "own = column + 1 + (shared"),
    _SHARED_DECODE.format("page16_gqa4_d128"),
  ),
  "heads of a cluster are ordered row by row": (
    "attention.cascade:_prefix_states",
    text(".reshape(clusters, size, kv_heads, -1, *rest).swapaxes(1, 2)", ""),
    _SHARED_DECODE.format("page16_gqa4_d128"),
  ),
  "ALiBi counts from the end of the prefix": (
    "attention.cascade:_prefix_states",
    text("lse - own_slopes[None] * away", "lse"),
    _SHARED_DECODE.format("alibi"),
  ),
  "parts of clusters have the pages of another": (
    "attention.cascade:_parts",
    text(
      "jnp.repeat(shared.prefix_table, parts, axis=0)",
      "jnp.tile(shared.prefix_table, (parts, 1))",
    ),
    _SHARED + "test_parts_of_clusters_that_a_backend_serves"
    "[page16_gqa4_d128-2]",
  ),
  "latents are scaled as keys alone": (
    "attention.mla:_check_latents",
    text("v_scale=options.k_scale", "v_scale=None"),
    _MLA.format("int8_scale_per_head"),
  ),
  "values are the end of a latent": (
    f"{_XLA}:_gather",
    text("keys[..., : options.value_dim]", "keys[..., -options.value_dim :]"),
    _MLA.format("float32"),
  ),
  "no backend is asked whether it serves": (
    "attention.choose:_named",
    text("module.unsupported(here, q, k_pages, v_pages, options)", "None"),
    "test_choose.py::TestNamed::test_it_is_not_replaced",
  ),
}

_STORING = {
  "negative ids count from the end": (
    "append:_where",
    text("(page_ids >= 0) & ", ""),
    _DROPPED.format("-1-0-4"),
  ),
  "ids beyond the pool are moved into it": (
    "append:_where",
    text("(page_ids < total) & ", ""),
    _DROPPED.format("12-0--4"),
  ),
  "negative offsets count from the end": (
    "append:_where",
    text("(offsets >= 0) & ", ""),
    _DROPPED.format("2--1-0"),
  ),
  "tokens land a place too far": (
    "append:_put_all_heads",
    given(offsets=lambda g: g.offsets + 1),
    _PAGES + "TestAppend::test_tokens_land_at_their_pages_and_offsets"
    "[float32-float32]",
  ),
  "scales of heads multiply": (
    "append:_elements",
    text("/ scale[None, :, None]", "* scale[None, :, None]"),
    _QUANTIZED + "TestAppend::test_a_scale_per_head[int8]",
  ),
  "half of a format is used": (
    "formats:quantize",
    text("largest / _LARGEST[meaning]", "2 * largest / _LARGEST[meaning]"),
    _QUANTIZED + "TestQuantize::test_error_is_half_a_step[int8]",
  ),
  "infinite numbers are hidden": (
    "formats:quantize",
    text("jnp.isfinite(largest)", "largest >= 0"),
    _QUANTIZED + "TestQuantize::test_non_finite_numbers_are_not_hidden"
    "[inf-int8]",
  ),
  "integers are rounded down": (
    "formats:store",
    text("jnp.round(values)", "jnp.floor(values)"),
    _QUANTIZED + "TestStore::test_rounds_to_nearest_and_saturates[int8]",
  ),
  "numbers do not saturate": (
    "formats:store",
    text("jnp.clip(values, -largest, largest)", "values"),
    _QUANTIZED + "TestStore::test_rounds_to_nearest_and_saturates[uint8]",
  ),
  "a copy is made in one layer": (
    "pages:copy_pages",
    text("num_layers, 0)", "1, 0)"),
    _PAGES + "TestCopy::test_copies_in_every_layer[src0-dst0]",
  ),
  "a copy goes to another layer": (
    "pages:copy_pages",
    text("(dst < per_layer)", "(dst < total)"),
    _PAGES + "TestCopy::test_copies_in_every_layer[src2-dst2]",
  ),
  "a page that does not exist is the last one": (
    "pages:gather_pages",
    text("jnp.where(fits, where, total)", "jnp.where(fits, where, total - 1)"),
    _PAGES + "TestGather::test_dense[float32]",
  ),
}

MUTANTS = {
  name: FailsTest(f"jaxkv_kernels._src.{place}", wrong, f"tests/kernels/{test}")
  for table in (_ATTEND, _PACKING, _PIECES, _SHARING, _STORING)
  for name, (place, wrong, test) in table.items()
}
