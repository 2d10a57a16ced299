"""How the Hopper backend cuts its work, merges results, fills memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv_kernels as kernels
from jaxkv_kernels.attention import definition
from jaxkv_kernels.attention import mosaic_gpu
from jaxkv_kernels.attention import query_tiles
from jaxkv_kernels.attention.merge_kernel import merge_pieces
from jaxkv_kernels.attention.mosaic_gpu_work import Item
from jaxkv_kernels.attention.mosaic_gpu_work import Static
from jaxkv_kernels.attention.options import Options
from tests.kernels_shapes import put


def static(**changes):
  sizes = {
    "kv_heads": 2,
    "group": 4,
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
  return Static(**(sizes | changes))


merge = jax.jit(
  functools.partial(merge_pieces, interpret=True),
  static_argnames=("most", "rows"),
)


class TestWorkList:
  @pytest.mark.parametrize("window", [None, 100])
  @pytest.mark.parametrize("planned", [False, True])
  def test_every_token_once(self, window, planned):
    lengths = jnp.asarray([1000, 0, 1, 64, 130, 999], jnp.int32)
    capacity, batch = 1008, len(lengths)
    reach = query_tiles.reach(
      lengths - 1, jnp.ones_like(lengths), 1, capacity, window
    )
    q = jnp.zeros((batch, 1, 8, 64))
    tiles = query_tiles.tile(q, reach, kv_heads=2, size=1, multiple=8)
    plan = kernels.plan_decode(lengths, workers=7) if planned else None
    options = Options(
      page_offset=jnp.int32(0), scale=1.0, window=window, plan=plan
    )
    items, begins, most = mosaic_gpu.work_list(
      tiles, jnp.zeros(batch, jnp.int32), capacity, static(), options
    )
    assert (most is None) == planned
    num = int(begins[-1])
    work = Item(*np.asarray(items)[:num].T)
    seen = np.zeros((batch, capacity), int)
    for row, first, end in zip(work.tile, work.first, work.end, strict=True):
      seen[row, first:end] += 1
    for row, length in enumerate(np.asarray(lengths)):
      first = 0 if window is None else max(0, length - window)
      np.testing.assert_array_equal(seen[row, first:length], 1)
      assert seen[row].sum() == length - first
    assert len(set(work.place.tolist())) == num
    np.testing.assert_array_equal(work.sequence, work.tile)

  def test_pieces_follow_from_shapes(self):
    """Enough for all streams, never so short that output outweighs input."""
    for contexts in (1, 8, 64, 2048):
      for rows in (8, 64):
        for capacity in (512, 4096, 65536):
          size = mosaic_gpu.piece(contexts, rows, capacity, static())
          assert size % 64 == 0
          assert size >= 16 * rows

  @pytest.mark.parametrize("dim", [64, 128, 192, 256])
  def test_rings_fit_shared_memory(self, dim):
    k_stages, v_stages = mosaic_gpu.stages(dim)
    assert k_stages >= v_stages >= 2
    per_stream = 64 * dim * 2 * (1 + k_stages + v_stages) + 64 * 32 * 4
    assert per_stream * mosaic_gpu.streams(dim) <= 225 * 1024

  @pytest.mark.parametrize("dim", [64, 128])
  @pytest.mark.parametrize("size", [16, 32, 64, 128])
  def test_rings_of_8_bits_fit_shared_memory(self, dim, size):
    """As many bytes are on their way as of 16 bits, or four blocks are."""
    k_stages, v_stages = mosaic_gpu.stages(dim, 1, size)
    assert k_stages >= v_stages >= 3
    block = 64 * dim + (64 // min(size, 64)) * max(min(size, 64) * 4, 128)
    wide = 64 * dim * 2
    per_stream = (k_stages + v_stages) * block + 3 * wide + 64 * 32 * 4
    assert per_stream * mosaic_gpu.streams(dim) <= 221 * 1024


class TestMerge:
  """Pieces of work put together."""

  @pytest.mark.parametrize("dim", [5, 192])
  @pytest.mark.parametrize("counts", [(3, 0, 1, 2), (40, 16, 17, 0), (1, 0, 1)])
  @pytest.mark.parametrize("planned", [False, True])
  def test_is_attention_to_the_whole(self, planned, counts, dim):
    """Whatever idle places hold, and rows that are padding."""
    rng = np.random.default_rng(0)
    tiles, most, rows = len(counts), max(counts), 3
    begins = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    out = np.full((tiles, most, 2, 4, dim), np.nan, np.float32)
    lse = np.full((tiles, most, 2, 7), np.nan, np.float32)
    for tile, count in enumerate(counts):
      out[tile, :count, :, :rows] = rng.standard_normal((count, 2, rows, dim))
      lse[tile, :count, :, :rows] = rng.standard_normal((count, 2, rows)) * 3
    lse[0, -1, 0] = -np.inf
    places = [x.reshape(-1, *x.shape[2:]) for x in (out, lse)]
    if planned:
      order = np.argsort(np.isnan(places[1][:, 1, 0]), kind="stable")
      places = [x[order] for x in places]
    merged = merge(
      *put(*places, begins), most=None if planned else most, rows=rows
    )
    for tile, count in enumerate(counts):
      wanted = np.zeros((2, rows, dim)), np.full((2, rows), -np.inf)
      if count:
        wanted = definition.merge_states(
          out[tile, :count, :, :rows], lse[tile, :count, :, :rows]
        )
      for a, b in zip(merged, wanted, strict=True):
        np.testing.assert_allclose(a[tile], b, atol=2e-6)

  @pytest.mark.parametrize("planned", [False, True])
  @pytest.mark.parametrize("bad", [np.nan, np.inf])
  def test_keeps_a_tile_s_nan(self, planned, bad):
    """It is in all of its own result, and in nobody else's."""
    rng = np.random.default_rng(0)
    begins = np.array([0, 2, 4, 6], np.int32)
    out = rng.standard_normal((6, 1, 1, 3)).astype(np.float32)
    lse = rng.standard_normal((6, 1, 1)).astype(np.float32)
    most = None if planned else 2
    before = merge(*put(out, lse, begins), most=most, rows=1)
    out[2] = bad
    if np.isnan(bad):
      lse[2] = bad
    after = merge(*put(out, lse, begins), most=most, rows=1)
    assert not np.isfinite(after[0][1]).any()
    for a, b in zip(before, after, strict=True):
      np.testing.assert_array_equal(a[::2], b[::2])
