"""Mistakes in the kernels: one each, such as people make.

For each a test of this package is named that notices it. One that no test
notices shows a behaviour that nothing checks.
"""

from tests.tools.mistakes import given
from tests.tools.mistakes import returned
from tests.tools.mistakes import table

_XLA = "attention.xla.backend"
_ATTENTION = "test_paged_attention.py::"
_DECODE = _ATTENTION + "TestDecode::test_equals_the_reference[xla-{}]"
_PAGES = "test_pages.py::"

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
}

_STORING = {
  "tokens land a place too far": (
    "append:_put_all_heads",
    given(offsets=lambda g: g.offsets + 1),
    _PAGES + "TestAppend::test_tokens_land_at_their_pages_and_offsets"
    "[float32-float32]",
  ),
}

MUTANTS = table("jaxkv_kernels._src", "tests/kernels", _ATTEND | _STORING)
