"""The interface between an adapted decoder's layers and the paged memory."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv import FullAttention
from jaxkv import GroupKind
from jaxkv import SlidingWindow
from jaxkv import kernels
from jaxkv.kv import KVPages
from jaxkv.kv import attend
from jaxkv.kv import write
from jaxkv.rollout import Rows


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
      of the largest group.
  """

  windows: tuple[int | None, ...]
  kinds: tuple[GroupKind, ...]
  places: tuple[tuple[int, int], ...]
  num_memory_layers: int


def plan_layers(windows: tuple[int | None, ...]) -> LayerPlan:
  """Divides layers into groups of equal size if possible.

  All layers of a group have the same window. The size of a group is the number
  of layers of the rarest window, so other windows can have several groups.
  Layers of different groups use the same memory layers, because no page belongs
  to two groups at a time.

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
  size = min(len(layers) for layers in by_kind.values())
  kinds: list[GroupKind] = []
  places: dict[int, tuple[int, int]] = {}
  for window in sorted(by_kind, key=lambda window: window or 0):
    layers = by_kind[window]
    for first in range(0, len(layers), size):
      for number, layer in enumerate(layers[first : first + size]):
        places[layer] = len(kinds), number
      kinds.append(FullAttention() if window is None else SlidingWindow(window))
  return LayerPlan(
    windows=tuple(windows),
    kinds=tuple(kinds),
    places=tuple(places[layer] for layer in range(len(windows))),
    num_memory_layers=size,
  )


class LayerMemory:
  """The paged memory in one call of a model.

  Each layer calls `attend` once, in order. The object lives for one trace, and
  each call mutates it. So calls inside a nested `scan`, `remat` or `jit` are
  not allowed. Letters: C columns of packed tokens, X columns that get logits,
  H query heads, K key-value heads, D head size, E embedding width, V vocabulary
  size.

  Attributes:
    kv: the pages, which `attend` replaces.
    views: the view of the call's tokens for each layer group.
    columns: int32[X], the columns that get logits.
    rows: for each of the C columns, the sequence and its user data.
    picked: True after a call of `pick`.
  """

  def __init__(
    self,
    kv: KVPages,
    views: Any,
    columns: jax.Array,
    rows: Rows,
    plan: LayerPlan,
  ):
    self.kv = kv
    self.views = views
    self.columns = columns
    self.rows = rows
    self.picked = False
    self._plan = plan
    self._layer = 0

  def __getitem__(self, name: Any) -> "LayerMemory":
    """Returns itself, because models index their cache by layer."""
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
  ) -> jax.Array:
    """Writes a layer's keys and values, and attends to all tokens so far.

    The layer's window comes from the `LayerPlan`.

    Args:
      q: [1, C, H, D], rotated and normalized, not scaled.
      k: [1, C, K, D], rotated and normalized.
      v: [1, C, K, D].
      scale: factor of the attention logits; None for 1 / sqrt(D).
      soft_cap: a cap c > 0 maps each attention logit x to c * tanh(x / c).
      sinks: float[H], an additional logit of each head's softmax.

    Returns:
      [1, C, H, D], in q's dtype.

    Raises:
      ValueError: more layers attend than the plan has.
    """
    if self._layer == len(self._plan.windows):
      raise ValueError(
        f"`windows` must have an entry for each layer that attends, got "
        f"{len(self._plan.windows)}; add the others."
      )
    window = self._plan.windows[self._layer]
    group, layer = self._plan.places[self._layer]
    # Calls are counted, because a layer does not know its index.
    self._layer += 1
    view = self.views[group]
    options = kernels.AttentionOptions(
      scale=scale, soft_cap=soft_cap, sinks=sinks, window=window
    )
    self.kv = write(self.kv, view, layer, k, v)
    return attend(self.kv, view, layer, q, options=options)

  def pick(self, x: jax.Array) -> jax.Array:
    """Selects the columns that get logits: [1, C, E] to [1, X, E].

    Call it before the output layer, to skip the logits of all other columns.
    """
    self.picked = True
    # "clip", because padding in `columns` can be out of range. The logits of
    # padding are never read.
    return x.at[:, self.columns].get(mode="clip")

  def of_columns(self, values: jax.Array) -> jax.Array:
    """Selects the columns that get logits: [C, ...] to [X, ...]."""
    return values.at[self.columns].get(mode="clip")

  def logits(self, logits: jax.Array) -> jax.Array:
    """Returns the logits of the selected columns, [X, V].

    Args:
      logits: [1, X, V] after `pick`, else [1, C, V].

    Raises:
      ValueError: a layer of the plan has not attended.
    """
    if self._layer != len(self._plan.windows):
      raise ValueError(
        f"`windows` must have as many entries as layers attend, "
        f"{self._layer}, got {len(self._plan.windows)}; name each layer that "
        "calls `attend`, and replace the attention of all of them."
      )
    logits = jnp.asarray(logits)
    return logits[0] if self.picked else self.of_columns(logits[0])
