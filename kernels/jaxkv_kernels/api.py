"""The public attention functions: they check arguments and choose a backend.

| function | queries |
|---|---|
| `paged_decode` | one per sequence: `[B, H, D]` |
| `paged_attention_padded` | a rectangle, padded on the right: `[B, T, H, D]` |
| `paged_attention` | packed one sequence after another: `[T, H, D]` |
"""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv_kernels import check
from jaxkv_kernels import ragged
from jaxkv_kernels import xla
from jaxkv_kernels.options import Options


class Backend(NamedTuple):
  """The two entry points of a backend; `xla` shows their signatures."""

  decode: Callable[..., tuple[jax.Array, jax.Array]]
  padded: Callable[..., tuple[jax.Array, jax.Array]]


_TABLE = {"xla": Backend(decode=xla.decode, padded=xla.padded)}

BACKENDS = ("auto", *_TABLE)


def paged_decode(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  page_table: jax.Array,
  lengths: jax.Array,
  *,
  page_offset: jax.Array | int = 0,
  scale: jax.Array | float | None = None,
  soft_cap: float | None = None,
  window: jax.Array | int | None = None,
  sinks: jax.Array | None = None,
  return_lse: bool = False,
  backend: str = "auto",
) -> Any:
  """Attention of one query per sequence over its pages.

  The query is the last of its sequence's tokens, whose key and value are
  already in the pool. Logits, softmax and sums are float32. Pages that the
  sequence does not use, slots past its length and pages behind its window may
  hold anything, NaN included. Page ids are clamped to the pool, so a table
  entry that is not used may be any number; an entry that is used and names no
  page of the pool is the caller's error and reads some other page. Tokens
  past the table's M * S do not exist.

  Args:
    q: [B, H, D], float32, bfloat16 or float16.
    k_pages: [P, K, S, D], float32, bfloat16, float16, or uint16 for bfloat16
      bits. H is a multiple of K; query head h reads K/V head h // (H // K).
    v_pages: [P, K, S, Dv], same dtype.
    page_table: int32[B, M], page ids in sequence order.
    lengths: int32[B], tokens of each sequence, the query's own included.
    page_offset: int32[], added to every page id: layer * pages per layer
      where the layers share one pool.
    scale: factor of the logits; 1 / sqrt(D) if None.
    soft_cap: c > 0 turns a logit x into c * tanh(x / c).
    window: a query at position p sees positions p - window + 1 .. p; a traced
      int32[] will do.
    sinks: float[H], one logit per head that joins the softmax's denominator
      and has no value.
    return_lse: also return the log-sum-exp (natural log, sink included).
    backend: one of `BACKENDS`.

  Returns:
    [B, H, Dv] in q's dtype, and float32[B, H] with `return_lse`. A sequence
    of length 0 gives zeros and a log-sum-exp of -inf (its sink, with sinks).

  Raises:
    ValueError: an argument has a shape, dtype or value that is not supported.
    NotImplementedError: there is no such backend.

  Examples:
    >>> import jax.numpy as jnp
    >>> k_pages = jnp.zeros((9, 2, 4, 8))
    >>> v_pages = jnp.ones((9, 2, 4, 8))
    >>> table = jnp.asarray([[3, 7], [5, 0]], jnp.int32)
    >>> out = paged_decode(
    ...   jnp.ones((2, 6, 8)),
    ...   k_pages,
    ...   v_pages,
    ...   table,
    ...   jnp.asarray([5, 2], jnp.int32),
    ... )
    >>> out.shape, float(out.min())
    ((2, 6, 8), 1.0)
  """
  check.queries("q", q, "BHD")
  check.pools(q, k_pages, v_pages)
  check.table(page_table, q.shape[0])
  check.vector("lengths", lengths, q.shape[0])
  options = _options(q, page_offset, scale, soft_cap, window, sinks)
  out, lse = _choose(backend).decode(
    q, k_pages, v_pages, page_table, lengths, options
  )
  out = out.astype(q.dtype)
  return (out, lse) if return_lse else out


def paged_attention_padded(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  page_table: jax.Array,
  starts: jax.Array,
  counts: jax.Array,
  *,
  page_offset: jax.Array | int = 0,
  scale: jax.Array | float | None = None,
  soft_cap: float | None = None,
  window: jax.Array | int | None = None,
  sinks: jax.Array | None = None,
  return_lse: bool = False,
  backend: str = "auto",
) -> Any:
  """Causal attention of a rectangle of queries over their sequences' pages.

  Row b holds `counts[b]` queries, at positions `starts[b]`, `starts[b] + 1`
  ...; their keys and values are already in the pool. The columns after them
  are padding. Otherwise as `paged_decode`, whose case T = 1 is.

  Args:
    q: [B, T, H, D], float32, bfloat16 or float16.
    k_pages: [P, K, S, D], as for `paged_decode`.
    v_pages: [P, K, S, Dv], same dtype.
    page_table: int32[B, M], page ids in sequence order.
    starts: int32[B], position of row b's first query.
    counts: int32[B], queries in row b, 0..T; 0 for an idle row.
    page_offset: int32[], added to every page id.
    scale: factor of the logits; 1 / sqrt(D) if None.
    soft_cap: c > 0 turns a logit x into c * tanh(x / c).
    window: a query at position p sees positions p - window + 1 .. p.
    sinks: float[H], one logit per head without a value.
    return_lse: also return the log-sum-exp (natural log, sink included).
    backend: one of `BACKENDS`.

  Returns:
    [B, T, H, Dv] in q's dtype, and float32[B, T, H] with `return_lse`.
    Padding gives zeros and -inf.

  Raises:
    ValueError: an argument has a shape, dtype or value that is not supported.
    NotImplementedError: there is no such backend.
  """
  check.queries("q", q, "BTHD")
  check.pools(q, k_pages, v_pages)
  check.table(page_table, q.shape[0])
  check.vector("starts", starts, q.shape[0])
  check.vector("counts", counts, q.shape[0])
  options = _options(q, page_offset, scale, soft_cap, window, sinks)
  out, lse = _choose(backend).padded(
    q, k_pages, v_pages, page_table, starts, counts, options
  )
  out = out.astype(q.dtype)
  return (out, lse) if return_lse else out


def paged_attention(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  page_table: jax.Array,
  kv_lens: jax.Array,
  cu_q_lens: jax.Array,
  *,
  max_query_len: int | None = None,
  page_offset: jax.Array | int = 0,
  scale: jax.Array | float | None = None,
  soft_cap: float | None = None,
  window: jax.Array | int | None = None,
  sinks: jax.Array | None = None,
  return_lse: bool = False,
  backend: str = "auto",
) -> Any:
  """Causal attention of packed queries: prompts, chunks and single tokens.

  Rows `cu_q_lens[b]:cu_q_lens[b + 1]` of q are the last tokens of sequence
  b's `kv_lens[b]`. They are cut into tiles of at most 32 queries, so the work
  follows T and B, not B times the longest. Otherwise as `paged_decode`.

  Args:
    q: [T, H, D], float32, bfloat16 or float16.
    k_pages: [P, K, S, D], as for `paged_decode`.
    v_pages: [P, K, S, Dv], same dtype.
    page_table: int32[B, M], page ids in sequence order.
    kv_lens: int32[B], tokens of each sequence, its queries included.
    cu_q_lens: int32[B + 1], ascending from 0.
    max_query_len: the most queries of one sequence, T if None; a query past
      it gives zeros and -inf. Say 1 when all sequences decode.
    page_offset: int32[], added to every page id.
    scale: factor of the logits; 1 / sqrt(D) if None.
    soft_cap: c > 0 turns a logit x into c * tanh(x / c).
    window: a query at position p sees positions p - window + 1 .. p.
    sinks: float[H], one logit per head without a value.
    return_lse: also return the log-sum-exp (natural log, sink included).
    backend: one of `BACKENDS`.

  Returns:
    [T, H, Dv] in q's dtype, and float32[T, H] with `return_lse`. Rows from
    `cu_q_lens[-1]` on give zeros and -inf.

  Raises:
    ValueError: an argument has a shape, dtype or value that is not supported.
    NotImplementedError: there is no such backend.
  """
  check.queries("q", q, "THD")
  check.pools(q, k_pages, v_pages)
  batch = page_table.shape[0]
  check.table(page_table, batch)
  check.vector("kv_lens", kv_lens, batch)
  check.vector("cu_q_lens", cu_q_lens, batch + 1)
  longest = check.max_query_len(max_query_len, q.shape[0])
  options = _options(q, page_offset, scale, soft_cap, window, sinks)
  tiles = ragged.tile(kv_lens, cu_q_lens, q.shape[0], longest)
  out, lse = _choose(backend).padded(
    ragged.pack(q, tiles),
    k_pages,
    v_pages,
    jnp.take(page_table, tiles.sequences, axis=0, mode="clip"),
    tiles.starts,
    tiles.counts,
    options,
  )
  out, lse = ragged.unpack(out, lse, tiles)
  out = out.astype(q.dtype)
  return (out, lse) if return_lse else out


def _options(q, page_offset, scale, soft_cap, window, sinks) -> Options:
  check.options(page_offset, scale, soft_cap, window, sinks, q.shape[-2])
  return Options(
    page_offset=jnp.asarray(page_offset, jnp.int32),
    scale=q.shape[-1] ** -0.5 if scale is None else scale,
    soft_cap=soft_cap,
    window=window,
    sinks=sinks,
  )


def _choose(backend: str) -> Backend:
  if backend == "auto":
    backend = "xla"
  if backend not in _TABLE:
    raise NotImplementedError(
      f"backend={backend!r} does not exist; there are {', '.join(BACKENDS)}"
    )
  return _TABLE[backend]
