"""The public functions of paged attention over keys and values, or latents.

| function | queries |
|---|---|
| `paged_decode` | one for each sequence: `[B, H, D]` |
| `paged_attention_padded` | a rectangle, padded on the right: `[B, T, H, D]` |
| `paged_attention` | packed one sequence after another: `[T, H, D]` |

The docstring of the package `attention` defines the letters.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv_kernels._src import check
from jaxkv_kernels._src.attention import calls
from jaxkv_kernels._src.attention import query_packing
from jaxkv_kernels._src.attention.choose import choose_backend
from jaxkv_kernels._src.attention.options import AttentionCall
from jaxkv_kernels._src.attention.options import AttentionOptions
from jaxkv_kernels._src.attention.options import CallOptions
from jaxkv_kernels._src.attention.options import as_options
from jaxkv_kernels._src.attention.options import check_options


def paged_decode(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array | None,
  page_table: jax.Array,
  lengths: jax.Array,
  *,
  value_dim: int | None = None,
  options: AttentionOptions | None = None,
  page_offset: jax.Array | int = 0,
  backend: str = "auto",
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """Computes attention of one query per sequence over the sequence's pages.

  The query belongs to the last token of its sequence. Write that token's key
  and value first. Logits, softmax and sums are float32. Unused pages, offsets
  past a sequence's length and tokens before its window can contain any values,
  including NaN, and so can their scales. Page ids are clamped to the pool. So
  an unused table entry can be any number, but a used entry out of range reads
  the wrong page. If a sequence is longer than M * S tokens, its query sees no
  keys past position M * S - 1, but windows and ALiBi still count from the
  query's position.

  Latents. Multi-head latent attention (DeepSeek-V2, section 2.1) stores one
  vector for each token: its compressed representation, followed by the rotary
  part of its key, such as 512 + 64 elements. The whole vector is the key, the
  compressed part is the value, and all heads read the same vector. Queries must
  be absorbed: multiply the part without rotary embedding by the up-projection
  of the keys, and append the rotary part. Multiply the output by the
  up-projection of the values. Only the backends `triton` and `xla` support
  latents.

  Args:
    q: [B, H, D], float32, bfloat16 or float16: B sequences, H heads of D
      elements.
    k_pages: [N, K, S, D], N pages of S tokens, in a dtype that `logical_dtype`
      lists. H is a multiple of K; query head h reads K/V head h // (H // K).
    v_pages: [N, K, S, Dv], same dtype; None for latents, for which K is 1.
    page_table: int32[B, M], each sequence's page ids in the order of tokens.
    lengths: int32[B], tokens of each sequence, including the query's token.
    value_dim: Dv of latents, the size of the compressed part, such as 512.
    options: `tree_mask` must be None. For latents, `scale` is required, because
      it depends on the head size of the queries before absorption, such as
      1 / sqrt(128 + 64). They support neither `sinks` nor `alibi_slopes`, and
      `k_scale` also dequantizes their values.
    page_offset: int32[], added to every page id. If layers share one pool, pass
      the layer's index times the number of pages of a layer.
    backend: one of `BACKENDS`.
    interpret: True, or parameters of a Pallas interpreter, to run the kernel in
      the interpreter. `backend` must then name a Pallas backend.

  Returns:
    [B, H, Dv] in q's dtype, and float32[B, H], log-sum-exps (natural log,
    including the sinks). A sequence of length 0 gives zeros; its log-sum-exps
    are the sinks, or -inf without sinks.

  Examples:
    >>> import jax.numpy as jnp
    >>> k_pages = jnp.zeros((9, 2, 4, 8))
    >>> v_pages = jnp.ones((9, 2, 4, 8))
    >>> table = jnp.asarray([[3, 7], [5, 0]], jnp.int32)
    >>> out, lse = paged_decode(
    ...   jnp.ones((2, 6, 8)),
    ...   k_pages,
    ...   v_pages,
    ...   table,
    ...   jnp.asarray([5, 2], jnp.int32),
    ...   options=AttentionOptions(window=3),
    ... )
    >>> out.shape, float(out.min())
    ((2, 6, 8), 1.0)

    Latent vectors of 576 elements:

    >>> out, lse = paged_decode(
    ...   jnp.ones((2, 16, 576)),
    ...   jnp.ones((9, 1, 4, 576)),
    ...   None,
    ...   table,
    ...   jnp.asarray([5, 2], jnp.int32),
    ...   value_dim=512,
    ...   options=AttentionOptions(scale=192**-0.5),
    ... )
    >>> out.shape
    (2, 16, 512)
  """
  check.queries("q", q, "BHD")
  reason = "trees need several queries per sequence: use paged_attention_padded"
  as_options(options).refuse(reason, "tree_mask")
  pools, call_options = _check(
    q, k_pages, v_pages, value_dim, options, page_offset, interpret
  )
  check.table(page_table, q.shape[0])
  check.vector("lengths", lengths, q.shape[0])
  check.same_devices("q", q, page_table=page_table, lengths=lengths)
  call = calls.decode_call(q, pools, page_table, lengths, call_options)
  module = choose_backend("paged_decode", backend, call)
  out, lse = calls.decode_with(module, call)
  return out.astype(q.dtype), lse


def paged_attention_padded(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array | None,
  page_table: jax.Array,
  starts: jax.Array,
  counts: jax.Array,
  *,
  value_dim: int | None = None,
  options: AttentionOptions | None = None,
  page_offset: jax.Array | int = 0,
  query_tile: int | None = None,
  backend: str = "auto",
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """Computes causal attention of a rectangle of queries.

  The first `counts[b]` columns of row b are queries, at positions `starts[b]`,
  `starts[b] + 1` ... Write their keys and values first. The other columns are
  padding. In all other respects, this function is like `paged_decode`.

  With a tree mask, the queries of a row are the nodes of a tree of draft
  tokens. Parents come before children, and nodes have consecutive positions.
  Windows and ALiBi count these positions, not the depth in the tree. If any
  query of a row sees a node, the node's key and value must not contain NaN.

  Args:
    q: [B, T, H, D], float32, bfloat16 or float16.
    k_pages: [N, K, S, D], as for `paged_decode`.
    v_pages: [N, K, S, Dv], same dtype; None for latents.
    page_table: int32[B, M], each sequence's page ids in the order of tokens.
    starts: int32[B], position of row b's first query.
    counts: int32[B], queries in row b, 0..T; 0 for an idle row.
    value_dim: as for `paged_decode`.
    options: as for `paged_decode`; `tree_mask` is bool[B, T, X] for any X >= 1.
    page_offset: as for `paged_decode`.
    query_tile: static; the number of columns to compute at a time, so that
      neither the shapes of products nor their rounding depend on T. None for
      all columns at once. Not supported with a tree mask.
    backend: one of `BACKENDS`.
    interpret: as for `paged_decode`.

  Returns:
    [B, T, H, Dv] in q's dtype, and float32[B, T, H], log-sum-exps. Columns of
    padding give zeros and -inf.
  """
  check.queries("q", q, "BTHD")
  pools, call_options = _check(
    q, k_pages, v_pages, value_dim, options, page_offset, interpret
  )
  check.table(page_table, q.shape[0])
  check.vector("starts", starts, q.shape[0])
  check.vector("counts", counts, q.shape[0])
  check.same_devices(
    "q", q, page_table=page_table, starts=starts, counts=counts
  )
  mask = call_options.tree_mask
  check.tree_mask(mask, q.shape[:2], "options.tree_mask")
  if query_tile is not None:
    check.count("query_tile", query_tile)
    if mask is not None:
      hint = "with a tree, all columns are computed at once; omit query_tile"
      check.refuse(ValueError, "options.tree_mask", "None", mask, hint)
  if mask is not None:
    call_options = dataclasses.replace(call_options, tree_starts=starts)
  call = AttentionCall(
    q=q,
    k_pages=pools[0],
    v_pages=pools[1],
    page_table=page_table,
    starts=starts,
    counts=counts,
    options=call_options,
    query_tile=query_tile,
  )
  module = choose_backend("paged_attention_padded", backend, call)
  out, lse = calls.attend_rectangle(module, call)
  return out.astype(q.dtype), lse


def paged_attention(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array | None,
  page_table: jax.Array,
  kv_lens: jax.Array,
  cu_q_lens: jax.Array,
  *,
  max_query_len: int | None = None,
  value_dim: int | None = None,
  options: AttentionOptions | None = None,
  page_offset: jax.Array | int = 0,
  backend: str = "auto",
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """Computes causal attention of queries packed one sequence after another.

  Rows `cu_q_lens[b]:cu_q_lens[b + 1]` of q are the queries of the last tokens
  of sequence b, which has `kv_lens[b]` tokens. Queries are cut into tiles of at
  most 32. So the work grows with T and B, and not with B times the maximum
  number of queries of a sequence. `paged_attention_padded` documents the rest.

  Args:
    q: [T, H, D], float32, bfloat16 or float16.
    k_pages: [N, K, S, D], as for `paged_decode`.
    v_pages: [N, K, S, Dv], same dtype; None for latents.
    page_table: int32[B, M], each sequence's page ids in the order of tokens.
    kv_lens: int32[B], tokens of each sequence, including its queries.
    cu_q_lens: int32[B + 1], ascending from 0.
    max_query_len: static; the maximum number of queries of one sequence, T if
      None. Further queries of a sequence give zeros and -inf.
    value_dim: as for `paged_decode`.
    options: as for `paged_decode`; `tree_mask` is bool[T, X]: row t of q sees
      the key of query j (from 0) of its sequence only if `tree_mask[t, j]`. A
      query that is not in a tree needs a mask row of True.
    page_offset: as for `paged_decode`.
    backend: one of `BACKENDS`.
    interpret: as for `paged_decode`.

  Returns:
    [T, H, Dv] in q's dtype, and float32[T, H], log-sum-exps. Rows from
    `cu_q_lens[-1]` on give zeros and -inf.
  """
  check.queries("q", q, "THD")
  pools, call_options = _check(
    q, k_pages, v_pages, value_dim, options, page_offset, interpret
  )
  check.table(page_table, None)
  check.vector("kv_lens", kv_lens, page_table.shape[0])
  check.vector("cu_q_lens", cu_q_lens, page_table.shape[0] + 1)
  check.same_devices(
    "q", q, page_table=page_table, kv_lens=kv_lens, cu_q_lens=cu_q_lens
  )
  mask = call_options.tree_mask
  check.tree_mask(mask, q.shape[:1], "options.tree_mask")
  longest = check.max_query_len(max_query_len, q.shape[0])
  kv_lens = jnp.asarray(kv_lens)
  cu_q_lens = jnp.asarray(cu_q_lens)
  tiles = query_packing.tile_queries(kv_lens, cu_q_lens, q.shape[0], longest)
  if mask is not None:
    call_options = dataclasses.replace(
      call_options, tree_mask=tiles.pack(mask), tree_starts=tiles.run_starts
    )
  call = AttentionCall(
    q=tiles.pack(q),
    k_pages=pools[0],
    v_pages=pools[1],
    page_table=jnp.take(page_table, tiles.sequences, axis=0, mode="clip"),
    starts=tiles.starts,
    counts=tiles.counts,
    options=call_options,
  )
  module = choose_backend("paged_attention", backend, call)
  out, lse = tiles.unpack(*module.attend(call))
  return out.astype(q.dtype), lse


def _check(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array | None,
  value_dim: int | None,
  options: AttentionOptions | None,
  page_offset: jax.Array | int,
  interpret: Any,
) -> tuple[calls.Pools, CallOptions]:
  """Checks the common arguments of all functions; q is [..., H, D]."""
  if value_dim is None:
    check.pools(q, k_pages, v_pages)
  else:
    check.latents(q, k_pages, v_pages, value_dim)
    options = as_options(options)
    # The default, 1 / sqrt(D), would be wrong, because absorption changes the
    # head size to D.
    check.scalar("options.scale", options.scale, np.floating)
    options.refuse("k_scale scales keys and values", "v_scale")
    reason = "attention over latents does not support it"
    options.refuse(reason, "sinks", "alibi_slopes")
    # The pool holds both keys and values, so both have the same scale.
    options = dataclasses.replace(options, v_scale=options.k_scale)
  pools = (k_pages, k_pages if v_pages is None else v_pages)
  call_options = check_options(
    options,
    q,
    *pools,
    page_offset=page_offset,
    value_dim=value_dim,
    interpret=interpret,
  )
  return pools, call_options
