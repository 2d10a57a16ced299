"""Mistakes in the K/V memory: one each, and the test that notices it."""

from jaxkv.kv import FreshView
from tests.tools.mistakes import FailsTest
from tests.tools.mistakes import given
from tests.tools.mistakes import returned
from tests.tools.mistakes import text

_MEMORY = "test_memory.py::"
_WRITTEN = (
  _MEMORY + "TestWrite::test_tokens_land_in_their_pages_and_nowhere_else"
)
_ELSEWHERE = _MEMORY + "TestWrite::test_nothing_lands_elsewhere[{}]"
_PACKED = (
  "test_packed_view.py::test_equals_a_call_for_each_sequence[False-None]"
)
_ATTENDED = _MEMORY + "TestAttend::test_written_tokens_are_attended_to[float32]"
_ONE_COLUMN = _MEMORY + "TestAttend::test_one_column_equals_the_first_of_two"
_COPIED = _MEMORY + "TestCopyAndGather::test_copy"
_GATHERED = _MEMORY + "TestCopyAndGather::test_gather[float32]"
_QUANTIZED = "test_quantized.py::TestUse::"
_HEADS = "test_heads.py::test_each_device_attends_to_its_own_heads[{}]"
_SHARE = "test_shared_prefix.py::TestShare::"
_REFRESH = "test_shared_prefix.py::TestRefreshShared::"
_VIEW = "test_view.py::"
_LATENTS = "test_latents.py::"
_CROSS = "test_cross_attention.py::test_"
_STATES = "test_states.py::TestReadAndWrite::"
_TOKENS = "test_tokens.py::"

_TABLE = {
  "tokens land in the next page": (
    "append:_locate",
    text(
      "position // kv.page_size, view", "position // kv.page_size + 1, view"
    ),
    _WRITTEN + "[float32]",
  ),
  "the null page is written": (
    "append:_locate",
    text("ids == 0", "ids == -1"),
    _ELSEWHERE.format("0-0"),
  ),
  "positions before the sequence are those of its end": (
    "append:_locate",
    text("position >= 0", "position >= -2"),
    _ELSEWHERE.format("3--2"),
  ),
  "positions past the table are in its last page": (
    "append:_locate",
    text('mode="fill", fill_value=0', 'mode="clip"'),
    _ELSEWHERE.format("3-4"),
  ),
  "pages of the next layer are written": (
    "memory:in_layer",
    returned(lambda out, g: g.page_ids),
    _ELSEWHERE.format("27-0"),
  ),
  "layers lie a page apart": (
    "append:_write",
    text("layer * kv.num_pages", "layer"),
    _WRITTEN + "[float32]",
  ),
  "keys and values change places": (
    "append:_write",
    text(
      "replace(kv, k=k_pages, v=v_pages)", "replace(kv, k=v_pages, v=k_pages)"
    ),
    _WRITTEN + "[float32]",
  ),
  "scales of values are those of keys": (
    "append:_write",
    text("v_scale=v_scale\n", "v_scale=k_scale\n"),
    _QUANTIZED + "test_gather_gives_back_what_was_written[int8]",
  ),
  "devices have the sinks of all heads": (
    "attention:_by_head",
    text('("sinks", "alibi_slopes")', '("alibi_slopes",)'),
    _HEADS.format("decode"),
  ),
  "the compiler splits attention": (
    "attention:attend",
    text("if heads is not None:", "if False:"),
    "test_heads.py::test_a_named_axis_is_needed",
  ),
  "the null page is copied to": (
    "pools:_copied",
    text("dst == 0", "dst == -1"),
    _COPIED,
  ),
  "values are not copied": (
    "memory:copy_kv",
    text("v=copied(kv.v)", "v=kv.v"),
    _QUANTIZED + "test_copies_take_their_scales_along[int8]",
  ),
  "scales are not copied": (
    "memory:copy_kv",
    text("k_scale=copied(kv.k_scale)", "k_scale=kv.k_scale"),
    _QUANTIZED + "test_copies_take_their_scales_along[int8]",
  ),
  "a copy is made in the first layer": (
    "memory:copy_kv",
    text("num_layers=kv.num_layers", "num_layers=1"),
    _COPIED,
  ),
  "numbers are gathered without scales": (
    "memory:_gather",
    text("astype(jnp.float32) * factors", "astype(jnp.float32)"),
    _QUANTIZED + "test_gather_gives_back_what_was_written[int8]",
  ),
  "the first layer is gathered": (
    "memory:_gather",
    text("layer * kv.num_pages", "0 * layer"),
    _GATHERED,
  ),
  "padding has positions": (
    "view:positions",
    text("jnp.where(real, view", "jnp.where(True, view"),
    _WRITTEN + "[float32]",
  ),
  "new tokens begin at 0": (
    "view:positions",
    text("view.starts[:, None] + column", "0 * view.starts[:, None] + column"),
    _WRITTEN + "[float32]",
  ),
  "a decode does not see its own token": (
    "view:decode_lengths",
    text("view.starts + 1", "view.starts"),
    _ONE_COLUMN,
  ),
  "idle rows see a token": (
    "view:decode_lengths",
    returned(lambda out, g: g.view.starts + 1),
    _ONE_COLUMN,
  ),
  "every view is of the first group": (
    "view:view",
    text("state.page_table[:, group]", "state.page_table[:, 0]"),
    _VIEW + "test_rows_are_the_slots_of_a_group[1]",
  ),
  "new tokens begin behind themselves": (
    "view:view",
    text("starts=starts,", "starts=starts + counts,"),
    _VIEW + "test_rows_are_the_slots_of_a_group[0]",
  ),
  "an encoder's tokens are as many as the sequence's": (
    "view:view",
    text("if kind.holds_encoder:", "if False:"),
    _VIEW + "test_an_encoder_has_its_own_lengths",
  ),
  "idle rows have a sink": (
    "attention:_attend_single",
    text("jnp.where((rows.counts > 0)[:, None], lse, -jnp.inf)", "lse"),
    _ONE_COLUMN,
  ),
  "attention reads the first layer": (
    "attention:_attend",
    text("layer * kv.num_pages", "0 * layer"),
    _ATTENDED,
  ),
  "scales of keys scale values": (
    "attention:_attend",
    text("v_scale=kv.v_scale", "v_scale=kv.k_scale"),
    _QUANTIZED + "test_attention_over_what_was_written[int8]",
  ),
  "rows that have changed are read as shared": (
    "attention:_attend_single",
    text("not isinstance(view, FreshView)", "False"),
    _SHARE + "test_rows_that_have_changed_since_share[earlier]",
  ),
  "a window is forgotten where rows share pages": (
    "attention:_attend_single",
    text(
      'if rows.shared is not None and call["options"].window is None:',
      "if rows.shared is not None:\n"
      '    options = dataclasses.replace(call["options"], window=None)\n'
      '    call = {**call, "options": options}',
    ),
    _SHARE + "test_a_window_is_attended_to_without_sharing",
  ),
  "chunks begin one after another without their sequences": (
    "view:packed_positions",
    text("view.starts - (ends", "0 * view.starts - (ends"),
    _PACKED,
  ),
  "tokens of chunks are in pages of the rows that decode": (
    "append:places",
    text("_locate(kv, view.prefill, row", "_locate(kv, view.decode, row"),
    _PACKED,
  ),
  "a refreshed view is as before": (
    "shared_prefix:refresh_shared",
    returned(lambda out, g: FreshView(view=g.view)),
    _REFRESH + "test_rows_that_left",
  ),
  "pages are shared of rows without a token": (
    "shared_prefix:share",
    text("decode_lengths(view)", "view.starts + 1"),
    _SHARE + "test_idle_rows_are_in_no_cluster",
  ),
  "clusters cannot be given": (
    "shared_prefix:share",
    given(clusters=lambda g: None),
    _SHARE + "test_clusters_may_be_given",
  ),
  "a plan is cut for rows without their token": (
    "decode_plan:plan_decode",
    text("decode_lengths(view)", "view.starts"),
    "test_decode_plan.py::TestPlan::test_pieces_are_of_rows_with_a_token",
  ),
  "latents of all layers are in the first": (
    "append:_write_latents",
    text("layer * kv.num_pages", "layer * 0"),
    _LATENTS + "TestAttend::test_several_columns[options0-float32]",
  ),
  "scales of latents are not written": (
    "append:_write_latents",
    text("k_scale=scales[..., 0]", "k_scale=kv.k_scale"),
    _LATENTS + "TestAttend::test_one_column[options0-int8]",
  ),
  "a device has the latents of its heads": (
    "attention:_by_head",
    text("if kv.value_dim is None else P()", "if True else P()"),
    _LATENTS + "TestAround::test_query_heads_of_two_devices[1]",
  ),
  "the last token of an encoder is not seen": (
    "cross_attention:_rectangle",
    text("rows.starts[:, None], 0)", "rows.starts[:, None] - 1, 0)"),
    _CROSS + "queries_of_a_row_see_all[1]",
  ),
  "queries are heads of other key-value heads": (
    "cross_attention:_rectangle",
    text("folded = folded.swapaxes(1, 2).", "folded = folded."),
    _CROSS + "queries_of_a_row_see_all[5]",
  ),
  "a second piece of queries reads nothing": (
    "cross_attention:_rectangle",
    text("first < rows.counts", "first < 1 + 0 * rows.counts"),
    _CROSS + "queries_of_a_row_see_all[23]",
  ),
  "sinks of an encoder's readers are those of other heads": (
    "cross_attention:_rectangle",
    text("sinks.reshape(groups, 1, -1)", "sinks[::-1].reshape(groups, 1, -1)"),
    _CROSS + "queries_of_a_row_see_all[5]",
  ),
  "all chunks read the first encoder": (
    "cross_attention:_packed",
    text(
      "starts=jnp.take(rows.starts, tiles.sequences,",
      "starts=jnp.take(rows.starts, 0 * tiles.sequences,",
    ),
    _CROSS + "packed[False]",
  ),
  "an encoder's tokens are seen up to one's own place": (
    "attention:_attend",
    text("if not causal:", "if False:"),
    _CROSS + "queries_of_a_row_see_all[5]",
  ),
  "idle rows write their states": (
    "states:_write",
    text("rows.counts > 0", "rows.counts >= 0"),
    _STATES + "test_nothing_lands_elsewhere[3-2-0]",
  ),
  "a state is in the null page": (
    "states:_places",
    text("ids > 0", "ids >= 0"),
    _STATES + "test_nothing_lands_elsewhere[0-0-2]",
  ),
  "a state is in the page of the next token": (
    "states:_places",
    text("(tokens - 1) //", "tokens //"),
    _STATES + "test_a_state_stands_in_the_page_of_its_last_token",
  ),
  "a sequence begins with the state of its page": (
    "states:_places",
    text("tokens > 0", "tokens >= 0"),
    _STATES + "test_a_sequence_begins_with_zeros",
  ),
  "states are copied in the first layer": (
    "states:copy_states",
    text("num_layers=pages.num_layers", "num_layers=1"),
    "test_states.py::TestPools::test_copy_of_several",
  ),
  "the last pool is copied": (
    "pools:_copy",
    text("copied if isinstance(kv, tuple)", "(*kv[:-1], copied[-1]) if kv"),
    "test_states.py::TestPools::test_copy_of_several",
  ),
  "numbers of all layers are in the first": (
    "tokens:_write",
    text("layer * pages.num_pages", "layer * 0"),
    _TOKENS + "TestWriteAndRead::test_numbers_land_beside_their_tokens",
  ),
  "numbers of the next layer are read": (
    "tokens:_read",
    text("(page_table < pages.num_pages)", "(page_table < 2**30)"),
    _TOKENS + "TestWriteAndRead::test_nothing_is_read_from_elsewhere[27]",
  ),
  "numbers are copied in the first layer": (
    "tokens:copy_tokens",
    text("num_layers=pages.num_layers", "num_layers=1"),
    _TOKENS + "test_copies_beside_keys_and_values",
  ),
}

MUTANTS = {
  name: FailsTest(f"jaxkv._src.kv.{place}", wrong, f"tests/kv/{test}")
  for name, (place, wrong, test) in _TABLE.items()
}
