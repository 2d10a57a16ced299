"""Attention of new tokens over all tokens of their sequences."""

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
from jaxkv._src.exact import attention as exact_attention
from jaxkv._src.kv import cross_attention
from jaxkv._src.kv.memory import KVPages
from jaxkv._src.kv.memory import check_layer
from jaxkv._src.kv.view import AnyView
from jaxkv._src.kv.view import FreshView
from jaxkv._src.kv.view import PackedView
from jaxkv._src.kv.view import View
from jaxkv._src.kv.view import check_rows
from jaxkv._src.kv.view import decode_lengths
from jaxkv._src.kv.view import rows_of


def attend(
  kv: KVPages,
  view: AnyView,
  layer: jax.Array | int,
  q: jax.Array,
  *,
  options: kernels.AttentionOptions | None = None,
  causal: bool = True,
  exact: bool = False,
  backend: str = "auto",
  heads: NamedSharding | None = None,
) -> jax.Array:
  """Causal attention over positions 0 .. starts + counts - 1 of one layer.

  Write the new tokens first. Positions whose page was given back (behind a
  sliding window) must lie outside the window of `options`: their table entries
  are read like any other.

  With one column, no window and a view from `share`, pages that rows have in
  common are read once. That rounds differently, but no less precisely. A row
  that no longer begins with those pages, because its table or position has
  changed, is read alone; `refresh_shared` checks that once for all layers. A
  plan from `plan_decode` is passed to backends that take plans.

  Latents. Queries over pages with a `value_dim` are absorbed: multiplied by the
  up-projection of the keys, with their rotated part appended. The output has Dv
  elements for each head; apply the up-projection of the values to it. Shared
  pages are then read for each row.

  Encoders. With `causal=False` each query sees positions 0 .. starts - 1, all
  of them, and nothing else: the tokens of an encoder, in a group of
  `CrossAttention`, whose keys and values `write` has stored from position 0.
  The queries are not among them, so each read of a key serves up to 64 query
  heads of a K/V head, of several columns. `shared` and plans are not used.

  Not differentiable: a gradient is zeros, or an error of jax.

  Args:
    kv: the pages.
    view: where the rows live and which columns are tokens; of a `PackedView`,
      B is 1.
    layer: int32[], 0..L-1.
    q: [B, T, H, D], H a multiple of K.
    options: all but `k_scale` and `v_scale`, which `kv` has. Latents require
      `scale`, and do not take `sinks` and `alibi_slopes`. A tree mask is
      bool[B, T, X], for drafts: column t sees column j <= t only if
      `tree_mask[b, t, j]`.
    causal: False for the tokens of an encoder; `window`, `alibi_slopes`,
      `tree_mask` and latents have no meaning there.
    exact: whether a query gets the same numbers, bit for bit, whatever the call
      computes beside it: decode steps, chunks and whole sequences agree. The
      page size must divide 64; with `xla`, all such sizes agree. Costs more.
      `shared` and plans are not used; not for `causal=False` and `tree_mask`.
    backend: one of `jaxkv.kernels.BACKENDS`.
    heads: in a program whose pages are split by heads, over which mesh axis:
      `NamedSharding(mesh, P("model"))`. Each device then calls the backend with
      its own heads. Without it XLA splits the operations of `xla`, but not the
      kernels of other backends: on GPUs it gathers the pages of all heads, and
      for TPUs it fails.

  Returns:
    [B, T, H, D] in q's dtype, of latents [B, T, H, Dv]. Zeros in columns past
    `view.counts`.

  Raises:
    TypeError: an argument has a type or dtype that is not supported.
    ValueError: an argument has a shape or value that is not supported.
    NotImplementedError: the backend does not exist, or does not serve the call.
  """
  return attend_with_lse(
    kv,
    view,
    layer,
    q,
    options=options,
    causal=causal,
    exact=exact,
    backend=backend,
    heads=heads,
  )[0]


def attend_with_lse(
  kv: KVPages,
  view: AnyView,
  layer: jax.Array | int,
  q: jax.Array,
  *,
  options: kernels.AttentionOptions | None = None,
  causal: bool = True,
  exact: bool = False,
  backend: str = "auto",
  heads: NamedSharding | None = None,
) -> tuple[jax.Array, jax.Array]:
  """`attend`, and the log-sum-exps, to merge it with attention to other keys.

  Takes the arguments of `attend`.

  Returns:
    What `attend` returns, and float32[B, T, H], the natural-log log-sum-exps of
    the logits, sink included; -inf in columns past `view.counts`. For
    `jaxkv.kernels.merge_states`.
  """
  check_rows(view, "q", q)
  if q.ndim != 4:
    arguments.refuse(ValueError, "q", "[B, T, H, D]", q)
  check_layer(kv, layer)
  options = _checked(options)
  if isinstance(view, PackedView):
    options.refuse("a PackedView has no drafts", "tree_mask")
  if not causal:
    _check_encoder(kv, options)
  if exact:
    exact_attention.check_exact(kv.k.shape[2], options, causal)
  # Python numbers stay static under the `jit` below, so they can be checked.
  numbers = options.numbers()
  arrays = dataclasses.replace(options, **dict.fromkeys(numbers))
  for name, value in vars(arrays).items():
    if value is not None:
      arguments.check_array(f"options.{name}", value)
  call = functools.partial(
    _attend,
    numbers=tuple(numbers.items()),
    backend=backend,
    causal=causal,
    exact=exact,
  )
  if heads is not None:
    call = _by_head(call, kv, arrays, heads)
  return call(kv, view, jnp.asarray(layer, jnp.int32), q, arrays)


def _checked(
  options: kernels.AttentionOptions | None,
) -> kernels.AttentionOptions:
  """Returns the caller's options, or the defaults for None."""
  if options is None:
    return kernels.AttentionOptions()
  if not isinstance(options, kernels.AttentionOptions):
    raise TypeError(
      "`options` must be an AttentionOptions or None, got "
      f"{type(options).__name__}; make one with "
      "jaxkv.kernels.AttentionOptions(...)."
    )
  options.refuse("kv has its own scales", "k_scale", "v_scale")
  return options


def _check_encoder(kv: KVPages, options: kernels.AttentionOptions) -> None:
  """Raises if what is asked for makes no sense for an encoder's tokens."""
  if kv.value_dim is not None:
    wanted = "pages of keys and values with causal=False"
    arguments.refuse(ValueError, "kv", wanted, f"latents of {kv.value_dim}")
  why = "an encoder's tokens have no place before or after a query"
  options.refuse(why, "window", "alibi_slopes", "tree_mask")


def _by_head(
  call: Callable[..., Any],
  kv: KVPages,
  arrays: kernels.AttentionOptions,
  heads: NamedSharding,
) -> Callable[..., Any]:
  """`_attend` for the heads of each device."""
  axis = heads.spec[0] if len(heads.spec) == 1 else None
  if not isinstance(axis, str):
    wanted = "a NamedSharding over one mesh axis"
    arguments.refuse(ValueError, "heads", wanted, heads)
  by_head = {
    name: P(axis)
    for name in ("sinks", "alibi_slopes")
    if getattr(arrays, name) is not None
  }
  options = dataclasses.replace(jax.tree.map(lambda _: P(), arrays), **by_head)
  columns = P(None, None, axis)
  # All heads read the same latents.
  pages = P(None, axis) if kv.value_dim is None else P()
  outer = jax.sharding.get_abstract_mesh()
  return jax.shard_map(
    call,
    # Inside another `shard_map` it must be that one's.
    mesh=None if axis in outer.axis_names else heads.mesh,
    in_specs=(pages, P(), P(), columns, options),
    out_specs=columns,
    axis_names={axis},
  )


@functools.partial(
  jax.jit,
  static_argnames=("numbers", "backend", "causal", "exact"),
  inline=True,
)
def _attend(
  kv: KVPages,
  view: AnyView,
  layer: jax.Array,
  q: jax.Array,
  arrays: kernels.AttentionOptions,
  *,
  numbers: tuple[tuple[str, Any], ...],
  backend: str,
  causal: bool,
  exact: bool,
) -> tuple[jax.Array, jax.Array]:
  options = dataclasses.replace(
    arrays, k_scale=kv.k_scale, v_scale=kv.v_scale, **dict(numbers)
  )
  call: dict[str, Any] = {
    "options": options,
    "page_offset": layer * kv.num_pages,
    "backend": backend,
  }
  if kv.value_dim is not None:
    call["value_dim"] = kv.value_dim
  rectangle, packed = _rectangle, _packed
  if not causal:
    rectangle = cross_attention.attend_rectangle
    packed = cross_attention.attend_packed
  elif exact:
    rectangle, packed = _exact_rectangle, _exact_packed
  if not isinstance(view, PackedView):
    return rectangle(kv, view, q, call)
  # Single tokens as in a decode step, then packed queries.
  num_single = rows_of(view.decode).page_table.shape[0]
  out, lse = rectangle(kv, view.decode, q[0, :num_single, None], call)
  out, lse = out[:, 0], lse[:, 0]
  if view.prefill is not None:
    more = packed(kv, view.prefill, q[0, num_single:], call)
    out = jnp.concatenate([out, more[0]])
    lse = jnp.concatenate([lse, more[1]])
  return out[None], lse[None]


def _pools(kv: KVPages) -> tuple[jax.Array, ...]:
  """Keys and values, or latents."""
  return (kv.k,) if kv.v is None else (kv.k, kv.v)


def _rectangle(
  kv: KVPages, view: View | FreshView, q: jax.Array, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Queries [B, T, H, D]."""
  if q.shape[1] == 1 and call["options"].tree_mask is None:
    out, lse = _attend_single(kv, view, q[:, 0], call)
    return out[:, None], lse[:, None]
  rows = rows_of(view)
  attention: Callable[..., Any] = kernels.paged_attention_padded
  if kv.v is None:
    attention = kernels.mla_attention_padded
  return attention(
    q, *_pools(kv), rows.page_table, rows.starts, rows.counts, **call
  )


def _packed(
  kv: KVPages, rows: View, q: jax.Array, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Queries [C, H, D] that stand one row after another."""
  begins = jnp.zeros((1,), jnp.int32)
  ends = jnp.cumsum(rows.counts, dtype=jnp.int32)
  attention: Callable[..., Any] = kernels.paged_attention
  if kv.v is None:
    attention = kernels.mla_attention
  return attention(
    q,
    *_pools(kv),
    rows.page_table,
    rows.starts + rows.counts,
    jnp.concatenate([begins, ends]),
    **call,
  )


def _attend_single(
  kv: KVPages, view: View | FreshView, q: jax.Array, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """One query a row, q [B, H, D]."""
  rows = rows_of(view)
  lengths = decode_lengths(rows)
  if kv.v is None:
    out, lse = kernels.mla_decode(q, kv.k, rows.page_table, lengths, **call)
  elif rows.shared is not None and call["options"].window is None:
    shared = rows.shared
    if not isinstance(view, FreshView):  # Rows may have changed since `share`.
      shared = shared.refreshed(
        rows.page_table, lengths, page_size=kv.page_size
      )
    out, lse = kernels.cascade_decode(q, kv.k, kv.v, shared, **call)
  else:
    out, lse = kernels.paged_decode(
      q, kv.k, kv.v, rows.page_table, lengths, plan=rows.plan, **call
    )
  return out, jnp.where((rows.counts > 0)[:, None], lse, -jnp.inf)


def _exact_rectangle(
  kv: KVPages, view: View | FreshView, q: jax.Array, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Queries [B, T, H, D], with the same bits in every call."""
  sequences = _sequences(kv, rows_of(view))
  return exact_attention.attend_rectangle(sequences, q, call)


def _exact_packed(
  kv: KVPages, rows: View, q: jax.Array, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Queries [C, H, D], with the same bits in every call."""
  return exact_attention.attend_packed(_sequences(kv, rows), q, call)


def _sequences(kv: KVPages, rows: View) -> exact_attention.TokenRows:
  return exact_attention.TokenRows(
    _pools(kv), rows.page_table, rows.starts, rows.counts
  )
