"""Named shapes for the kernel tests, and pools built from them.

Every pool is poisoned: whatever no sequence owns, slots past a length
included, holds NaN, and table entries past a sequence's pages hold garbage.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
NOWHERE = 2**31 - 7  # what a table holds where there is no page


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """One named attention problem.

  Attributes:
    heads: (H, K).
    head_dim: D.
    page_size: S.
    lengths: tokens of each sequence.
    dtype: number format; "bits" is bfloat16 in uint16.
    options: keyword arguments of the call; `sinks=True` draws some.
  """

  heads: tuple[int, int]
  head_dim: int
  page_size: int
  lengths: tuple[int, ...]
  dtype: str = "float32"
  options: dict[str, Any] = dataclasses.field(default_factory=dict)


def edges(size: int) -> tuple[int, ...]:
  """Lengths around the edges of a page, and of several."""
  return (0, 1, max(size - 1, 1), size, size + 1, 3 * size + 2, 150)


SHAPES = {
  # page sizes, ratios and head sizes, plain
  "page1_mha_d32": Shape(
    heads=(2, 2), head_dim=32, page_size=1, lengths=edges(1)
  ),
  "page8_mqa_d64": Shape(
    heads=(8, 1), head_dim=64, page_size=8, lengths=edges(8)
  ),
  "page16_gqa4_d128": Shape(
    heads=(8, 2), head_dim=128, page_size=16, lengths=edges(16)
  ),
  "page64_gqa8_d64": Shape(
    heads=(16, 2), head_dim=64, page_size=64, lengths=edges(64)
  ),
  "page128_above_a_block": Shape(
    heads=(4, 1), head_dim=32, page_size=128, lengths=edges(128)
  ),
  "page24_not_dividing_a_block": Shape(
    heads=(4, 2), head_dim=32, page_size=24, lengths=edges(24)
  ),
  "head_dim_80": Shape(
    heads=(4, 4), head_dim=80, page_size=16, lengths=edges(16)
  ),
  # number formats
  "bits_gqa4": Shape(
    heads=(8, 2), head_dim=64, page_size=16, lengths=edges(16), dtype="bits"
  ),
  "bfloat16_mqa": Shape(
    heads=(4, 1), head_dim=64, page_size=8, lengths=edges(8), dtype="bfloat16"
  ),
  "float16_gqa8": Shape(
    heads=(8, 1), head_dim=128, page_size=16, lengths=edges(16), dtype="float16"
  ),
  # options, alone and together
  "scale": Shape(
    heads=(4, 2),
    head_dim=64,
    page_size=16,
    lengths=edges(16),
    options={"scale": 0.3},
  ),
  "window1": Shape(
    heads=(4, 2),
    head_dim=32,
    page_size=8,
    lengths=edges(8),
    options={"window": 1},
  ),
  "window20": Shape(
    heads=(4, 2),
    head_dim=64,
    page_size=16,
    lengths=edges(16),
    options={"window": 20},
  ),
  "window_without_short_rows": Shape(
    heads=(4, 2),
    head_dim=32,
    page_size=16,
    lengths=(300, 290, 333),
    options={"window": 33},
  ),
  "soft_cap1": Shape(
    heads=(4, 2),
    head_dim=32,
    page_size=8,
    lengths=edges(8),
    options={"soft_cap": 1.0},
  ),
  "soft_cap50_bits": Shape(
    heads=(4, 2),
    head_dim=64,
    page_size=16,
    lengths=edges(16),
    dtype="bits",
    options={"soft_cap": 50.0},
  ),
  "sinks": Shape(
    heads=(8, 2),
    head_dim=64,
    page_size=16,
    lengths=edges(16),
    options={"sinks": True},
  ),
  "everything": Shape(
    heads=(8, 2),
    head_dim=64,
    page_size=16,
    lengths=edges(16),
    options={"scale": 0.2, "window": 37, "soft_cap": 30.0, "sinks": True},
  ),
  "everything_bits": Shape(
    heads=(8, 1),
    head_dim=32,
    page_size=8,
    lengths=edges(8),
    dtype="bits",
    options={"scale": 0.2, "window": 37, "soft_cap": 30.0, "sinks": True},
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
  """A shape with its arrays, all NumPy."""

  k_pages: np.ndarray  # [P, K, S, D]
  v_pages: np.ndarray  # [P, K, S, D]
  page_table: np.ndarray  # int32[B, M]
  lengths: np.ndarray  # int32[B]
  options: dict[str, Any]
  dtype: np.dtype  # of queries

  @property
  def pools(self):
    """What every attention function takes after its queries."""
    return self.k_pages, self.v_pages, self.page_table


def problem(shape: Shape, *, seed: int = 0, poison: float = np.nan) -> Problem:
  """Random sequences in randomly chosen pages of a poisoned pool."""
  rng = np.random.default_rng(seed)
  heads, kv_heads = shape.heads
  size, dim = shape.page_size, shape.head_dim
  lengths = np.asarray(shape.lengths, np.int32)
  needed = -(-lengths // size)
  columns = int(needed.max()) + 1
  total = int(needed.sum()) + 3
  dtype = BF16 if shape.dtype in ("bits", "bfloat16") else np.dtype(shape.dtype)
  pools = [np.full((total, kv_heads, size, dim), poison, dtype) for _ in "kv"]
  free = list(rng.permutation(total))
  table = np.full((len(lengths), columns), NOWHERE, np.int32)
  table[::2] = -5
  for b, length in enumerate(lengths):
    for column in range(needed[b]):
      page = table[b, column] = free.pop()
      filled = min(size, length - column * size)
      for pool in pools:
        tile = rng.standard_normal((kv_heads, filled, dim))
        pool[page, :, :filled] = tile.astype(dtype)
  options = dict(shape.options)
  if options.get("sinks"):
    options["sinks"] = rng.standard_normal(heads).astype(np.float32)
  if shape.dtype == "bits":
    pools = [pool.view(np.uint16) for pool in pools]
  return Problem(
    k_pages=pools[0],
    v_pages=pools[1],
    page_table=table,
    lengths=lengths,
    options=options,
    dtype=dtype,
  )


def queries(case: Problem, shape: Shape, *leading: int, seed: int = 1):
  """Random queries [*leading, H, D]."""
  rng = np.random.default_rng(seed)
  values = rng.standard_normal((*leading, shape.heads[0], shape.head_dim))
  return values.astype(case.dtype)


def put(*arrays):
  """NumPy arrays as jax arrays."""
  return tuple(jnp.asarray(array) for array in arrays)


def assert_matches(out, lse, wanted, wanted_lse, dtype) -> None:
  """Compares with the definition, at the tolerance of the number format."""
  out = np.asarray(out).astype(np.float64)
  # Relative L2 over everything, largest error as a share of the largest value
  # (4 or so for normal draws), and largest error of lse. Rounding the output
  # alone is 2^-9 (bfloat16) and 2^-12 (float16) relative.
  l2, largest, lse_error = {
    "float32": (1e-6, 1e-5, 1e-5),
    "bfloat16": (4e-3, 2e-2, 1e-3),
    "float16": (1e-3, 5e-3, 1e-3),
  }[np.dtype(dtype).name]
  assert out.shape == wanted.shape
  assert np.isfinite(out).all()
  error = np.linalg.norm(out - wanted)
  assert error <= l2 * np.linalg.norm(wanted), error
  np.testing.assert_allclose(out, wanted, rtol=0, atol=largest * 4)
  np.testing.assert_allclose(np.asarray(lse), wanted_lse, atol=lse_error)
