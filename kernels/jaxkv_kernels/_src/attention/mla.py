"""Multi-head latent attention (DeepSeek-V2, section 2.1) over paged latents."""

from typing import Any

import jax
import numpy as np

from jaxkv_kernels._src import check
from jaxkv_kernels._src.attention.choose import choose_backend
from jaxkv_kernels._src.attention.choose import decode
from jaxkv_kernels._src.attention.options import checked


def mla_decode(
  q: jax.Array,
  pages: jax.Array,
  page_table: jax.Array,
  lengths: jax.Array,
  *,
  value_dim: int,
  scale: jax.Array | float,
  page_offset: jax.Array | int = 0,
  soft_cap: float | None = None,
  window: jax.Array | int | None = None,
  latent_scale: jax.Array | None = None,
  return_lse: bool = False,
  backend: str = "auto",
  interpret: Any = False,
) -> Any:
  """Attention of one query per sequence over one pool of latent vectors.

  A token's vector is its compressed latent followed by its rotated key part,
  such as 512 + 64 elements; the latent is key and value at once. Queries come
  absorbed, that is multiplied by the up-projection of the keys, with their
  rotated part behind; the up-projection of the values is applied to what comes
  out. The vectors are read once for all heads. Write them with `append_pages`,
  those of 8 bits by `quantize` first; its example shows where the scales go.

  Args:
    q: [B, H, D], float32, bfloat16 or float16.
    pages: [P, 1, S, D], in one of the formats of `formats`.
    page_table: int32[B, M], page ids in sequence order.
    lengths: int32[B], tokens of each sequence, the query's own included.
    value_dim: Dv, the first elements of a vector that are its value: 512.
    scale: factor of the logits. Not 1 / sqrt(D) here, but that of the heads
      before absorption, such as 1 / sqrt(128 + 64).
    page_offset: int32[], added to every page id.
    soft_cap: c > 0 turns a logit x into c * tanh(x / c).
    window: a query at position p sees positions p - window + 1 .. p.
    latent_scale: what the pool's numbers are to be multiplied by: float32[1]
      or float32[P, 1, S]. None: by nothing.
    return_lse: also return the natural-log log-sum-exp.
    backend: "auto", or the name of one; `triton` and `xla` serve it.
    interpret: as for `paged_decode`.

  Returns:
    [B, H, Dv] in q's dtype, and float32[B, H] with `return_lse`. A sequence
    of length 0 gives zeros and -inf.

  Raises:
    ValueError: an argument has a shape, dtype or value that is not supported.
    NotImplementedError: there is no such backend, or it does not serve.

  Examples:
    >>> import jax.numpy as jnp
    >>> out = mla_decode(
    ...   jnp.ones((1, 16, 576)),
    ...   jnp.ones((4, 1, 8, 576)),
    ...   jnp.asarray([[2, 1]], jnp.int32),
    ...   jnp.asarray([11], jnp.int32),
    ...   value_dim=512,
    ...   scale=192**-0.5,
    ... )
    >>> out.shape, round(float(out.max()), 3)
    ((1, 16, 512), 1.0)
  """
  check.queries("q", q, "BHD")
  check.pool("pages", pages)
  if pages.shape[1] != 1 or pages.shape[3] != q.shape[2]:
    raise ValueError(
      f"pages has shape {pages.shape}; it must be [P, 1, S, {q.shape[2]}] for q"
      f" of shape {q.shape}"
    )
  check.count("value_dim", value_dim)
  if value_dim > q.shape[2]:
    raise ValueError(
      f"value_dim={value_dim}; it must be at most the {q.shape[2]} elements of"
      " a vector"
    )
  check.scalar("scale", scale, np.floating)  # here without a default
  check.table(page_table, q.shape[0])
  check.vector("lengths", lengths, q.shape[0])
  check.beside(
    "q",
    q,
    pages=pages,
    page_table=page_table,
    lengths=lengths,
    latent_scale=latent_scale,
  )
  check.scales("latent_scale", latent_scale, pages)
  options = checked(
    q,
    pages,
    pages,
    page_offset=page_offset,
    scale=scale,
    soft_cap=soft_cap,
    window=window,
    k_scale=latent_scale,
    v_scale=latent_scale,
    value_dim=value_dim,
    interpret=interpret,
  )
  chosen = choose_backend("mla_decode", backend, q, pages, pages, options)
  out, lse = decode(chosen, q, pages, pages, page_table, lengths, options)
  out = out.astype(q.dtype)
  return (out, lse) if return_lse else out
