"""The Hopper backend: cuts of its work, merged results and memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv_kernels._src.attention import online_softmax
from jaxkv_kernels._src.attention import query_tiles
from jaxkv_kernels._src.attention.mosaic_gpu import backend as mosaic_gpu
from jaxkv_kernels._src.attention.mosaic_gpu.work import GpuStatic
from jaxkv_kernels._src.attention.mosaic_gpu.work import Unit
from jaxkv_kernels._src.attention.options import AttentionCall
from jaxkv_kernels._src.attention.options import CallOptions
from jaxkv_kernels._src.attention.triton.merge import merge_pieces
from tests.kernels import reference
from tests.kernels.shapes import put


def static(**changes):
  fields = {
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
  return GpuStatic(**(fields | changes))


merge = jax.jit(
  functools.partial(merge_pieces, interpret=True),
  static_argnames=("max_pieces", "rows"),
)


def work_of(lengths, columns, *, window=None):
  """Work lists of decoding: (real units, where tiles begin, most results)."""
  lengths = jnp.asarray(lengths, jnp.int32)
  options = CallOptions(page_offset=jnp.int32(0), scale=1.0, window=window)
  pool = jnp.zeros((1, 2, 16, 64))
  zeros = jnp.zeros_like(lengths)
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
  units, offsets, max_pieces = mosaic_gpu.work_list(
    tiles, zeros, call.capacity, static(), options
  )
  return Unit(*np.asarray(units)[: int(offsets[-1])].T), offsets, max_pieces


class TestWorkList:
  @pytest.mark.slow
  @pytest.mark.parametrize("window", [None, 100])
  def test_work_covers_every_token_once(self, window):
    lengths = np.array([1000, 0, 1, 64, 130, 999])
    columns = 63
    work, offsets, _ = work_of(lengths, columns, window=window)
    counts = np.zeros((len(lengths), columns * 16), int)
    for row, *bounds in zip(work.tile, work.first, work.end, strict=True):
      counts[row, slice(*bounds)] += 1
    for row, length in enumerate(lengths):
      start = 0 if window is None else max(0, length - window)
      np.testing.assert_array_equal(counts[row, start:length], 1)
      assert counts[row].sum() == length - start
    assert len(set(work.result.tolist())) == int(offsets[-1])
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
  def test_a_row_is_cut_by_its_visible_keys(self, lengths, window, pieces):
    """Not by its table's width, which here is 64 times the longest row."""
    work, offsets, max_pieces = work_of(lengths, 2**14, window=window)
    assert np.diff(offsets).tolist() == list(pieces)
    assert max(pieces) <= max_pieces
    num_tokens = work.end - work.first
    for row, count in enumerate(pieces):
      row_tokens = num_tokens[work.tile == row]
      assert count == 0 or row_tokens.max() <= max(128, row_tokens.mean() + 64)

  def test_pieces_of_a_row_do_not_depend_on_other_rows(self):
    row_work, batch_work = (
      work_of(lengths, 256)[0] for lengths in ((4000, 0, 0), (4000, 77, 2000))
    )
    for name in ("first", "end", "result"):
      a, b = (
        getattr(work, name)[work.tile == 0] for work in (row_work, batch_work)
      )
      np.testing.assert_array_equal(a, b)

  @pytest.mark.parametrize("rows", [8, 64])
  @pytest.mark.parametrize("capacity", [512, 4096, 65536])
  def test_output_does_not_outweigh_input(self, rows, capacity):
    for num in (1, 4, 32, 1024):
      q = jnp.zeros((num, 2, rows, 64))
      tiles = query_tiles.Tiles(q, *(jnp.zeros(()),) * 4)
      min_blocks, max_cuts = mosaic_gpu.cuts(tiles, capacity, static())
      assert min_blocks * 64 >= 16 * rows
      assert max_cuts * min_blocks * 64 < capacity + min_blocks * 64


class TestMerge:
  """Results of pieces, merged."""

  @pytest.mark.slow
  @pytest.mark.parametrize("dim", [5, 192])
  @pytest.mark.parametrize("counts", [(3, 0, 1, 2), (40, 16, 17, 0), (1, 0, 1)])
  @pytest.mark.parametrize("large", [0, 2**20])
  def test_equals_attention_over_all_keys(self, large, counts, dim):
    """Unused results and padding rows may hold anything.

    With large logits a log-sum-exp keeps no digits of the sums.
    """
    rng = np.random.default_rng(0)
    tiles, max_pieces, rows = len(counts), max(counts), 3
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    out = np.full((tiles, max_pieces, 2, 4, dim), np.nan, np.float32)
    totals = np.full((tiles, max_pieces, 2, 2, 7), np.nan, np.float32)
    for tile, count in enumerate(counts):
      out[tile, :count, :, :rows] = rng.standard_normal((count, 2, rows, dim))
      tops = rng.standard_normal((count, 2, rows)) * 3 + large
      totals[tile, :count, :, 0, :rows] = tops
      totals[tile, :count, :, 1, :rows] = rng.uniform(1, 9, tops.shape)
    totals[0, 0, 0] = [[online_softmax.LOWEST], [0]]
    results = [x.reshape(-1, *x.shape[2:]) for x in (out, totals)]
    tops, sums = np.moveaxis(totals.astype(np.float64), 3, 0)
    with np.errstate(divide="ignore"):
      lse = tops * np.log(2) + np.log(sums)
    merged = merge(*put(*results, offsets), max_pieces=max_pieces, rows=rows)
    for tile, count in enumerate(counts):
      expected = np.zeros((2, rows, dim)), np.full((2, rows), -np.inf)
      if count:
        expected = reference.merge_states(
          out[tile, :count, :, :rows], lse[tile, :count, :, :rows]
        )
      for a, b in zip(merged, expected, strict=True):
        np.testing.assert_allclose(a[tile], b, rtol=2e-7, atol=2e-6)

  @pytest.mark.parametrize("bad", [np.nan, np.inf])
  def test_nan_of_a_tile_is_kept(self, bad):
    """The NaN fills the tile's own result, and no other."""
    rng = np.random.default_rng(0)
    offsets = np.array([0, 2, 4, 6], np.int32)
    out = rng.standard_normal((6, 1, 1, 3)).astype(np.float32)
    totals = rng.uniform(1, 9, (6, 1, 2, 1)).astype(np.float32)
    clean = merge(*put(out, totals, offsets), max_pieces=2, rows=1)
    out[2] = bad
    if np.isnan(bad):
      totals[2] = bad
    spoiled = merge(*put(out, totals, offsets), max_pieces=2, rows=1)
    assert not np.isfinite(spoiled[0][1]).any()
    for a, b in zip(clean, spoiled, strict=True):
      np.testing.assert_array_equal(a[::2], b[::2])
