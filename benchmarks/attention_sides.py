"""The sides of the decode attention benchmark: our backends and others.

A side converts a case and its arrays to a `Call`. It raises NotImplementedError
with the reason if it does not support the case. `Timed` times a side as
`attention.py` describes.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any
from typing import Literal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import Arrays
from attention_cases import Case
from jax import lax

import jaxkv_kernels as kernels
from jaxkv_kernels._src.attention import choose

CALLS = 16
MAX_RUNS = 64
ROUNDS = 7
ROUND_SECONDS = 0.2


class Call(NamedTuple):
  """A function to time.

  Attributes:
    function: `(q, rotation, *inputs) -> [B, H, D]`.
    inputs: the arrays of the function.
    rotations: the number of caches to read in turn, which bounds `rotation`.
  """

  function: Callable[..., jax.Array]
  inputs: tuple[Any, ...]
  rotations: int


def looped(call: Call, calls: int):
  """Jits a loop of calls, `(q, first rotation, *inputs) -> last result`."""

  # Each query depends on the previous result, so the calls cannot overlap.
  def run(q, first_rotation, *inputs):
    def body(index, carry):
      q, _ = carry
      rotation = lax.rem(first_rotation + index, jnp.int32(call.rotations))
      out = call.function(q, rotation, *inputs).astype(q.dtype)
      q = q + out * jnp.asarray(0.01, q.dtype)
      return q * jnp.asarray(0.99, q.dtype), out

    begin = q, jnp.zeros_like(q)
    return lax.fori_loop(jnp.int32(0), jnp.int32(calls), body, begin)[1]

  return jax.jit(run)


class Timed:
  """Times a side, and stores its samples and results."""

  def __init__(self, call: Call, q: jax.Array, quick: bool):
    """Compiles the side, and chooses the number of runs and of rounds."""
    self.calls = 2 if quick else CALLS
    self.rotations = call.rotations
    self._run, self._q, self._inputs = looped(call, self.calls), q, call.inputs
    self._firsts = [jnp.int32(0)]
    self.outs, self.samples = [], []
    # The first round contains the compilation.
    for _ in range(2):
      self.round()
    seconds = self.samples[-1]
    runs = 1 if quick else min(int(ROUND_SECONDS / seconds), MAX_RUNS)
    self._firsts = [jnp.int32(self.calls * run) for run in range(max(runs, 1))]
    slow = quick or seconds > ROUND_SECONDS
    self.rounds = 2 if slow else ROUNDS
    self.samples = []

  def round(self) -> None:
    """Times all runs. `outs` keeps run 0's first and latest results."""
    start_time = time.perf_counter()
    outs = [self._run(self._q, at, *self._inputs) for at in self._firsts]
    jax.block_until_ready(outs)
    self.samples.append(time.perf_counter() - start_time)
    self.outs = [*self.outs[:1], np.asarray(outs[0], np.float32)]

  def seconds(self) -> float:
    """Returns the median seconds of a call."""
    return statistics.median(self.samples) / (len(self._firsts) * self.calls)


def ours(backend: str, case: Case, arrays: Arrays) -> Call:
  """Calls our attention with a backend, with scales for 8-bit pools."""
  if case.value_dim is not None:
    return _latent(backend, case, arrays)

  def function(q, rotation, k_pages, v_pages, tables, lengths):
    return kernels.paged_decode(
      q,
      k_pages,
      v_pages,
      tables[rotation],
      lengths,
      options=_scales(case),
      backend=backend,
    )[0]

  inputs = arrays.k_pages, arrays.v_pages, arrays.tables, arrays.lengths
  return Call(function, inputs, len(arrays.tables))


def ours_shared(backend: str, case: Case, arrays: Arrays) -> Call:
  """Calls our attention, which reads shared pages once."""
  # Clusters are not timed, because a decode step finds them once for all
  # layers.
  shared = [
    kernels.plan_shared_prefix(
      table,
      arrays.lengths,
      arrays.k_pages,
      arrays.v_pages,
      num_clusters=case.batch // case.samples,
      cluster_size=case.samples,
      backend=backend,
    )
    for table in arrays.tables
  ]
  if shared[0] is None or not jnp.any(shared[0].tokens > 0):
    raise NotImplementedError("too little is shared to pay")

  def function(q, rotation, k_pages, v_pages, shared):
    shared = jax.tree.map(lambda x: x[rotation], shared)
    out, _ = kernels.cascade_decode(
      q, k_pages, v_pages, shared, backend=backend
    )
    return out

  stacked = jax.tree.map(lambda *x: jnp.stack(x), *shared)
  inputs = arrays.k_pages, arrays.v_pages, stacked
  return Call(function, inputs, len(arrays.tables))


def _latent(backend: str, case: Case, arrays: Arrays) -> Call:
  """Decodes over latents, and appends zeros to get the width of a query."""
  value_dim = case.value_dim
  assert value_dim is not None
  padding = ((0, 0), (0, 0), (0, case.head_dim - value_dim))

  def function(q, rotation, pages, tables, lengths):
    out, _ = kernels.paged_decode(
      q,
      pages,
      None,
      tables[rotation],
      lengths,
      value_dim=value_dim,
      options=kernels.AttentionOptions(scale=case.head_dim**-0.5),
      backend=backend,
    )
    return jnp.pad(out, padding)

  inputs = arrays.k_pages, arrays.tables, arrays.lengths
  return Call(function, inputs, len(arrays.tables))


def _scales(case: Case) -> kernels.AttentionOptions | None:
  if case.dtype != "int8":
    return None
  factor = jnp.full((case.kv_heads,), 1 / 64, jnp.float32)
  return kernels.AttentionOptions(k_scale=factor, v_scale=factor)


def jax_pallas(splits: int, case: Case, arrays: Arrays) -> Call:
  """Calls jax's own Pallas-Triton kernel, whose pools have heads first."""
  from jax.experimental.pallas.ops.gpu import paged_attention

  _only_plain(case)
  columns = arrays.tables.shape[-1]
  per_block = max(1, 64 // case.page_size)
  padding = -columns % (splits * per_block)
  tables = jnp.pad(arrays.tables, ((0, 0), (0, 0), (0, padding)))

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
  return Call(function, (*pools, tables, arrays.lengths), len(tables))


def dense(
  implementation: Literal["xla", "cudnn"], case: Case, arrays: Arrays
) -> Call:
  """Calls `jax.nn.dot_product_attention` on a cache without pages."""
  # All calls read the same cache, because an index into several caches would
  # copy the cache in each call.
  _only_plain(case)
  table = arrays.tables[0]
  keys, values = (
    pages[table].swapaxes(2, 3).reshape(len(table), -1, *pages.shape[1::2])
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

  return Call(function, (keys, values, arrays.lengths), 1)


def sides(
  platform: str, case: Case
) -> dict[str, Callable[[Case, Arrays], Call]]:
  """Returns all sides of a case on a platform, ours first."""
  named: dict[str, Callable[[Case, Arrays], Call]] = {}
  for backend in choose.for_platform(platform):
    named[backend] = functools.partial(ours, backend)
    if case.prefix:
      named[f"{backend} shared"] = functools.partial(ours_shared, backend)
  if not case.main:
    return named
  named["xla dense"] = functools.partial(dense, "xla")
  if platform == "cuda":
    named["cudnn dense"] = functools.partial(dense, "cudnn")
    for splits in (1, 4, 16):
      named[f"jax pallas {splits}"] = functools.partial(jax_pallas, splits)
  return named


def _only_plain(case: Case) -> None:
  if jnp.dtype(case.dtype).itemsize == 1:
    raise NotImplementedError("not timed with 8-bit pools")
  if case.value_dim is not None:
    raise NotImplementedError("not timed with latents")
