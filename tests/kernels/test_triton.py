"""The backend `triton`, interpreted: cases beyond the table of shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv_kernels as kernels
from jaxkv_kernels._src.attention import query_tiles
from jaxkv_kernels._src.attention.options import AttentionCall
from jaxkv_kernels._src.attention.options import CallOptions
from jaxkv_kernels._src.attention.triton import backend as triton
from tests.kernels import reference
from tests.kernels.backends import check_float16_values
from tests.kernels.shapes import assert_matches
from tests.kernels.shapes import put
from tests.tools.tiers import slow_except

pytestmark = pytest.mark.skipif(
  jax.default_backend() != "cpu", reason="interpreted, on a CPU"
)


class TestScales:
  @slow_except("per_head", [False, True], False)
  @slow_except("factor", [1e3, 1e-2, 1e-6, 1e-12], 1e-12)
  @pytest.mark.parametrize("per_head", [False, True])
  @pytest.mark.parametrize("factor", [1e3, 1e-2, 1e-6, 1e-12])
  def test_float16_keeps_values_of_any_size(self, factor, per_head):
    """The output in float32 is as exact for tiny values as for others."""
    check_float16_values(triton, True, factor, per_head=per_head)


class TestReach:
  @pytest.mark.parametrize(
    ("position", "window", "expected"),
    [
      (5, None, (0, 6)),
      (5, 2, (4, 6)),
      (5, 9, (0, 6)),
      (-1, None, (0, 0)),
      (-1, 3, (0, 0)),
      (19, None, (0, 16)),
      (19, 10, (10, 16)),
      (19, 4, (16, 16)),
      (40, 4, (16, 16)),
      (19, 2**31 - 1, (0, 16)),
    ],
  )
  def test_span_of_a_query_in_a_window(self, position, window, expected):
    span = query_tiles.span(jnp.int32(position), 16, window)
    assert tuple(int(x) for x in span) == expected


def sizes_of(q, k_pages, v_pages, page_table):
  """Cuts of the work of a call."""
  rows = jnp.zeros(q.shape[0], jnp.int32)
  return triton._static(
    AttentionCall(
      q=q,
      k_pages=k_pages,
      v_pages=v_pages,
      page_table=page_table,
      starts=rows,
      counts=rows,
      options=CallOptions(page_offset=jnp.int32(0), scale=1.0),
    )
  )


@pytest.mark.slow
class TestParts:
  @pytest.mark.parametrize("splits", [1, 2, 3, 8, 16])
  @pytest.mark.parametrize("window", [None, 300])
  def test_any_number_of_splits(self, monkeypatch, splits, window):
    """Programs have many blocks, one, or none."""
    monkeypatch.setattr(triton, "_PROGRAMS", splits)
    rng = np.random.default_rng(0)
    pools = rng.standard_normal((2, 64, 1, 16, 64)).astype(np.float32)
    q = rng.standard_normal((1, 2, 64)).astype(np.float32)
    table = rng.permutation(64).astype(np.int32)[None]
    arguments = (q, *pools, table, np.array([1000], np.int32))
    assert sizes_of(*put(q[:, None], *pools, table)).splits == splits
    out, lse = kernels.paged_decode(
      *put(*arguments),
      options=kernels.AttentionOptions(window=window),
      backend="triton",
      interpret=True,
    )
    expected = reference.paged_decode(*arguments, window=window)
    assert_matches(out, lse, *expected, np.float32, 2e-6)
