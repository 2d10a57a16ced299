"""What the layers of somebody else's decoder write to and read from."""

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
  """Which layer group, and which layer of the memory, each layer uses.

  Attributes:
    windows: the window of each layer, in the order in which they attend; None
      for all tokens.
    kinds: the layer groups, for `CacheConfig.groups`.
    places: the group and the layer of the memory of each layer.
    num_memory_layers: layers of the memory: those of the largest group.
  """

  windows: tuple[int | None, ...]
  kinds: tuple[GroupKind, ...]
  places: tuple[tuple[int, int], ...]
  num_memory_layers: int


def plan_layers(windows: tuple[int | None, ...]) -> LayerPlan:
  """Groups of layers, as large as each other where that is possible.

  Groups have no page in common, so layers of different groups share a layer of
  the memory. If few layers attend to all tokens and many have a window, those
  with a window make several groups, each of which gives its own pages back.

  Args:
    windows: of each layer.

  Raises:
    ValueError: there is no layer.

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
  """The paged memory in one call of a model, held for its layers.

  The layers call `attend` one after the other, each once. It lives as long as a
  trace, and is changed by it, so a layer that calls it must not be inside of a
  `scan`, `remat` or `jit` of its own.

  Attributes:
    kv: the pages; `attend` replaces them.
    views: for each layer group, where the tokens of the call live.
    columns: int32[X], the columns that get logits.
    rows: whose token stands in each of the C columns.
    picked: whether `pick` was called.
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
    """Itself: models take the cache of a layer out of that of all layers."""
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
    """Stores the keys and values of a layer, and attends to all so far.

    The window is that of the plan.

    Args:
      q: [1, C, H, D], rotated and normalised, not scaled.
      k: [1, C, K, D], rotated and normalised.
      v: [1, C, K, D].
      scale: factor of the logits; None for 1 / sqrt(D).
      soft_cap: c > 0 turns a logit x into c * tanh(x / c).
      sinks: float[H], logits that join the softmax and have no value.

    Returns:
      [1, C, H, D], in q's dtype.

    Raises:
      ValueError: more layers attend than are planned.
    """
    if self._layer == len(self._plan.windows):
      raise ValueError(
        f"`windows` must have an entry for each layer that attends, got "
        f"{len(self._plan.windows)}; add the others."
      )
    window = self._plan.windows[self._layer]
    group, layer = self._plan.places[self._layer]
    self._layer += 1
    view = self.views[group]
    options = kernels.AttentionOptions(
      scale=scale, soft_cap=soft_cap, sinks=sinks, window=window
    )
    self.kv = write(self.kv, view, layer, k, v)
    return attend(self.kv, view, layer, q, options=options)

  def pick(self, x: jax.Array) -> jax.Array:
    """The columns that get logits, [1, C, E] to [1, X, E].

    Called before the output layer, it saves the logits of all other columns.
    """
    self.picked = True
    return x.at[:, self.columns].get(mode="clip")

  def of_columns(self, values: jax.Array) -> jax.Array:
    """Of [C, ...], such as `rows.user`, what the columns with logits have."""
    return values.at[self.columns].get(mode="clip")

  def logits(self, logits: jax.Array) -> jax.Array:
    """The logits of the columns that get some, [X, V].

    Args:
      logits: [1, X, V] after `pick`, else [1, C, V].

    Raises:
      ValueError: a planned layer has not attended.
    """
    if self._layer != len(self._plan.windows):
      raise ValueError(
        f"`windows` must have as many entries as layers attend, "
        f"{self._layer}, got {len(self._plan.windows)}; name each layer that "
        "calls `attend`, and replace the attention of all of them."
      )
    logits = jnp.asarray(logits)
    return logits[0] if self.picked else self.of_columns(logits[0])
