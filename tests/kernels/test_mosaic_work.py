"""How the Hopper backend cuts its work, merges results and uses memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv_kernels as kernels
from jaxkv_kernels._src.attention import online_softmax
from jaxkv_kernels._src.attention import query_tiles
from jaxkv_kernels._src.attention import reference
from jaxkv_kernels._src.attention.mosaic_gpu import backend as mosaic_gpu
from jaxkv_kernels._src.attention.mosaic_gpu.work import GpuStatic
from jaxkv_kernels._src.attention.mosaic_gpu.work import Unit
from jaxkv_kernels._src.attention.options import AttentionCall
from jaxkv_kernels._src.attention.options import CallOptions
from jaxkv_kernels._src.attention.triton.merge import merge_pieces
from tests.kernels.shapes import put


def static(**changes):
  sizes = {
    "kv_heads": 2,
    "per_kv_head": 4,
    "page_size": 16,
    "streams": 2,
    "k_stages": 3,
    "v_stages": 2,
    "blocks": 4,
    "causal": False,
    "soft_cap": None,
    "alibi": False,
    "tree": False,
  }
  return GpuStatic(**(sizes | changes))


merge = jax.jit(
  functools.partial(merge_pieces, interpret=True),
  static_argnames=("max_pieces", "rows"),
)


def work_of(lengths, columns, *, window=None, plan=None):
  """Work lists of decoding: (real units, where tiles begin, most results)."""
  lengths = jnp.asarray(lengths, jnp.int32)
  options = CallOptions(
    page_offset=jnp.int32(0), scale=1.0, window=window, plan=plan
  )
  pool = jnp.zeros((1, 2, 16, 64))
  none = jnp.zeros_like(lengths)
  call = AttentionCall(
    q=jnp.zeros((len(lengths), 1, 8, 64)),
    k_pages=pool,
    v_pages=pool,
    page_table=jnp.zeros((len(lengths), columns), jnp.int32),
    starts=lengths - 1,
    counts=jnp.ones_like(lengths),
    options=options,
  )
  tiles = query_tiles.tile(call, tile_size=1, multiple=8)
  units, begins, most = mosaic_gpu.work_list(
    tiles, none, call.capacity, static(), options
  )
  return Unit(*np.asarray(units)[: int(begins[-1])].T), begins, most


class TestWorkList:
  @pytest.mark.slow
  @pytest.mark.parametrize("window", [None, 100])
  @pytest.mark.parametrize("planned", [False, True])
  def test_every_token_once(self, window, planned):
    lengths, columns = np.array([1000, 0, 1, 64, 130, 999]), 63
    plan = None
    if planned:
      plan = kernels.plan_decode(jnp.asarray(lengths, jnp.int32), workers=7)
    work, begins, most = work_of(lengths, columns, window=window, plan=plan)
    assert (most is None) == planned
    seen = np.zeros((len(lengths), columns * 16), int)
    for row, first, end in zip(work.tile, work.first, work.end, strict=True):
      seen[row, first:end] += 1
    for row, length in enumerate(lengths):
      first = 0 if window is None else max(0, length - window)
      np.testing.assert_array_equal(seen[row, first:length], 1)
      assert seen[row].sum() == length - first
    assert len(set(work.result.tolist())) == int(begins[-1])
    np.testing.assert_array_equal(work.sequence, work.tile)

  @pytest.mark.slow
  @pytest.mark.parametrize(
    ("lengths", "window", "pieces"),
    [
      # Four pieces for each of 8 contexts give each of 8 streams four pieces;
      # no piece is shorter than two blocks.
      ((2048, 4096, 64, 0), None, (4, 4, 1, 0)),
      ((2048, 4096, 200, 129), 500, (4, 4, 2, 2)),
      # More rows have fewer pieces each.
      ((2048,) * 9, None, (2,) * 9),
      ((2048,) * 16, None, (1,) * 16),
    ],
  )
  def test_a_row_is_cut_by_the_keys_it_sees(self, lengths, window, pieces):
    """Not by its table's width, which here is 64 times the longest row."""
    work, begins, most = work_of(lengths, 2**14, window=window)
    assert np.diff(begins).tolist() == list(pieces)
    assert most is not None and max(pieces) <= most
    size = work.end - work.first
    for row, count in enumerate(pieces):
      mine = size[work.tile == row]
      assert count == 0 or mine.max() <= max(128, mine.mean() + 64)

  def test_a_row_s_pieces_do_not_depend_on_others(self):
    alone, together = (
      work_of(lengths, 256)[0] for lengths in ((4000, 0, 0), (4000, 77, 2000))
    )
    for name in ("first", "end", "result"):
      a, b = (getattr(work, name)[work.tile == 0] for work in (alone, together))
      np.testing.assert_array_equal(a, b)

  @pytest.mark.parametrize("rows", [8, 64])
  @pytest.mark.parametrize("capacity", [512, 4096, 65536])
  def test_output_does_not_outweigh_input(self, rows, capacity):
    for num in (1, 4, 32, 1024):
      q = jnp.zeros((num, 2, rows, 64))
      tiles = query_tiles.Tiles(q, *(jnp.zeros(()),) * 4)
      least, most = mosaic_gpu.cuts(tiles, capacity, static())
      assert least * 64 >= 16 * rows
      assert most * least * 64 < capacity + least * 64


class TestMerge:
  """Results of pieces, merged."""

  @pytest.mark.slow
  @pytest.mark.parametrize("dim", [5, 192])
  @pytest.mark.parametrize("counts", [(3, 0, 1, 2), (40, 16, 17, 0), (1, 0, 1)])
  @pytest.mark.parametrize("planned", [False, True])
  @pytest.mark.parametrize("large", [0, 2**20])
  def test_equals_attention_over_all_keys(self, large, planned, counts, dim):
    """Unused results and padding rows may hold anything.

    With large logits a log-sum-exp keeps no digits of the sums.
    """
    rng = np.random.default_rng(0)
    tiles, most, rows = len(counts), max(counts), 3
    begins = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    out = np.full((tiles, most, 2, 4, dim), np.nan, np.float32)
    totals = np.full((tiles, most, 2, 2, 7), np.nan, np.float32)
    for tile, count in enumerate(counts):
      out[tile, :count, :, :rows] = rng.standard_normal((count, 2, rows, dim))
      tops = rng.standard_normal((count, 2, rows)) * 3 + large
      totals[tile, :count, :, 0, :rows] = tops
      totals[tile, :count, :, 1, :rows] = rng.uniform(1, 9, tops.shape)
    totals[0, 0, 0] = [[online_softmax.LOWEST], [0]]
    places = [x.reshape(-1, *x.shape[2:]) for x in (out, totals)]
    if planned:
      order = np.argsort(np.isnan(places[1][:, 1, 0, 0]), kind="stable")
      places = [x[order] for x in places]
    tops, sums = np.moveaxis(totals.astype(np.float64), 3, 0)
    with np.errstate(divide="ignore"):
      lse = tops * np.log(2) + np.log(sums)
    merged = merge(
      *put(*places, begins), max_pieces=None if planned else most, rows=rows
    )
    for tile, count in enumerate(counts):
      wanted = np.zeros((2, rows, dim)), np.full((2, rows), -np.inf)
      if count:
        wanted = reference.merge_states(
          out[tile, :count, :, :rows], lse[tile, :count, :, :rows]
        )
      for a, b in zip(merged, wanted, strict=True):
        np.testing.assert_allclose(a[tile], b, rtol=2e-7, atol=2e-6)

  @pytest.mark.parametrize("planned", [False, True])
  @pytest.mark.parametrize("bad", [np.nan, np.inf])
  def test_keeps_a_tile_s_nan(self, planned, bad):
    """The NaN fills the tile's own result, and no other."""
    rng = np.random.default_rng(0)
    begins = np.array([0, 2, 4, 6], np.int32)
    out = rng.standard_normal((6, 1, 1, 3)).astype(np.float32)
    totals = rng.uniform(1, 9, (6, 1, 2, 1)).astype(np.float32)
    most = None if planned else 2
    before = merge(*put(out, totals, begins), max_pieces=most, rows=1)
    out[2] = bad
    if np.isnan(bad):
      totals[2] = bad
    after = merge(*put(out, totals, begins), max_pieces=most, rows=1)
    assert not np.isfinite(after[0][1]).any()
    for a, b in zip(before, after, strict=True):
      np.testing.assert_array_equal(a[::2], b[::2])
