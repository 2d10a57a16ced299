"""Who is timed at decode attention: our backends, and others' beside them.

A side makes, from a case and its arrays, a function of `(q, rotation)` and of
the arrays that it is to be jitted with. One that does not serve a case says
why, with NotImplementedError. What is not installed is no side.
"""

import functools
from collections.abc import Callable
from typing import Any
from typing import Literal
from typing import NamedTuple

import jax
import jax.numpy as jnp
from attention_cases import Arrays
from attention_cases import Case

import jaxkv_kernels as kernels
from jaxkv_kernels.attention import backends


class Call(NamedTuple):
  """A function to time.

  Attributes:
    function: (q, rotation, *inputs) -> [B, H, D].
    inputs: its arrays.
  """

  function: Callable[..., jax.Array]
  inputs: tuple[Any, ...]


def ours(backend: str, case: Case, arrays: Arrays) -> Call:
  """Our attention with a backend; scales where the pool has 8 bits.

  Where a backend takes plans it has one, made once, as for all layers of a
  step.
  """
  if case.value_dim is not None:
    return _latent(backend, case, arrays)
  workers = kernels.decode_workers(arrays.k_pages, backend=backend)
  plan = None
  if workers is not None:
    plan = kernels.plan_decode(arrays.lengths, workers=workers)

  def function(q, rotation, k_pages, v_pages, tables, lengths, plan):
    return kernels.paged_decode(
      q,
      k_pages,
      v_pages,
      tables[rotation],
      lengths,
      plan=plan,
      backend=backend,
      **_scales(case),
    )

  inputs = arrays.k_pages, arrays.v_pages, arrays.tables, arrays.lengths, plan
  return Call(function, inputs)


def ours_shared(backend: str, case: Case, arrays: Arrays) -> Call:
  """The same, with what rows share read once; who shares what is found once."""
  if not case.prefix:
    raise NotImplementedError("nothing is shared")
  shared = [
    kernels.plan_shared_prefix(
      table,
      arrays.lengths,
      arrays.k_pages,
      arrays.v_pages,
      num_groups=case.batch // case.samples,
      group_size=case.samples,
      backend=backend,
    )
    for table in arrays.tables
  ]
  if shared[0] is None or not jnp.any(shared[0].tokens > 0):
    raise NotImplementedError("too little is shared to pay")

  def function(q, rotation, k_pages, v_pages, shared):
    shared = jax.tree.map(lambda x: x[rotation], shared)
    return kernels.shared_prefix_decode(
      q, k_pages, v_pages, shared, backend=backend
    )

  stacked = jax.tree.map(lambda *x: jnp.stack(x), *shared)
  return Call(function, (arrays.k_pages, arrays.v_pages, stacked))


def _latent(backend: str, case: Case, arrays: Arrays) -> Call:
  """`latent_decode`; zeros stand behind its values, as the next query."""
  value_dim = case.value_dim
  assert value_dim is not None
  spare = ((0, 0), (0, 0), (0, case.head_dim - value_dim))

  def function(q, rotation, pages, tables, lengths):
    out = kernels.latent_decode(
      q,
      pages,
      tables[rotation],
      lengths,
      value_dim=value_dim,
      scale=case.head_dim**-0.5,
      backend=backend,
    )
    return jnp.pad(out, spare)

  return Call(function, (arrays.k_pages, arrays.tables, arrays.lengths))


def _scales(case: Case) -> dict[str, Any]:
  if case.dtype != "int8":
    return {}
  factor = jnp.full((case.kv_heads,), 1 / 64, jnp.float32)
  return {"k_scale": factor, "v_scale": factor}


def jax_pallas(splits: int, case: Case, arrays: Arrays) -> Call:
  """Jax's own Pallas-Triton kernel, whose pools have heads first."""
  from jax.experimental.pallas.ops.gpu import paged_attention

  _only_plain(case)
  columns = arrays.tables.shape[-1]
  per_block = max(1, 64 // case.page_size)
  spare = -columns % (splits * per_block)
  tables = jnp.pad(arrays.tables, ((0, 0), (0, 0), (0, spare)))

  def function(q, rotation, k_pages, v_pages, tables, lengths):
    return paged_attention.paged_attention(
      q * jnp.asarray(case.head_dim**-0.5, q.dtype),
      k_pages,
      v_pages,
      tables[rotation],
      lengths,
      k_splits=splits,
      pages_per_compute_block=per_block,
    )

  pools = (x.swapaxes(0, 1) for x in (arrays.k_pages, arrays.v_pages))
  return Call(function, (*pools, tables, arrays.lengths))


def dense(
  implementation: Literal["xla", "cudnn"], case: Case, arrays: Arrays
) -> Call:
  """`jax.nn.dot_product_attention` on a cache that has no pages."""
  _only_plain(case)
  table = arrays.tables[0]
  keys, values = (
    kernels.gather_pages(pages, table)
    for pages in (arrays.k_pages, arrays.v_pages)
  )

  def function(q, rotation, keys, values, lengths):
    del rotation
    return jax.nn.dot_product_attention(
      q[:, None],
      keys,
      values,
      key_value_seq_lengths=lengths,
      implementation=implementation,
    )[:, 0]

  return Call(function, (keys, values, arrays.lengths))


def gathered(case: Case, arrays: Arrays) -> Call:
  """Pages gathered into a dense cache on every call, then attention."""
  _only_plain(case)

  def function(q, rotation, k_pages, v_pages, tables, lengths):
    table = tables[rotation]
    return jax.nn.dot_product_attention(
      q[:, None],
      kernels.gather_pages(k_pages, table),
      kernels.gather_pages(v_pages, table),
      key_value_seq_lengths=lengths,
    )[:, 0]

  return Call(
    function, (arrays.k_pages, arrays.v_pages, arrays.tables, arrays.lengths)
  )


def cudnn_paged(case: Case, arrays: Arrays) -> Call:
  """CuDNN's paged attention, as far as jax's wrapper lets one at it.

  It wants a pool of exactly B * M pages, so there is no rotation.
  """
  from jax._src.cudnn import fused_attention_stablehlo as cudnn

  _only_plain(case)
  if case.ragged or arrays.tables.shape[0] > 1:
    raise NotImplementedError("wants a pool of exactly B * M pages")
  table = arrays.tables[0][:, None, :, None]
  ones = jnp.ones_like(arrays.lengths)

  attention: Any = cudnn.paged_attention

  def function(q, rotation, k_pages, v_pages, table, ones, lengths):
    del rotation
    return attention(
      q[:, None],
      k_pages.swapaxes(1, 2),
      v_pages.swapaxes(1, 2),
      ones,
      lengths,
      table,
      table,
      scale=case.head_dim**-0.5,
      mask_type=cudnn.MaskType.PADDING,
    )[:, 0]

  return Call(
    function, (arrays.k_pages, arrays.v_pages, table, ones, arrays.lengths)
  )


def sides(platform: str) -> dict[str, Callable[[Case, Arrays], Call]]:
  """All there are on a platform, ours first."""
  named: dict[str, Callable[[Case, Arrays], Call]] = {}
  for backend in backends.for_platform(platform):
    named[backend] = functools.partial(ours, backend)
    named[f"{backend} shared"] = functools.partial(ours_shared, backend)
  named["xla gather"] = gathered
  named["xla dense"] = functools.partial(dense, "xla")
  if platform == "cuda":
    named["cudnn dense"] = functools.partial(dense, "cudnn")
    named["cudnn paged"] = cudnn_paged
    for splits in (1, 4, 16):
      named[f"jax pallas {splits}"] = functools.partial(jax_pallas, splits)
  return named


def _only_plain(case: Case) -> None:
  if jnp.dtype(case.dtype).itemsize == 1:
    raise NotImplementedError("not timed with 8-bit pools")
  if case.value_dim is not None:
    raise NotImplementedError("not timed with latents")
