"""Multi-head latent attention (DeepSeek-V2, section 2.1) over paged latents.

The functions take queries in the same layouts as those of `api`. The docstring
of the package `attention` defines the letters.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxkv_kernels._src import check
from jaxkv_kernels._src.attention import calls
from jaxkv_kernels._src.attention.options import AttentionOptions
from jaxkv_kernels._src.attention.options import CallOptions
from jaxkv_kernels._src.attention.options import as_options
from jaxkv_kernels._src.attention.options import check_options


def mla_decode(
  q: jax.Array,
  pages: jax.Array,
  page_table: jax.Array,
  lengths: jax.Array,
  *,
  value_dim: int,
  options: AttentionOptions,
  page_offset: jax.Array | int = 0,
  backend: str = "auto",
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """Computes attention of one query for each sequence over latent vectors.

  The latent vector of a token is its compressed representation, followed by the
  rotary part of its key, such as 512 + 64 elements. The whole vector is the
  key, and the compressed part is the value. All heads read the same vector.
  Queries must be absorbed: multiply the part without rotary embedding by the
  up-projection of the keys, and append the rotary part. Multiply the output by
  the up-projection of the values. Write vectors with `append_pages`, whose
  example shows how to `quantize` them for 8-bit pools.

  Args:
    q: [B, H, D], float32, bfloat16 or float16; D is the latent vector's size.
    pages: [N, 1, S, D], N pages of S tokens; `logical_dtype` lists the dtypes.
    page_table: int32[B, M], each sequence's page ids in the order of tokens.
    lengths: int32[B], tokens of each sequence, including the query's token.
    value_dim: Dv, the size of the compressed part, such as 512.
    options: `scale` is required. It depends on the head size of the queries
      before absorption, such as 1 / sqrt(128 + 64). `k_scale` dequantizes the
      vectors, float32[1] or float32[N, 1, S]. `soft_cap` and `window` are
      allowed, other options are not.
    page_offset: int32[], added to every page id.
    backend: one of `BACKENDS`. Only `triton` and `xla` support latents.
    interpret: as for `paged_decode`.

  Returns:
    [B, H, Dv] in q's dtype, and float32[B, H], log-sum-exps (natural log). A
    sequence of length 0 gives zeros and -inf.

  Examples:
    >>> import jax.numpy as jnp
    >>> out, lse = mla_decode(
    ...   jnp.ones((1, 16, 576)),
    ...   jnp.ones((4, 1, 8, 576)),
    ...   jnp.asarray([[2, 1]], jnp.int32),
    ...   jnp.asarray([11], jnp.int32),
    ...   value_dim=512,
    ...   options=AttentionOptions(scale=192**-0.5),
    ... )
    >>> out.shape, round(float(out.max()), 3)
    ((1, 16, 512), 1.0)
  """
  check.queries("q", q, "BHD")
  reason = "trees need several queries per sequence: use mla_attention_padded"
  as_options(options).refuse(reason, "tree_mask")
  call_options = _check(q, pages, value_dim, options, page_offset, interpret)
  pools = (pages, pages)
  return calls.decode(
    "mla_decode", backend, q, pools, page_table, lengths, call_options
  )


def mla_attention_padded(
  q: jax.Array,
  pages: jax.Array,
  page_table: jax.Array,
  starts: jax.Array,
  counts: jax.Array,
  *,
  value_dim: int,
  options: AttentionOptions,
  page_offset: jax.Array | int = 0,
  query_tile: int | None = None,
  backend: str = "auto",
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """Computes causal attention of a rectangle of queries over latents.

  Queries must be absorbed, as for `mla_decode`. In all other respects, this
  function is like `paged_attention_padded`.

  Args:
    q: [B, T, H, D], float32, bfloat16 or float16.
    pages: [N, 1, S, D], as for `mla_decode`.
    page_table: int32[B, M], each sequence's page ids in the order of tokens.
    starts: int32[B], position of row b's first query.
    counts: int32[B], queries in row b, 0..T; 0 for an idle row.
    value_dim: Dv, as for `mla_decode`.
    options: those of `mla_decode`, and `tree_mask`, bool[B, T, X].
    page_offset: int32[], added to every page id.
    query_tile: as for `paged_attention_padded`.
    backend: as for `mla_decode`.
    interpret: as for `paged_decode`.

  Returns:
    [B, T, H, Dv] in q's dtype, and float32[B, T, H], log-sum-exps. Padding
    gives zeros and -inf.

  Examples:
    >>> import jax.numpy as jnp
    >>> out, lse = mla_attention_padded(
    ...   jnp.ones((1, 3, 16, 576)),
    ...   jnp.ones((4, 1, 8, 576)),
    ...   jnp.asarray([[2, 1]], jnp.int32),
    ...   jnp.asarray([9], jnp.int32),
    ...   jnp.asarray([2], jnp.int32),
    ...   value_dim=512,
    ...   options=AttentionOptions(scale=192**-0.5),
    ... )
    >>> out.shape, out[0, :, 0, 0].round(3).tolist()
    ((1, 3, 16, 512), [1.0, 1.0, 0.0])
  """
  check.queries("q", q, "BTHD")
  call_options = _check(q, pages, value_dim, options, page_offset, interpret)
  return calls.attend_padded(
    "mla_attention_padded",
    backend,
    q,
    (pages, pages),
    page_table,
    starts,
    counts,
    query_tile,
    call_options,
  )


def mla_attention(
  q: jax.Array,
  pages: jax.Array,
  page_table: jax.Array,
  kv_lens: jax.Array,
  cu_q_lens: jax.Array,
  *,
  value_dim: int,
  options: AttentionOptions,
  max_query_len: int | None = None,
  page_offset: jax.Array | int = 0,
  backend: str = "auto",
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """Computes causal attention of packed queries over latents.

  Queries must be absorbed, as for `mla_decode`, and packed as for
  `paged_attention`.

  Args:
    q: [T, H, D], float32, bfloat16 or float16.
    pages: [N, 1, S, D], as for `mla_decode`.
    page_table: int32[B, M], each sequence's page ids in the order of tokens.
    kv_lens: int32[B], tokens of each sequence, including its queries.
    cu_q_lens: int32[B + 1], as for `paged_attention`.
    value_dim: Dv, as for `mla_decode`.
    options: those of `mla_decode`, and `tree_mask`, bool[T, X].
    max_query_len: as for `paged_attention`.
    page_offset: int32[], added to every page id.
    backend: as for `mla_decode`.
    interpret: as for `paged_decode`.

  Returns:
    [T, H, Dv] in q's dtype, and float32[T, H], log-sum-exps. Rows from
    `cu_q_lens[-1]` on give zeros and -inf.
  """
  check.queries("q", q, "THD")
  call_options = _check(q, pages, value_dim, options, page_offset, interpret)
  return calls.attend_packed(
    "mla_attention",
    backend,
    q,
    (pages, pages),
    page_table,
    kv_lens,
    cu_q_lens,
    max_query_len,
    call_options,
  )


def _check(
  q: jax.Array,
  pages: jax.Array,
  value_dim: int,
  options: AttentionOptions,
  page_offset: jax.Array | int,
  interpret: Any,
) -> CallOptions:
  """Checks the common arguments of all functions; q is [..., H, D]."""
  check.pool("pages", pages)
  dim = q.shape[-1]
  if pages.shape[1] != 1 or pages.shape[3] != dim:
    expected = f"[N, 1, S, {dim}], one head with the head size of q"
    check.refuse(ValueError, "pages", expected, pages)
  check.count("value_dim", value_dim)
  if value_dim > dim:
    expected = f"at most {dim}, the size of a latent vector"
    check.refuse(ValueError, "value_dim", expected, value_dim)
  options = as_options(options)
  # The default, 1 / sqrt(D), would be wrong, because absorption changes the
  # head size to D.
  check.scalar("options.scale", options.scale, np.floating)
  check.same_devices("q", q, pages=pages)
  options.refuse("k_scale scales keys and values", "v_scale")
  reason = "attention over latents does not support it"
  options.refuse(reason, "sinks", "alibi_slopes")
  # The pool holds both keys and values, so both have the same scale.
  return check_options(
    dataclasses.replace(options, v_scale=options.k_scale),
    q,
    pages,
    pages,
    page_offset=page_offset,
    value_dim=value_dim,
    interpret=interpret,
  )
