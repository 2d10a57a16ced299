"""Multi-head latent attention (DeepSeek-V2, section 2.1) over paged latents."""

import dataclasses
from typing import Any
from typing import Literal
from typing import overload

import jax
import numpy as np

from jaxkv_kernels._src import check
from jaxkv_kernels._src.attention.choose import choose_backend
from jaxkv_kernels._src.attention.choose import decode
from jaxkv_kernels._src.attention.options import AttentionOptions
from jaxkv_kernels._src.attention.options import check_options
from jaxkv_kernels._src.attention.options import given
from jaxkv_kernels._src.attention.options import refuse_options


@overload
def mla_decode(
  q: jax.Array,
  pages: jax.Array,
  page_table: jax.Array,
  lengths: jax.Array,
  *,
  value_dim: int,
  options: AttentionOptions,
  page_offset: jax.Array | int = ...,
  return_lse: Literal[False] = ...,
  backend: str = ...,
  interpret: Any = ...,
) -> jax.Array: ...


@overload
def mla_decode(
  q: jax.Array,
  pages: jax.Array,
  page_table: jax.Array,
  lengths: jax.Array,
  *,
  value_dim: int,
  options: AttentionOptions,
  page_offset: jax.Array | int = ...,
  return_lse: Literal[True],
  backend: str = ...,
  interpret: Any = ...,
) -> tuple[jax.Array, jax.Array]: ...


def mla_decode(
  q: jax.Array,
  pages: jax.Array,
  page_table: jax.Array,
  lengths: jax.Array,
  *,
  value_dim: int,
  options: AttentionOptions,
  page_offset: jax.Array | int = 0,
  return_lse: bool = False,
  backend: str = "auto",
  interpret: Any = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Attention of one query for each sequence over one pool of latent vectors.

  A token's vector is its compressed latent followed by its rotated key part,
  such as 512 + 64 elements; the latent is both key and value. Queries are
  absorbed: multiplied by the up-projection of the keys, with their rotated part
  appended. Apply the up-projection of the values to the output. The vectors are
  read once for all heads. Write them with `append_pages`; apply `quantize`
  first for 8-bit pools, as the example of `append_pages` shows.

  Args:
    q: [B, H, D], float32, bfloat16 or float16.
    pages: [N, 1, S, D], in one of the formats of `formats`.
    page_table: int32[B, M], page ids in sequence order.
    lengths: int32[B], tokens of each sequence, the query's own included.
    value_dim: Dv, the leading elements of a vector that are its value: 512.
    options: `scale` is required. It is not 1 / sqrt(D) but the scale of the
      heads before absorption, such as 1 / sqrt(128 + 64). `k_scale` scales the
      latents, float32[1] or float32[N, 1, S]. The only other options are
      `soft_cap` and `window`.
    page_offset: int32[], added to every page id.
    return_lse: also return the natural-log log-sum-exp.
    backend: "auto", or one of `BACKENDS`; `triton` and `xla` serve it.
    interpret: as for `paged_decode`.

  Returns:
    [B, H, Dv] in q's dtype, and float32[B, H] with `return_lse`. A sequence
    of length 0 gives zeros and -inf.

  Raises:
    TypeError: an argument has a type or dtype that is not supported.
    ValueError: an argument has a shape or value that is not supported.
    NotImplementedError: the backend does not exist, or does not serve the call.

  Examples:
    >>> import jax.numpy as jnp
    >>> out = mla_decode(
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
  check.pool("pages", pages)
  if pages.shape[1] != 1 or pages.shape[3] != q.shape[2]:
    wanted = f"[N, 1, S, {q.shape[2]}], one head of the size of q's"
    check.refuse(ValueError, "pages", wanted, pages)
  check.count("value_dim", value_dim)
  if value_dim > q.shape[2]:
    wanted = f"at most {q.shape[2]}, the elements of a vector"
    check.refuse(ValueError, "value_dim", wanted, value_dim)
  options = given(options)
  check.scalar("options.scale", options.scale, np.floating)  # No default here.
  check.table(page_table, q.shape[0])
  check.vector("lengths", lengths, q.shape[0])
  check.beside("q", q, pages=pages, page_table=page_table, lengths=lengths)
  refuse_options(options, "k_scale scales keys and values", "v_scale")
  refuse_options(
    options,
    "mla_decode does not support it",
    "sinks",
    "alibi_slopes",
    "tree_mask",
  )
  call = check_options(
    dataclasses.replace(options, v_scale=options.k_scale),
    q,
    pages,
    pages,
    page_offset=page_offset,
    value_dim=value_dim,
    interpret=interpret,
  )
  chosen = choose_backend("mla_decode", backend, q, pages, pages, call)
  out, lse = decode(chosen, q, pages, pages, page_table, lengths, call)
  out = out.astype(q.dtype)
  return (out, lse) if return_lse else out
