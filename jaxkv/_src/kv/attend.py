"""Computes attention of new tokens over all tokens of their sequences."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv_kernels as kernels
from jaxkv._src.arrays import arguments
from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.cache.group_kinds import SlidingWindow
from jaxkv._src.exact import tiled_attention
from jaxkv._src.kv.kv_pages import KVPages
from jaxkv._src.kv.kv_pages import check_layer
from jaxkv._src.kv.view import AnyView
from jaxkv._src.kv.view import FreshView
from jaxkv._src.kv.view import PackedView
from jaxkv._src.kv.view import View
from jaxkv._src.kv.view import check_rows
from jaxkv._src.kv.view import decode_lengths
from jaxkv._src.kv.view import rows_of
from jaxkv._src.kv.view import view_in_memory


def attend(
  kv: KVPages,
  view: AnyView,
  layer: jax.Array | int,
  q: jax.Array,
  *,
  options: kernels.AttentionOptions | None = None,
  exact: bool = False,
  backend: str = "auto",
  head_sharding: NamedSharding | None = None,
) -> jax.Array:
  """Computes causal attention of new tokens over their sequences, in one layer.

  The query at position p sees positions 0 .. p, so write the new tokens first.
  `options.window` must be the window of the view's group, or None for a group
  of `FullAttention`. The cache frees pages behind the group's window, so a
  layer with another window needs a separate group.

  In a decode step without a window, with a view from `jaxkv.kv.share`, `attend`
  reads each shared page once for all rows that share it. This changes only the
  rounding of results.

  Latents. For pages with a `value_dim`, pass absorbed queries: the part of a
  query without rotation, times the up-projection of the keys, followed by the
  rotated part. Apply the up-projection of the values to the output. `attend`
  then ignores `view.shared`, so every row reads all its pages.

  Not differentiable: `jax.grad` gives zeros or raises an error.

  Args:
    kv: the pages.
    view: the rows and their new tokens; for a `PackedView`, B is 1.
    layer: int32[], 0..L-1.
    q: [B, T, H, D], H query heads in T columns. H is a multiple of K, the
      number of K/V heads.
    options: any options except `k_scale` and `v_scale`, because `kv` has its
      own scales. Latents require `scale`, and support neither `sinks` nor
      `alibi_slopes`. `tree_mask` is bool[B, T, X], for trees of draft tokens:
      for j < X, column t sees column j only if j <= t and `tree_mask[b, t, j]`.
      `tree_mask` is not supported for a `PackedView`.
    exact: True for outputs whose bits do not depend on the other queries of the
      call. Decode steps, chunks and whole sequences then give equal bits, at a
      higher cost. The page size must divide 64. With the backend "xla", all
      such page sizes give the same bits. `view.shared` is ignored. Not
      supported with `tree_mask`.
    backend: one of `jaxkv.kernels.BACKENDS`.
    head_sharding: the sharding of the K/V heads over one mesh axis, such as
      `NamedSharding(mesh, P("model"))`. Each device then attends with its own
      heads. Without it, XLA can shard the backend "xla", but not the kernels of
      other backends: on GPUs it gathers the pages of all heads, and on TPUs
      compilation fails.

  Returns:
    [B, T, H, D] in q's dtype, or [B, T, H, Dv] for latents with `value_dim` Dv.
    Zeros in columns past `view.num_tokens`.

  Raises:
    NotImplementedError: `backend` is unknown or does not support the call.
  """
  return attend_with_lse(
    kv,
    view,
    layer,
    q,
    options=options,
    exact=exact,
    backend=backend,
    head_sharding=head_sharding,
  )[0]


def attend_with_lse(
  kv: KVPages,
  view: AnyView,
  layer: jax.Array | int,
  q: jax.Array,
  *,
  options: kernels.AttentionOptions | None = None,
  exact: bool = False,
  backend: str = "auto",
  head_sharding: NamedSharding | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Computes the output of `attend`, and the log-sum-exps of the logits.

  Takes the arguments of `attend`. `jaxkv.kernels.merge_states` merges the
  results of attention over disjoint sets of keys.

  Returns:
    The output of `attend`, and float32[B, T, H], log-sum-exps (natural log,
    including the sinks); -inf in columns past `view.num_tokens`.
  """
  check_rows(view, "q", q)
  if q.ndim != 4:
    arguments.refuse(ValueError, "q", "[B, T, H, D]", q)
  check_layer(kv, layer)
  options = _check_options(options)
  _check_window(view, options)
  if isinstance(view, PackedView):
    options.refuse("a PackedView has no drafts", "tree_mask")
  if exact:
    tiled_attention.check_exact(kv.k.shape[2], options)
  # Python numbers are static arguments of the `jit` below, because the kernels
  # check the values of options, and a traced number has no value.
  static_options = options.numbers()
  arrays = dataclasses.replace(options, **dict.fromkeys(static_options))
  for name, value in vars(arrays).items():
    if value is not None:
      arguments.check_array(f"options.{name}", value)
  call = functools.partial(
    _attend,
    static_options=tuple(static_options.items()),
    backend=backend,
    exact=exact,
  )
  if head_sharding is not None:
    call = _by_head(call, kv, arrays, head_sharding)
  return call(kv, view, jnp.asarray(layer, jnp.int32), q, arrays)


def _check_options(
  options: kernels.AttentionOptions | None,
) -> kernels.AttentionOptions:
  """Returns the caller's options, or the defaults for None."""
  if options is None:
    return kernels.AttentionOptions()
  expected = "an AttentionOptions or None"
  hint = "make one with jaxkv.kernels.AttentionOptions(...)"
  cls = kernels.AttentionOptions
  arguments.check_type("options", options, cls, expected, hint)
  options.refuse("kv has its own scales", "k_scale", "v_scale")
  return options


def _check_window(view: AnyView, options: kernels.AttentionOptions) -> None:
  """Raises if the window of the view's group is known and differs."""
  rows = rows_of(view.decode if isinstance(view, PackedView) else view)
  if not isinstance(rows.kind, FullAttention | SlidingWindow):
    return
  window = getattr(rows.kind, "window", None)
  # The value of a traced window is unknown, but it differs from None.
  is_known = window is None or arguments.is_concrete(options.window)
  if is_known and options.window != window:
    hint = "pass the view of the layer's group, and the window of this group"
    expected = f"{window} for a view of {rows.kind}"
    arguments.refuse(
      ValueError, "options.window", expected, options.window, hint
    )


def _by_head(
  call: Callable[..., Any],
  kv: KVPages,
  arrays: kernels.AttentionOptions,
  head_sharding: NamedSharding,
) -> Callable[..., Any]:
  """Maps `_attend` over the devices that hold the heads."""
  axis = head_sharding.spec[0] if len(head_sharding.spec) == 1 else None
  if not isinstance(axis, str):
    expected = "a NamedSharding over one mesh axis"
    arguments.refuse(ValueError, "head_sharding", expected, head_sharding)
  by_head = {
    name: P(axis)
    for name in ("sinks", "alibi_slopes")
    if getattr(arrays, name) is not None
  }
  options = dataclasses.replace(jax.tree.map(lambda _: P(), arrays), **by_head)
  columns = P(None, None, axis)
  # All heads read the same latents, so every device gets all of them.
  pages = P(None, axis) if kv.value_dim is None else P()
  outer = jax.sharding.get_abstract_mesh()
  return jax.shard_map(
    call,
    # Inside another `shard_map`, jax requires None, which means the outer mesh.
    mesh=None if axis in outer.axis_names else head_sharding.mesh,
    in_specs=(pages, P(), P(), columns, options),
    out_specs=columns,
    axis_names={axis},
  )


# Compiled once for eager calls; inlined into a caller's own `jit`.
@functools.partial(
  jax.jit, static_argnames=("static_options", "backend", "exact"), inline=True
)
def _attend(
  kv: KVPages,
  view: AnyView,
  layer: jax.Array,
  q: jax.Array,
  arrays: kernels.AttentionOptions,
  *,
  static_options: tuple[tuple[str, Any], ...],
  backend: str,
  exact: bool,
) -> tuple[jax.Array, jax.Array]:
  options = dataclasses.replace(
    arrays, k_scale=kv.k_scale, v_scale=kv.v_scale, **dict(static_options)
  )
  call: dict[str, Any] = {
    "options": options,
    "page_offset": layer * kv.num_pages,
    "backend": backend,
  }
  if kv.value_dim is not None:
    call["value_dim"] = kv.value_dim
  rectangle = _rectangle
  packed = _packed
  if exact:
    rectangle = functools.partial(_exact, tiled_attention.attend_rectangle)
    packed = functools.partial(_exact, tiled_attention.attend_packed)
  view = view_in_memory(kv, view)
  if not isinstance(view, PackedView):
    return rectangle(kv, view, q, call)
  # Decoding tokens use the decode kernels. Packed attention would compute a
  # whole tile of columns for each of them.
  batch = rows_of(view.decode).page_table.shape[0]
  out, lse = rectangle(kv, view.decode, q[0, :batch, None], call)
  out = out[:, 0]
  lse = lse[:, 0]
  if view.prefill is not None:
    chunk_out, chunk_lse = packed(kv, view.prefill, q[0, batch:], call)
    out = jnp.concatenate([out, chunk_out])
    lse = jnp.concatenate([lse, chunk_lse])
  return out[None], lse[None]


def _rectangle(
  kv: KVPages, view: View | FreshView, q: jax.Array, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Computes attention of queries [B, T, H, D]."""
  # A call with one column is a decode step, which can use shared pages. Decode
  # kernels take no tree mask, because it may hide a query's own key.
  if q.shape[1] == 1 and call["options"].tree_mask is None:
    out, lse = _attend_single(kv, view, q[:, 0], call)
    return out[:, None], lse[:, None]
  rows = rows_of(view)
  return kernels.paged_attention_padded(
    q, kv.k, kv.v, rows.page_table, rows.starts, rows.num_tokens, **call
  )


def _packed(
  kv: KVPages, rows: View, q: jax.Array, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Computes attention of queries [C, H, D], packed one row after another."""
  first_row = jnp.zeros((1,), jnp.int32)
  ends = jnp.cumsum(rows.num_tokens, dtype=jnp.int32)
  return kernels.paged_attention(
    q,
    kv.k,
    kv.v,
    rows.page_table,
    rows.starts + rows.num_tokens,
    jnp.concatenate([first_row, ends]),
    **call,
  )


def _attend_single(
  kv: KVPages, view: View | FreshView, q: jax.Array, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Computes attention of one query in each row, q [B, H, D]."""
  rows = rows_of(view)
  lengths = decode_lengths(rows)
  shared = rows.shared
  # With a window, shared pages are not used, because rows of different lengths
  # would see different parts of the prefix. `cascade_decode` takes no latents.
  has_window = call["options"].window is not None
  if shared is None or has_window or kv.v is None:
    out, lse = kernels.paged_decode(
      q, kv.k, kv.v, rows.page_table, lengths, **call
    )
  else:
    # Rows may have changed since `share`. For a FreshView, `refresh_shared` has
    # already checked them.
    if not isinstance(view, FreshView):
      shared = shared.refreshed(
        rows.page_table, lengths, page_size=kv.page_size
      )
    out, lse = kernels.cascade_decode(q, kv.k, kv.v, shared, **call)
  # An idle row has length 0, for which the kernels return the log-sum-exp of
  # the sinks instead of -inf.
  return out, jnp.where((rows.num_tokens > 0)[:, None], lse, -jnp.inf)


def _exact(
  attention: Callable[..., Any],
  kv: KVPages,
  view: View | FreshView,
  q: jax.Array,
  call: dict[str, Any],
) -> tuple[jax.Array, jax.Array]:
  """Computes attention with a function of `tiled_attention`."""
  rows = rows_of(view)
  sequences = tiled_attention.TokenRows(
    (kv.k, kv.v), rows.page_table, rows.starts, rows.num_tokens
  )
  return attention(sequences, q, call)
