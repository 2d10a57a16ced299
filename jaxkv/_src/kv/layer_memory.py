"""Gives each layer of a model its view and its part of the pages."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.group_kinds import SlidingWindow
from jaxkv._src.cache.pool_sizes import sized_config
from jaxkv._src.kv.attend import attend
from jaxkv._src.kv.kv_pages import check_config
from jaxkv._src.kv.kv_pages import init
from jaxkv._src.kv.layer_groups import LayerGroups
from jaxkv._src.kv.layer_groups import group_layers
from jaxkv._src.kv.view import Batch
from jaxkv._src.kv.write import write


@dataclasses.dataclass(frozen=True)
class LayerPlan:
  """The layer groups and memory layers of a model; see `plan_layers`.

  Attributes:
    windows: the window of each layer, in the order in which the layers attend;
      None for full attention.
    groups: the layer groups, and the location of each layer in them.
  """

  windows: tuple[int | None, ...]
  groups: LayerGroups

  @property
  def kinds(self) -> tuple[GroupKind, ...]:
    """The kind of each group, with its pool."""
    return self.groups.kinds

  def cache_config(
    self, *, num_slots: int, max_length: int, **options: Any
  ) -> CacheConfig:
    """Sizes the pools of a cache, as `jaxkv.models.cache_config` does.

    Args:
      num_slots: B, the maximum number of sequences at a time.
      max_length: the maximum number of tokens of a sequence.
      **options: other arguments of `jaxkv.models.cache_config`, except `dtype`
        and `record_experts`. `memory` needs the option `page_bytes`.
    """
    return sized_config(
      self.kinds, num_slots=num_slots, max_length=max_length, **options
    )

  def init_kv(self, config: CacheConfig, **sizes: Any) -> Any:
    """Makes pages of zeros for all layers.

    Args:
      config: the sizes of a cache with the groups of the plan.
      **sizes: arguments of `jaxkv.kv.init` besides `num_layers` and `group`.

    Returns:
      The `KVPages`; with several pools, a tuple with those of each pool.

    Raises:
      TypeError: `config` is not a CacheConfig, or a size is missing.
      ValueError: `config` has other groups, or a size is out of range.
    """
    check_config(config)
    self.groups.check(config, "make the cache with plan.cache_config")
    # All groups of a pool have pages of the same shape, so one serves for all.
    pools = tuple(
      init(
        config, num_layers=self.groups.num_layers[group], group=group, **sizes
      )
      for group in self.groups.by_pool
    )
    return pools[0] if len(pools) == 1 else pools


def plan_layers(windows: Sequence[int | None]) -> LayerPlan:
  """Divides layers into a group for each window, in the order of first layers.

  Groups with equally many layers share a pool of pages.

  Args:
    windows: the window of each layer, in the order in which the layers attend;
      None for full attention.

  Raises:
    ValueError: `windows` is empty.

  Examples:
    >>> plan = plan_layers((4, 4, None, 4, 4, None))
    >>> [kind.pool for kind in plan.kinds], plan.groups.num_layers
    ([0, 1], (4, 2))
    >>> plan.cache_config(num_slots=3, max_length=64, page_size=4).num_pages
    (24, 52)
  """
  if not windows:
    raise ValueError("`windows` must have an entry for each layer, got none.")
  kinds = [
    FullAttention() if window is None else SlidingWindow(window)
    for window in windows
  ]
  return LayerPlan(tuple(windows), group_layers(kinds, [None] * len(kinds)))


class LayerMemory:
  """The paged memory in one call of a model; `help(jaxkv.kv)` has an example.

  Each layer calls `attend` once, in order. `attend` mutates the object, so do
  not call it inside a nested `scan`, `remat` or `jit`, and create a new object
  in each trace. Letters: C columns of packed tokens, X columns that get logits,
  H query heads, K key-value heads, D head size, E embedding width, V vocabulary
  size.

  Attributes:
    batch: the tokens of the call.
  """

  def __init__(self, plan: LayerPlan, batch: Batch, kv: Any):
    if len(batch.views) != len(plan.kinds):
      raise ValueError(
        f"`batch.views` must have a view for each of the {len(plan.kinds)} "
        f"groups of the plan, got {len(batch.views)}; make the cache with "
        "plan.cache_config."
      )
    self._pools = kv if isinstance(kv, tuple) else (kv,)
    num_pools = len(plan.groups.by_pool)
    if len(self._pools) != num_pools:
      raise ValueError(
        f"`kv` must have the {num_pools} pools of the plan, got "
        f"{len(self._pools)}; make it with plan.init_kv."
      )
    self.batch = batch
    self._plan = plan
    self._layer = 0
    self._has_picked = False

  @property
  def kv(self) -> Any:
    """The pages, as `LayerPlan.init_kv` returns them; `attend` changes them."""
    return self._pools[0] if len(self._pools) == 1 else self._pools

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
    group, layer = self._plan.groups.locations[self._layer]
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
    # Other pools stay as they are, so that their writes stay in place.
    pool = self._plan.kinds[group].pool
    pages = write(self._pools[pool], view, layer, k, v)
    self._pools = (*self._pools[:pool], pages, *self._pools[pool + 1 :])
    return attend(pages, view, layer, q, options=attention, **options)

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
