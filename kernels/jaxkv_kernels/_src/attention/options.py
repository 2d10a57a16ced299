"""Options of attention calls, as passed by the caller and as checked."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv_kernels._src import check


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
  """Options of an attention call. All are optional.

  `scale`, `soft_cap` and `alibi_slopes` apply to a logit in this order. Keys
  that the query must not see are masked after that.

  The options are a pytree, in which `soft_cap` is static and all other fields
  are leaves. A Python number in `scale` or `window` is a constant of the
  compiled program, unless the options are an argument of a jitted function.

  There are H query heads of size D, and K key-value heads. The pools have N
  pages of S tokens. B rows have T queries each. X is any number.

  Attributes:
    scale: factor of the logits; 1 / sqrt(D) if None.
    soft_cap: c > 0 turns a logit x into c * tanh(x / c).
    window: a query at position p sees positions p - window + 1 .. p.
    sinks: one logit per head, only in the denominator of the softmax.
    alibi_slopes: a query at position p adds slope * (j - p) to its logit with
      the key at position j.
    k_scale: dequantization factors of the stored keys: one for each key-value
      head, or one for each page, head and token. Except for latents, requires
      `v_scale`.
    v_scale: the same for the stored values.
    tree_mask: visibility among the queries of a row, such as a tree of draft
      tokens. For j < X, query t of row b sees the key of query j only if j <= t
      and `tree_mask[b, t, j]`; `tree_mask[b, t, t]` may be False. The mask does
      not apply to other keys.

  Examples:
    >>> AttentionOptions(window=4096, soft_cap=50.0).window
    4096
  """

  scale: jax.Array | float | None = None  # float or float[]
  soft_cap: float | None = dataclasses.field(
    default=None, metadata={"static": True}
  )
  window: jax.Array | int | None = None  # int or int32[]
  sinks: jax.Array | None = None  # float[H]
  alibi_slopes: jax.Array | None = None  # float[H]
  k_scale: jax.Array | None = None  # float32[K] or float32[N, K, S]
  v_scale: jax.Array | None = None  # float32[K] or float32[N, K, S]
  tree_mask: jax.Array | None = None  # bool[B, T, X]; packed: bool[T, X]

  def numbers(self) -> dict[str, Any]:
    """Returns the fields that are Python or NumPy scalars, by name."""
    fields = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
    kinds = (int, float, np.generic)
    return {name: value for name, value in fields if isinstance(value, kinds)}

  def refuse(self, reason: str, *names: str) -> None:
    """Raises `ValueError` unless all named fields are None.

    Args:
      reason: the end of the message: a reason, or what to do instead.
      *names: names of fields.
    """
    for name in names:
      value = getattr(self, name)
      if value is not None:
        check.refuse(ValueError, f"options.{name}", "None", value, reason)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallOptions(AttentionOptions):
  """Checked options of one call, with defaults filled in, for backends.

  Sinks, slopes and factors are float32. A `window` is an int of at least 1, or
  int32[]. `k_scale` and `v_scale` are both arrays or both None.

  Attributes:
    page_offset: added to every page id, to select a layer of the pool.
    scale: factor of the logits.
    tree_starts: the position of each row's first key to which `tree_mask`
      applies; None without a mask, or until `api` sets it.
    value_dim: Dv of latent attention, in which a value is the first Dv elements
      of its key, and `v_pages` is `k_pages`. None for other attention.
    interpret: for `pallas_call(interpret=...)`.
  """

  page_offset: jax.Array  # int32[]
  scale: jax.Array | float = 1.0  # float or float[]
  tree_starts: jax.Array | None = None  # int32[B]
  value_dim: int | None = None
  interpret: Any = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCall:
  """The checked arguments of a call, with queries padded to [B, T].

  Attributes:
    q: [B, T, H, D]. For a decode step, [B, H, D] until a backend is chosen.
    k_pages: in a format of `jaxkv_kernels/_src/quantization.py`.
    v_pages: in the format of `k_pages`.
    page_table: unused entries may be any number.
    starts: the position of each row's first query; -1 for a decode step's row
      of length 0. Positions may exceed M * S, the tokens of a row's pages.
    counts: queries of each row.
    options: checked, with defaults filled in.
    query_tile: the number of columns to compute at a time, or None. Only
      backends with `TAKES_QUERY_TILES` read it.
  """

  q: jax.Array
  k_pages: jax.Array  # [N, K, S, D]
  v_pages: jax.Array  # [N, K, S, Dv]
  page_table: jax.Array  # int32[B, M]
  starts: jax.Array  # int32[B]
  counts: jax.Array  # int32[B]
  options: CallOptions
  query_tile: int | None = None

  @property
  def value_dim(self) -> int:
    """Dv, the size of a value."""
    return self.options.value_dim or self.v_pages.shape[3]

  @property
  def capacity(self) -> int:
    """M * S, the maximum number of tokens of a row of the page table."""
    return self.page_table.shape[1] * self.k_pages.shape[2]

  @property
  def is_query(self) -> jax.Array:
    """bool[B, T], True for columns that hold a query."""
    columns = jnp.arange(self.q.shape[1], dtype=jnp.int32)
    return columns[None] < self.counts[:, None]


def check_options(
  options: AttentionOptions | None,
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  *,
  page_offset: jax.Array | int,
  value_dim: int | None = None,
  interpret: Any = False,
) -> CallOptions:
  """Checks the options of a call and fills in defaults.

  Of `tree_mask`, only the device is checked; `api` checks its dtype and
  shape. `q`, the pools, `value_dim` and `interpret` are already checked.

  Raises:
    TypeError: an option has a type or dtype that is not supported.
    ValueError: an option has a shape or value that is not supported.
  """
  options = as_options(options)
  heads, dim = q.shape[-2:]
  check.scalar("page_offset", page_offset, np.integer)
  if options.scale is not None:
    check.scalar("options.scale", options.scale, np.floating)
  check.soft_cap(options.soft_cap, "options.soft_cap")
  check.window(options.window, "options.window")
  check.per_head("options.sinks", options.sinks, heads)
  check.per_head("options.alibi_slopes", options.alibi_slopes, heads)
  check.scales("options.k_scale", options.k_scale, k_pages)
  check.scales("options.v_scale", options.v_scale, v_pages)
  fields = {
    f.name: getattr(options, f.name) for f in dataclasses.fields(options)
  }
  check.same_devices(
    "q",
    q,
    page_offset=page_offset,
    **{f"options.{name}": value for name, value in fields.items()},
  )
  if (options.k_scale is None) != (options.v_scale is None):
    missing = "k_scale" if options.k_scale is None else "v_scale"
    hint = "give both scales, or neither"
    check.refuse(ValueError, f"options.{missing}", "an array", None, hint)
  for name in ("sinks", "alibi_slopes", "k_scale", "v_scale"):
    if fields[name] is not None:
      fields[name] = jnp.asarray(fields[name], jnp.float32)
  fields["scale"] = dim**-0.5 if options.scale is None else options.scale
  # Windows are int32 even in 64-bit mode, because positions are.
  if options.window is not None and not isinstance(options.window, int):
    fields["window"] = jnp.asarray(options.window, jnp.int32)
  return CallOptions(
    page_offset=jnp.asarray(page_offset, jnp.int32),
    value_dim=value_dim,
    interpret=interpret,
    **fields,
  )


def as_options(options: AttentionOptions | None) -> AttentionOptions:
  """Returns the caller's options; the defaults for None."""
  if options is None:
    return AttentionOptions()
  if not isinstance(options, AttentionOptions):
    raise TypeError(
      "`options` must be an AttentionOptions or None, got"
      f" {type(options).__name__}; make one with AttentionOptions(...)."
    )
  return options
