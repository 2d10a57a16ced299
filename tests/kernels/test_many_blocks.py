"""Enough work that kernels on a GPU wrap around their rings, item after item.

An interpreter needs far less work for that: see `_INTERPRETED_BLOCKS` of
`mosaic_gpu`, and `TestParts` of `triton`'s tests.
"""

import numpy as np
import pytest

from tests.kernels import reference
from tests.kernels import shapes
from tests.kernels.backends import backends

pytestmark = pytest.mark.gpu
over_backends = pytest.mark.parametrize("runner", backends())
# Head size, page size, format of the pools, scales.
LARGE = {
  "bfloat16_d64": (64, 64, "bfloat16", None),
  "bfloat16_d128": (128, 16, "bfloat16", None),
  "float16_d192": (192, 8, "float16", None),
  "bfloat16_d256": (256, 32, "bfloat16", None),
  "int8_scale_per_head": (128, 16, "int8", "head"),
  "e4m3_scale_per_token": (128, 16, "float8_e4m3fn", "token"),
}


class TestManyBlocks:
  @over_backends
  @pytest.mark.parametrize("name", LARGE)
  def test_equals_the_reference(self, runner, name):
    dim, page_size, dtype, scales = LARGE[name]
    lengths = (1, 4000, *np.random.default_rng(0).integers(2, 4000, 22))
    shape = shapes.Shape(
      heads=(32, 8),
      head_dim=dim,
      page_size=page_size,
      lengths=tuple(map(int, lengths)),
      dtype=dtype,
      query_dtype="bfloat16",
      scales=scales,
    )
    case = shapes.problem(shape)
    q = shapes.queries(case, shape, len(lengths))
    arguments = (q, *case.pools, case.lengths)
    wanted = reference.paged_decode(*arguments, **case.options)
    out, lse = runner("paged_decode", *arguments, **case.options)
    shapes.assert_matches(out, lse, *wanted, case.dtype, runner.float32_l2)

  @over_backends
  def test_a_long_prompt_equals_the_reference(self, runner):
    """700 queries of 16 heads over one K/V head, after 3,000 tokens."""
    shape = shapes.Shape(
      heads=(16, 1),
      head_dim=128,
      page_size=16,
      lengths=(3700,),
      dtype="bfloat16",
    )
    case = shapes.problem(shape)
    counts = np.array([700], np.int32)
    q = shapes.queries(case, shape, 1, 700)
    arguments = (q, *case.pools, case.lengths - counts, counts)
    expected = reference.paged_attention_padded(*arguments)
    out, lse = runner("paged_attention_padded", *arguments)
    shapes.assert_matches(out, lse, *expected, case.dtype, runner.float32_l2)
