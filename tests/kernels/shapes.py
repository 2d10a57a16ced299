"""Named shapes of kernel tests, and pools for them.

Every pool is poisoned: tokens outside of all sequences, also those past a
sequence's length, are NaN. Table entries past a sequence's pages are garbage.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
NOWHERE = 2**31 - 7  # A table entry without a page.

# The number format of each name.
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_NUMBERS = {
  "float32": np.dtype(np.float32),
  "float16": np.dtype(np.float16),
  "bfloat16": BF16,
  "bits": BF16,
  "int8": np.dtype(np.int8),
  "float8_e4m3fn": _E4M3,
  "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
  "bits8": _E4M3,
}
_BITS = {"bits": np.dtype(np.uint16), "bits8": np.dtype(np.uint8)}
EVERYTHING = {
  "scale": 0.2,
  "window": 37,
  "soft_cap": 30.0,
  "sinks": True,
  "alibi_slopes": True,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """A named attention problem.

  Attributes:
    heads: (H, K).
    head_dim: D.
    page_size: S.
    lengths: tokens of each sequence; those of `edges` by default.
    dtype: the format of the pools, and of queries if it has 16 bits or more;
      "bits" is bfloat16 in uint16, "bits8" float8_e4m3fn in uint8.
    query_dtype: the format of queries to 8-bit pools.
    value_dim: Dv, D if None.
    scales: "token" or "head": the axis of the scales of 8-bit numbers.
    options: keyword arguments of the call; True for `sinks` or `alibi_slopes`
      draws random ones.
  """

  heads: tuple[int, int] = (4, 2)
  head_dim: int = 64
  page_size: int = 16
  lengths: tuple[int, ...] = ()
  dtype: str = "float32"
  query_dtype: str = "float32"
  value_dim: int | None = None
  scales: str | None = None
  options: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if not self.lengths:
      object.__setattr__(self, "lengths", edges(self.page_size))


def edges(size: int) -> tuple[int, ...]:
  """Returns lengths around the edges of a page, and of several."""
  return (0, 1, max(size - 1, 1), size, size + 1, 3 * size + 2, 150)


SHAPES = {
  # page sizes, ratios and head sizes, plain
  "page1_mha_d32": Shape(heads=(2, 2), head_dim=32, page_size=1),
  "page8_mqa_d64": Shape(heads=(8, 1), page_size=8),
  "page16_gqa4_d128": Shape(heads=(8, 2), head_dim=128),
  "page64_gqa8_d64": Shape(heads=(16, 2), page_size=64),
  "page128_above_a_block": Shape(heads=(4, 1), head_dim=32, page_size=128),
  "page24_not_dividing_a_block": Shape(head_dim=32, page_size=24),
  "head_dim_80": Shape(heads=(4, 4), head_dim=80),
  "head_dim_96_values_of_160": Shape(head_dim=96, value_dim=160),
  "page32_gqa2_d256": Shape(head_dim=256, page_size=32),
  # number formats
  "bits_gqa4": Shape(heads=(8, 2), dtype="bits"),
  "bfloat16_mqa": Shape(heads=(4, 1), page_size=8, dtype="bfloat16"),
  "bfloat16_page128_d256": Shape(head_dim=256, page_size=128, dtype="bfloat16"),
  "bfloat16_page64_d192": Shape(head_dim=192, page_size=64, dtype="bfloat16"),
  "float16_gqa8": Shape(heads=(8, 1), head_dim=128, dtype="float16"),
  "int8_scale_per_token": Shape(
    heads=(8, 2), dtype="int8", query_dtype="bfloat16", scales="token"
  ),
  "int8_scale_per_head": Shape(
    heads=(8, 2), head_dim=128, page_size=8, dtype="int8", scales="head"
  ),
  "e4m3_scale_per_token": Shape(
    heads=(4, 1), dtype="float8_e4m3fn", query_dtype="bfloat16", scales="token"
  ),
  "e4m3_bits_scale_per_head": Shape(
    heads=(8, 2), dtype="bits8", query_dtype="bfloat16", scales="head"
  ),
  "e4m3_scale_per_head_d128": Shape(
    head_dim=128,
    page_size=8,
    dtype="float8_e4m3fn",
    query_dtype="bfloat16",
    scales="head",
  ),
  "e5m2_without_scale": Shape(dtype="float8_e5m2", query_dtype="float16"),
  # options, alone and together
  "scale": Shape(options={"scale": 0.3}),
  "window1": Shape(head_dim=32, page_size=8, options={"window": 1}),
  "window20": Shape(options={"window": 20}),
  "window_without_short_rows": Shape(
    head_dim=32, lengths=(300, 290, 333), options={"window": 33}
  ),
  "soft_cap1": Shape(head_dim=32, page_size=8, options={"soft_cap": 1.0}),
  "soft_cap50_bits": Shape(dtype="bits", options={"soft_cap": 50.0}),
  "sinks": Shape(heads=(8, 2), options={"sinks": True}),
  "alibi": Shape(heads=(8, 2), options={"alibi_slopes": True}),
  "everything": Shape(heads=(8, 2), options=EVERYTHING),
  "everything_int8": Shape(
    heads=(8, 2),
    dtype="int8",
    query_dtype="bfloat16",
    scales="token",
    options=EVERYTHING,
  ),
  "everything_bfloat16_d128": Shape(
    heads=(8, 2), head_dim=128, dtype="bfloat16", options=EVERYTHING
  ),
  "everything_int8_d128": Shape(
    heads=(4, 1),
    head_dim=128,
    page_size=32,
    dtype="int8",
    query_dtype="bfloat16",
    scales="token",
    options=EVERYTHING,
  ),
  "everything_bits": Shape(
    heads=(8, 1), head_dim=32, page_size=8, dtype="bits", options=EVERYTHING
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
    """The arguments of every attention function after its queries."""
    return self.k_pages, self.v_pages, self.page_table


def problem(shape: Shape, *, seed: int = 0, poison: float = np.nan) -> Problem:
  """Draws sequences in random pages of a poisoned pool.

  int8 has no NaN; its scales are poisoned instead, if it has scales.
  """
  rng = np.random.default_rng(seed)
  page_size = shape.page_size
  lengths = np.asarray(shape.lengths, np.int32)
  needed = -(-lengths // page_size)
  num_pages = int(needed.sum()) + 3
  free = list(rng.permutation(num_pages))
  table = np.full((len(lengths), int(needed.max()) + 1), NOWHERE, np.int32)
  table[::2] = -5
  mask = np.zeros((num_pages, page_size), bool)
  for b, length in enumerate(lengths):
    for column in range(needed[b]):
      page = table[b, column] = free.pop()
      mask[page, : min(page_size, length - column * page_size)] = True
  dtype = _NUMBERS[shape.dtype]
  dims = (shape.head_dim, shape.value_dim or shape.head_dim)
  pools = [_pool(rng, shape, dtype, dim, mask, poison) for dim in dims]
  k_pages, v_pages = (
    pool.view(_BITS.get(shape.dtype, dtype)) for pool in pools
  )
  return Problem(
    k_pages=k_pages,
    v_pages=v_pages,
    page_table=table,
    lengths=lengths,
    options=_draw_options(rng, shape, mask, poison),
    dtype=_NUMBERS[shape.query_dtype] if dtype.itemsize == 1 else dtype,
  )


def _pool(rng, shape, dtype, dim, mask, poison) -> np.ndarray:
  """Returns [P, K, S, dim], random where `mask` bool[P, S], else poison."""
  kv_heads = shape.heads[1]
  tokens = rng.standard_normal((*mask.shape, kv_heads, dim))
  if dtype == np.int8:
    tokens = np.clip(np.round(tokens * 40), -127, 127)
    poison = 127
  tokens = np.where(mask[:, :, None, None], tokens, poison)
  with np.errstate(invalid="ignore"):
    return np.ascontiguousarray(tokens.swapaxes(1, 2).astype(dtype))


def _draw_options(rng, shape, mask, poison) -> dict[str, Any]:
  heads, kv_heads = shape.heads
  options = dict(shape.options)
  if options.get("sinks"):
    options["sinks"] = rng.standard_normal(heads).astype(np.float32)
  if options.get("alibi_slopes"):
    options["alibi_slopes"] = 2.0 ** -np.arange(1, heads + 1, dtype=np.float32)
  small = 0.025 if shape.dtype == "int8" else 1.0
  for name in ("k_scale", "v_scale") if shape.scales else ():
    if shape.scales == "head":
      factors = rng.uniform(0.5, 2, kv_heads)
    else:
      factors = rng.uniform(0.5, 2, (mask.shape[0], kv_heads, mask.shape[1]))
      factors = np.where(mask[:, None], factors, poison)
    options[name] = (small * factors).astype(np.float32)
  return options


def queries(case: Problem, shape: Shape, *leading: int, seed: int = 1):
  """Draws queries [*leading, H, D]."""
  rng = np.random.default_rng(seed)
  values = rng.standard_normal((*leading, shape.heads[0], shape.head_dim))
  return values.astype(case.dtype)


def put(*arrays):
  """Converts NumPy arrays to jax arrays."""
  return tuple(jnp.asarray(array) for array in arrays)


def assert_matches(
  out, lse, expected, expected_lse, dtype, float32_l2=1e-6
) -> None:
  """Compares with the reference, at the tolerance of the number format."""
  out = np.asarray(out).astype(np.float64)
  # Relative L2 error, largest error relative to the largest value, and largest
  # error of lse. The largest values drawn are 4 to 6 in every format. 4 is used
  # for all, so that no test is easier for its values.
  # Rounding the output alone is 2^-9 (bfloat16) and 2^-12 (float16) relative.
  l2, largest, lse_error = {
    "float32": (float32_l2, 1e-5, 1e-5),
    "bfloat16": (4e-3, 2e-2, 1e-3),
    "float16": (1e-3, 5e-3, 1e-3),
  }[np.dtype(dtype).name]
  assert out.shape == expected.shape
  assert np.isfinite(out).all()
  error = np.linalg.norm(out - expected)
  assert error <= l2 * np.linalg.norm(expected), error
  np.testing.assert_allclose(out, expected, rtol=0, atol=largest * 4)
  np.testing.assert_allclose(np.asarray(lse), expected_lse, atol=lse_error)
