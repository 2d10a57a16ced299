"""The decode attention cases of `attention.py` and their arrays."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

# Four times the 60 MB L2 cache of an H200, so that no call hits data of an
# earlier call.
COLD_BYTES = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class Case:
  """One attention layer of a decode step.

  Attributes:
    model: the model that has these heads.
    heads: H.
    kv_heads: K.
    head_dim: D.
    batch: B.
    context: tokens of the longest sequence.
    page_size: S.
    dtype: the dtype of the pool.
    ragged: True if lengths follow Zipf's law down from `context`; False if all
      lengths are equal.
    samples: the number of consecutive sequences that share their first pages.
    prefix: tokens of the shared pages, a multiple of the page size.
    value_dim: number of leading elements of a latent that are its value; None
      if there is a pool of values.
    main: True to also time other libraries, which takes most of the time.
  """

  model: str
  heads: int
  kv_heads: int
  head_dim: int
  batch: int
  context: int
  page_size: int = 16
  dtype: str = "bfloat16"
  ragged: bool = False
  samples: int = 1
  prefix: int = 0
  value_dim: int | None = None
  main: bool = False

  @property
  def name(self) -> str:
    """The case's name in a file of results."""
    shape = f"B{self.batch} {'<=' if self.ragged else ''}{self.context}"
    if self.prefix:
      shape += f", {self.samples} share {self.prefix},"
    heads = f"{self.heads}/{self.kv_heads}x{self.head_dim}"
    return f"{self.model} {heads} {shape} page {self.page_size} {self.dtype}"

  def lengths(self) -> np.ndarray:
    """Returns the lengths of sequences in random order, int32[B]."""
    if not self.ragged:
      return np.full(self.batch, self.context, np.int32)
    ranks = 1 + np.arange(self.batch)
    lengths = np.maximum(self.context // ranks, 16)
    return np.random.default_rng(1).permutation(lengths).astype(np.int32)

  def bytes_read(self) -> int:
    """Returns the fewest bytes of K and V, or of latents, to read in a call."""
    width = self.kv_heads * self.head_dim * (1 if self.value_dim else 2)
    shared_tokens = (self.batch - self.batch // self.samples) * self.prefix
    tokens = int(self.lengths().sum()) - shared_tokens
    return tokens * width * jnp.dtype(self.dtype).itemsize


HEADS = (
  ("Llama-3.1-8B", 32, 8, 128),
  ("Llama-3.1-70B", 64, 8, 128),
  ("Qwen2.5-3B", 16, 2, 128),
  ("Llama-2-7B", 32, 32, 128),
  ("Llama-3.2-1B", 32, 8, 64),
)
LATENT = ("DeepSeek-V3", 128, 1, 576)
# The most tokens of a case: 8 GB of K and V for 8 heads of 128 in bfloat16.
MAX_TOKENS = 2**21


def cases(quick: bool) -> list[Case]:
  """Returns the cases to time, the most important first."""
  return quick_cases() if quick else all_cases()


def all_cases() -> list[Case]:
  """Returns all cases, of which eight also time other libraries."""
  first = HEADS[0]
  cases = [
    Case(*first, 64, 4096, main=True),
    Case(*first, 64, 4096, dtype="float8_e4m3fn"),
    Case(*first, 64, 4096, samples=8, prefix=3072),
    Case(*LATENT, 64, 4096, value_dim=512),
    Case(*first, 64, 16_384, ragged=True, main=True),
    Case(*first, 1, 4096, main=True),
    Case(*first, 8, 16_384, main=True),
    Case(*first, 256, 4096, main=True),
    Case(*HEADS[3], 64, 4096, main=True),
    Case(*first, 64, 512, main=True),
    Case(*first, 8, 4096, main=True),
  ]
  cases += [
    Case(*first, batch, context)
    for context in (4096, 512, 16_384, 65_536)
    for batch in (64, 1, 8, 32, 128, 256)
    if batch * context <= MAX_TOKENS
  ]
  cases += [
    Case(*first, batch, 4096, dtype=dtype)
    for dtype in ("float8_e4m3fn", "int8")
    for batch in (64, 8, 256)
  ]
  cases += [
    Case(*first, batch, prefix + 512, samples=samples, prefix=prefix)
    for batch, samples, prefix in (
      (64, 16, 2048),
      (32, 2, 512),
      (256, 64, 4096),
    )
  ]
  cases += [
    Case(*LATENT, batch, context, page_size=64, value_dim=512)
    for batch, context in ((1, 4096), (64, 16_384), (256, 4096))
  ]
  cases += [Case(*first, batch, 4096, page_size=64) for batch in (64, 1, 256)]
  cases += [
    Case(*heads, batch, context)
    for heads in HEADS[1:]
    for batch, context in ((64, 4096), (8, 16_384), (1, 4096))
  ]
  cases += [Case(*first, 128, 32_768, ragged=True, page_size=64)]
  unique: dict[str, Case] = {}
  for case in cases:
    unique.setdefault(case.name, case)
  return list(unique.values())


def quick_cases() -> list[Case]:
  """Returns tiny cases that test the benchmark without an accelerator."""
  return [
    Case("tiny", 8, 2, 64, 2, 128, main=True),
    Case("tiny", 8, 2, 64, 3, 100, ragged=True, page_size=8, dtype="int8"),
    Case("tiny", 8, 2, 64, 16, 528, samples=8, prefix=512),
    Case("tiny", 8, 1, 80, 2, 128, value_dim=64),
  ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrays:
  """A case's arrays. Pages are shuffled over a pool of P pages.

  Attributes:
    q: [B, H, D].
    k_pages: [P, K, S, D].
    v_pages: [P, K, S, D]; the same array as `k_pages` for latents.
    tables: int32[R, B, M], R page tables of M columns. They have no common
      pages, so that R calls read more than COLD_BYTES.
    lengths: int32[B].
  """

  q: jax.Array
  k_pages: jax.Array
  v_pages: jax.Array
  tables: jax.Array
  lengths: jax.Array


def arrays(case: Case, cold_bytes: int = COLD_BYTES) -> Arrays:
  """Draws a case's arrays."""
  # Random numbers, because some hardware multiplies zeros faster.
  rotations = max(1, math.ceil(cold_bytes / max(case.bytes_read(), 1)))
  tables, pages = _tables(case, rotations)
  keys = jax.random.split(jax.random.key(0), 3)
  shape = (pages, case.kv_heads, case.page_size, case.head_dim)
  query = "bfloat16" if jnp.dtype(case.dtype).itemsize == 1 else case.dtype
  k_pages = _draw(keys[1], shape, case.dtype)
  return Arrays(
    q=_draw(keys[0], (case.batch, case.heads, case.head_dim), query),
    k_pages=k_pages,
    v_pages=_draw(keys[2], shape, case.dtype)
    if case.value_dim is None
    else k_pages,
    tables=jnp.asarray(tables),
    lengths=jnp.asarray(case.lengths()),
  )


def _tables(case: Case, rotations: int) -> tuple[np.ndarray, int]:
  """Returns tables of shuffled pages, int32[R, B, M], and the page count."""
  needed = -(-case.lengths() // case.page_size)
  common = case.prefix // case.page_size
  leaders = np.arange(case.batch) // case.samples * case.samples
  shared = leaders != np.arange(case.batch)
  pages = rotations * int((needed - shared * common).sum())
  shuffled = np.random.default_rng(2).permutation(pages).astype(np.int32)
  tables = np.zeros((rotations, case.batch, int(needed.max())), np.int32)
  used = 0
  for rotation in range(rotations):
    for row, count in enumerate(needed):
      start = common if shared[row] else 0
      tables[rotation, row, :start] = tables[rotation, leaders[row], :start]
      stop_page = used + count - start
      tables[rotation, row, start:count] = shuffled[used:stop_page]
      used = stop_page
  return tables, pages


def _draw(key, shape, dtype) -> jax.Array:
  if dtype == "int8":
    return jax.random.randint(key, shape, -127, 128, jnp.int8)
  return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)
