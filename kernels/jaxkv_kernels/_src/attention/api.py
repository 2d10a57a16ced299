"""The public attention functions: they check arguments and choose a backend.

| function | queries |
|---|---|
| `paged_decode` | one per sequence: `[B, H, D]` |
| `paged_attention_padded` | a rectangle, padded on the right: `[B, T, H, D]` |
| `paged_attention` | packed one sequence after another: `[T, H, D]` |
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv_kernels._src import check
from jaxkv_kernels._src.attention import query_packing
from jaxkv_kernels._src.attention.choose import choose_backend
from jaxkv_kernels._src.attention.choose import decode
from jaxkv_kernels._src.attention.decode_plan import DecodePlan
from jaxkv_kernels._src.attention.options import checked


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
  alibi_slopes: jax.Array | None = None,
  k_scale: jax.Array | None = None,
  v_scale: jax.Array | None = None,
  plan: DecodePlan | None = None,
  return_lse: bool = False,
  backend: str = "auto",
  interpret: Any = False,
) -> Any:
  """Attention of one query per sequence over its pages.

  The query is the last of its sequence's tokens, whose key and value are
  already in the pool. Logits, softmax and sums are float32. Pages that the
  sequence does not use, slots past its length and pages behind its window may
  hold anything, NaN included, and so may their scales. Page ids are clamped to
  the pool, so a table entry that is not used may be any number; an entry that
  is used and names no page of the pool is the caller's error and reads some
  other page. Tokens past the table's M * S do not exist; windows and ALiBi
  still count from the query's position.

  Args:
    q: [B, H, D], float32, bfloat16 or float16.
    k_pages: [P, K, S, D], in one of the formats of `formats`. H is a multiple
      of K; query head h reads K/V head h // (H // K).
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
    alibi_slopes: float[H]; a query at position p adds slope * (j - p) to its
      logit with the key at j, after the soft cap.
    k_scale: what the pool's keys are to be multiplied by: float32[K], a factor
      a head, or float32[P, K, S], one a token and head. None: by nothing.
    v_scale: the same for values.
    plan: of `plan_decode`, once for all layers; for backends that use it. It
      says how the work is cut: with one for other lengths the result is right.
    return_lse: also return the log-sum-exp (natural log, sink included).
    backend: "auto", or the name of one; see `attention.backends`.
    interpret: run a Pallas backend, named with `backend`, in its interpreter:
      True, or the interpreter's parameters.

  Returns:
    [B, H, Dv] in q's dtype, and float32[B, H] with `return_lse`. A sequence
    of length 0 gives zeros and a log-sum-exp of -inf (its sink, with sinks).

  Raises:
    ValueError: an argument has a shape, dtype or value that is not supported.
    NotImplementedError: there is no such backend, or it does not serve.

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
  check.beside("q", q, page_table=page_table, lengths=lengths)
  options = checked(
    q,
    k_pages,
    v_pages,
    page_offset=page_offset,
    scale=scale,
    soft_cap=soft_cap,
    window=window,
    sinks=sinks,
    alibi_slopes=alibi_slopes,
    k_scale=k_scale,
    v_scale=v_scale,
    plan=plan,
    interpret=interpret,
  )
  chosen = choose_backend("paged_decode", backend, q, k_pages, v_pages, options)
  out, lse = decode(chosen, q, k_pages, v_pages, page_table, lengths, options)
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
  alibi_slopes: jax.Array | None = None,
  k_scale: jax.Array | None = None,
  v_scale: jax.Array | None = None,
  tree_mask: jax.Array | None = None,
  return_lse: bool = False,
  backend: str = "auto",
  interpret: Any = False,
) -> Any:
  """Causal attention of a rectangle of queries over their sequences' pages.

  Row b holds `counts[b]` queries, at positions `starts[b]`, `starts[b] + 1`
  ...; their keys and values are already in the pool. The columns after them
  are padding. Otherwise as `paged_decode`, whose case T = 1 is.

  With a tree mask the queries of a row are the nodes of a tree of drafted
  tokens, parents before children, one slot after the other. Windows and ALiBi
  still count slots, not the depth in the tree. A node that no query sees may
  hold anything, NaN included; one that some query of its sequence sees may not.

  Args:
    q: [B, T, H, D], float32, bfloat16 or float16.
    k_pages: [P, K, S, D], as for `paged_decode`.
    v_pages: [P, K, S, Dv], same dtype.
    page_table: int32[B, M], page ids in sequence order.
    starts: int32[B], position of row b's first query.
    counts: int32[B], queries in row b, 0..T; 0 for an idle row.
    page_offset: as for `paged_decode`, like all up to `v_scale`.
    scale: factor of the logits; 1 / sqrt(D) if None.
    soft_cap: c > 0 turns a logit x into c * tanh(x / c).
    window: a query at position p sees positions p - window + 1 .. p.
    sinks: float[H], one logit per head without a value.
    alibi_slopes: float[H].
    k_scale: float32[K] or float32[P, K, S].
    v_scale: float32[K] or float32[P, K, S].
    tree_mask: bool[B, T, N], N usually T: query t of row b sees the key at
      position `starts[b] + j`, j < N, only if `tree_mask[b, t, j]` (itself
      included: its own diagonal says whether it does), and j <= t as ever;
      earlier keys as usual.
    return_lse: also return the log-sum-exp (natural log, sink included).
    backend: "auto", or the name of one.
    interpret: as for `paged_decode`.

  Returns:
    [B, T, H, Dv] in q's dtype, and float32[B, T, H] with `return_lse`.
    Padding gives zeros and -inf.

  Raises:
    ValueError: an argument has a shape, dtype or value that is not supported.
    NotImplementedError: there is no such backend, or it does not serve.
  """
  check.queries("q", q, "BTHD")
  check.pools(q, k_pages, v_pages)
  check.table(page_table, q.shape[0])
  check.vector("starts", starts, q.shape[0])
  check.vector("counts", counts, q.shape[0])
  check.beside("q", q, page_table=page_table, starts=starts, counts=counts)
  check.tree_mask(tree_mask, q.shape[:2])
  options = checked(
    q,
    k_pages,
    v_pages,
    page_offset=page_offset,
    scale=scale,
    soft_cap=soft_cap,
    window=window,
    sinks=sinks,
    alibi_slopes=alibi_slopes,
    k_scale=k_scale,
    v_scale=v_scale,
    tree_mask=tree_mask,
    tree_starts=None if tree_mask is None else starts,
    interpret=interpret,
  )
  chosen = choose_backend(
    "paged_attention_padded", backend, q, k_pages, v_pages, options
  )
  out, lse = chosen.attend(
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
  alibi_slopes: jax.Array | None = None,
  k_scale: jax.Array | None = None,
  v_scale: jax.Array | None = None,
  tree_mask: jax.Array | None = None,
  return_lse: bool = False,
  backend: str = "auto",
  interpret: Any = False,
) -> Any:
  """Causal attention of packed queries: prompts, chunks and single tokens.

  Rows `cu_q_lens[b]:cu_q_lens[b + 1]` of q are the last tokens of sequence
  b's `kv_lens[b]`. They are cut into tiles of at most 32 queries, so the work
  follows T and B, not B times the longest. Otherwise as
  `paged_attention_padded`.

  Args:
    q: [T, H, D], float32, bfloat16 or float16.
    k_pages: [P, K, S, D], as for `paged_decode`.
    v_pages: [P, K, S, Dv], same dtype.
    page_table: int32[B, M], page ids in sequence order.
    kv_lens: int32[B], tokens of each sequence, its queries included.
    cu_q_lens: int32[B + 1], ascending from 0.
    max_query_len: the most queries of one sequence, T if None; a query past
      it gives zeros and -inf. Say 1 when all sequences decode.
    page_offset: as for `paged_decode`, like all up to `v_scale`.
    scale: factor of the logits; 1 / sqrt(D) if None.
    soft_cap: c > 0 turns a logit x into c * tanh(x / c).
    window: a query at position p sees positions p - window + 1 .. p.
    sinks: float[H], one logit per head without a value.
    alibi_slopes: float[H].
    k_scale: float32[K] or float32[P, K, S].
    v_scale: float32[K] or float32[P, K, S].
    tree_mask: bool[T, N]: row t of q sees the key of the j-th query of its own
      sequence, j < N, only if `tree_mask[t, j]`, and never a later one than
      its own; earlier keys as usual. All true for a row that is in no tree.
    return_lse: also return the log-sum-exp (natural log, sink included).
    backend: "auto", or the name of one.
    interpret: as for `paged_decode`.

  Returns:
    [T, H, Dv] in q's dtype, and float32[T, H] with `return_lse`. Rows from
    `cu_q_lens[-1]` on give zeros and -inf.

  Raises:
    ValueError: an argument has a shape, dtype or value that is not supported.
    NotImplementedError: there is no such backend, or it does not serve.
  """
  check.queries("q", q, "THD")
  check.pools(q, k_pages, v_pages)
  _check_runs(q, page_table, kv_lens, cu_q_lens)
  check.tree_mask(tree_mask, q.shape[:1])
  check.beside("q", q, tree_mask=tree_mask)
  longest = check.max_query_len(max_query_len, q.shape[0])
  options = checked(
    q,
    k_pages,
    v_pages,
    page_offset=page_offset,
    scale=scale,
    soft_cap=soft_cap,
    window=window,
    sinks=sinks,
    alibi_slopes=alibi_slopes,
    k_scale=k_scale,
    v_scale=v_scale,
    interpret=interpret,
  )
  kv_lens, cu_q_lens = jnp.asarray(kv_lens), jnp.asarray(cu_q_lens)
  tiles = query_packing.tile(kv_lens, cu_q_lens, q.shape[0], longest)
  if tree_mask is not None:
    options = dataclasses.replace(
      options,
      tree_mask=query_packing.pack(tree_mask, tiles),
      tree_starts=tiles.run_starts,
    )
  rows = query_packing.pack(q, tiles)
  table = jnp.take(page_table, tiles.sequences, axis=0, mode="clip")
  chosen = choose_backend(
    "paged_attention", backend, rows, k_pages, v_pages, options
  )
  out, lse = chosen.attend(
    rows, k_pages, v_pages, table, tiles.starts, tiles.counts, options
  )
  out, lse = query_packing.unpack(out, lse, tiles)
  out = out.astype(q.dtype)
  return (out, lse) if return_lse else out


def _check_runs(
  q: jax.Array,
  page_table: jax.Array,
  kv_lens: jax.Array,
  cu_q_lens: jax.Array,
) -> None:
  """What says whose queries the rows of a packed q are."""
  check.table(page_table, None)
  check.vector("kv_lens", kv_lens, page_table.shape[0])
  check.vector("cu_q_lens", cu_q_lens, page_table.shape[0] + 1)
  check.beside(
    "q", q, page_table=page_table, kv_lens=kv_lens, cu_q_lens=cu_q_lens
  )
