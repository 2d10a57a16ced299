"""Gives each layer of a model its view and its part of the pages."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels
from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.group_kinds import SlidingWindow
from jaxkv._src.kv.attend import attend
from jaxkv._src.kv.kv_pages import KVPages
from jaxkv._src.kv.view import Batch
from jaxkv._src.kv.write import write


@dataclasses.dataclass(frozen=True)
class LayerPlan:
  """The layer group and the memory layer of each decoder layer.

  A memory layer is the part of a page that one decoder layer uses.

  Attributes:
    windows: the window of each layer, in the order in which the layers attend;
      None for full attention.
    kinds: the kind of each group, for `CacheConfig.groups`.
    places: the group and the memory layer of each layer.
    num_memory_layers: the number of memory layers of a page, which is the size
      of the largest group; `num_layers` of `jaxkv.kv.init`.
  """

  windows: tuple[int | None, ...]
  kinds: tuple[GroupKind, ...]
  places: tuple[tuple[int, int], ...]
  num_memory_layers: int


def plan_layers(windows: Sequence[int | None]) -> LayerPlan:
  """Divides layers into groups, of equal size if possible.

  All layers of a group have the same window. A group has at most as many layers
  as the rarest window, so other windows can have several groups. Layers of
  different groups use the same memory layers, because no page belongs to two
  groups at a time.

  Args:
    windows: the window of each layer, in the order in which the layers attend;
      None for full attention.

  Raises:
    ValueError: `windows` is empty.

  Examples:
    >>> plan = plan_layers((4, 4, None, 4, 4, None))
    >>> len(plan.kinds), plan.num_memory_layers, plan.places[:3]
    (3, 2, ((1, 0), (1, 1), (0, 0)))
  """
  if not windows:
    raise ValueError("`windows` must have an entry for each layer, got none.")
  by_kind: dict[int | None, list[int]] = {}
  for layer, window in enumerate(windows):
    by_kind.setdefault(window, []).append(layer)
  # With this size, only the last group of a window can have unused memory
  # layers.
  group_size = min(len(layers) for layers in by_kind.values())
  kinds: list[GroupKind] = []
  locations: dict[int, tuple[int, int]] = {}
  for window in sorted(by_kind, key=lambda window: window or 0):
    layers = by_kind[window]
    for start in range(0, len(layers), group_size):
      for memory_layer, layer in enumerate(layers[start : start + group_size]):
        locations[layer] = len(kinds), memory_layer
      kinds.append(FullAttention() if window is None else SlidingWindow(window))
  return LayerPlan(
    windows=tuple(windows),
    kinds=tuple(kinds),
    places=tuple(locations[layer] for layer in range(len(windows))),
    num_memory_layers=group_size,
  )


class LayerMemory:
  """The paged memory in one call of a model; `help(jaxkv.kv)` has an example.

  Each layer calls `attend` once, in order. `attend` mutates the object, so do
  not call it inside a nested `scan`, `remat` or `jit`, and create a new object
  in each trace. Letters: C columns of packed tokens, X columns that get logits,
  H query heads, K key-value heads, D head size, E embedding width, V vocabulary
  size.

  Attributes:
    kv: the pages, which `attend` replaces.
    batch: the tokens of the call.
  """

  def __init__(self, plan: LayerPlan, batch: Batch, kv: KVPages):
    if len(batch.views) != len(plan.kinds):
      raise ValueError(
        f"`batch.views` must have a view for each of the {len(plan.kinds)} "
        f"groups of the plan, got {len(batch.views)}; make the cache with "
        "CacheConfig(groups=plan.kinds)."
      )
    self.kv = kv
    self.batch = batch
    self._plan = plan
    self._layer = 0
    self._has_picked = False

  def __getitem__(self, name: Any) -> "LayerMemory":
    """Returns `self`, because some models index their cache by layer."""
    return self

  def attend(
    self,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    **options: Any,
  ) -> jax.Array:
    """Writes the keys and values of a layer, and computes its attention.

    The layer's window comes from the `LayerPlan`.

    Args:
      q: [1, C, H, D], after any normalization and rotary embedding, not scaled.
      k: [1, C, K, D], after any normalization and rotary embedding.
      v: [1, C, K, D].
      scale: factor of the attention logits; None for 1 / sqrt(D).
      soft_cap: a cap c > 0 maps each attention logit x to c * tanh(x / c).
      sinks: float[H], an additional logit of each head's softmax.
      alibi_slopes: float[H], the slope of each head's position bias.
      **options: other arguments of `jaxkv.kv.attend`, such as `backend`.

    Returns:
      [1, C, H, D], in q's dtype.

    Raises:
      ValueError: more layers attend than the plan has.
    """
    if self._layer == len(self._plan.windows):
      raise ValueError(
        f"`windows` must have an entry for each layer that attends, got "
        f"{len(self._plan.windows)}; add the missing ones."
      )
    window = self._plan.windows[self._layer]
    group, layer = self._plan.places[self._layer]
    # Calls are counted, because a layer does not know its index.
    self._layer += 1
    view = self.batch.views[group]
    attention = kernels.AttentionOptions(
      scale=scale,
      soft_cap=soft_cap,
      sinks=sinks,
      alibi_slopes=alibi_slopes,
      window=window,
    )
    self.kv = write(self.kv, view, layer, k, v)
    return attend(self.kv, view, layer, q, options=attention, **options)

  def pick(self, x: jax.Array) -> jax.Array:
    """Selects the columns that get logits: [1, C, E] to [1, X, E].

    Call it before the output layer, to skip the logits of all other columns.
    """
    self._has_picked = True
    if self.batch.columns is None:  # All columns get logits.
      return x
    # "clip", because padding in `columns` can be out of range. The logits of
    # padding are never read.
    return x.at[:, self.batch.columns].get(mode="clip")

  def logits(self, logits: jax.Array) -> jax.Array:
    """Returns the logits of the selected columns, [X, V].

    Args:
      logits: [1, X, V] after `pick`, else [1, C, V].

    Raises:
      ValueError: a layer of the plan has not attended.
    """
    if self._layer != len(self._plan.windows):
      raise ValueError(
        "`windows` must have an entry for each layer that attends, got "
        f"{len(self._plan.windows)} for {self._layer} calls of `attend`; drop "
        "extra entries, or replace the attention of layers that made no call."
      )
    logits = jnp.asarray(logits)
    if self._has_picked or self.batch.columns is None:
      return logits[0]
    return logits[0].at[self.batch.columns].get(mode="clip")
