"""A `flax.nnx` decoder as a model of rollouts, without a change to its code."""

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv.kv
from jaxkv import CacheConfig
from jaxkv._src.integrations import packages
from jaxkv._src.integrations.layer_memory import LayerMemory
from jaxkv._src.integrations.layer_memory import LayerPlan
from jaxkv._src.integrations.layer_memory import plan_layers
from jaxkv._src.integrations.no_mesh import no_mesh
from jaxkv.kv import KVPages
from jaxkv.rollout import Rows

Replacement = Callable[..., Any]
"""`(layer, memory, *args, **kwargs)`: called in place of a layer's method, with
its arguments, and a `LayerMemory`; returns what the method would."""

Replaced = type | tuple[type, str] | str
"""A class, of which `__call__` is replaced; a class and a method; or the path
of one layer, such as "final_norm" or "layers.0.mlp", `__call__` as well."""


@dataclasses.dataclass(frozen=True)
class PagedModule:
  """A decoder and what its layers do with the paged memory.

  Attributes:
    graphdef: the decoder's structure.
    params: its variables, the first argument of `model`; also as a tuple of
      several states.
    plan: which layer uses which group.
    num_kv_heads: K.
    head_dim: D.
    dtype: of the keys and values.
    call: see `paged_module`.
    methods: see `paged_module`.
  """

  graphdef: Any
  params: Any
  plan: LayerPlan
  num_kv_heads: int
  head_dim: int
  dtype: Any
  call: Callable[..., Any]
  methods: Mapping[Replaced, Replacement]

  def cache_config(self, **sizes: Any) -> CacheConfig:
    """The sizes of a cache for the decoder's layer groups.

    Args:
      **sizes: of `jaxkv.CacheConfig`, all but `groups`.
    """
    return CacheConfig(groups=self.plan.kinds, **sizes)

  def init_kv(self, config: CacheConfig) -> KVPages:
    """Pages of zeros for all layers of the decoder."""
    return jaxkv.kv.init(
      config,
      num_layers=self.plan.num_memory_layers,
      num_kv_heads=self.num_kv_heads,
      head_dim=self.head_dim,
      dtype=self.dtype,
    )

  def model(
    self,
    params: Any,
    tokens: jax.Array,
    positions: jax.Array,
    kv: KVPages,
    views: Any,
    columns: jax.Array,
    rows: Rows,
  ) -> tuple[jax.Array, KVPages]:
    """A `jaxkv.rollout.Model`.

    The decoder is traced with jax's default promotions, and in no mesh: a call
    has one row of packed tokens, which no mesh axis divides.
    """
    nnx = packages.nnx()
    memory = LayerMemory(kv, views, columns, rows, self.plan)
    states = params if type(params) is tuple else (params,)
    module = bind(nnx.merge(self.graphdef, *states), self.methods, memory)
    with (
      jax.numpy_dtype_promotion("standard"),
      jax.numpy_rank_promotion("allow"),
      no_mesh(),
    ):
      logits = self.call(module, memory, tokens, positions)
    return memory.logits(logits), memory.kv


def paged_module(
  module: Any,
  *,
  call: Callable[..., Any],
  methods: Mapping[Replaced, Replacement],
  windows: Sequence[int | None],
  num_kv_heads: int,
  head_dim: int,
  dtype: Any = jnp.bfloat16,
) -> PagedModule:
  """Says how a decoder of `flax.nnx` is called, and how its layers attend.

  The decoder is not changed. Each trace merges a copy of it, and the copy's
  layers have the methods given here.

  Args:
    module: the decoder.
    call: `(module, memory, tokens int32[1, C], positions int32[1, C]) -> logits
      [1, C, V]`, or [1, X, V] if a layer has called `memory.pick`. Positions of
      padding are 0.
    methods: what is called in place of methods of its layers: of `__call__` of
      a class, of another method of one, `(Class, "method")`, or of `__call__`
      of the layer at a path. `super(type(layer), layer).__call__` is still the
      method that was replaced.
    windows: of each layer, in the order in which they attend; None for all
      tokens.
    num_kv_heads: K.
    head_dim: D.
    dtype: of the keys and values, as in `jaxkv.kv.init`.

  Returns:
    The decoder, for `jaxkv.rollout`.

  Raises:
    ImportError: flax is not installed.
    ValueError: there is no layer, or no layer is of a class of `methods`.
  """
  nnx = packages.nnx()
  layers = list(nnx.iter_modules(module))
  for key in methods:
    if not any(_is_meant(key, path, layer) for path, layer in layers):
      there = sorted({type(layer).__name__ for _, layer in layers})
      raise ValueError(
        f"`methods` must name layers of the decoder, got {key!r}, of which it "
        f"has none; it has {', '.join(there)}."
      )
  graphdef, params = nnx.split(module)
  return PagedModule(
    graphdef=graphdef,
    params=params,
    plan=plan_layers(tuple(windows)),
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    dtype=dtype,
    call=call,
    methods=dict(methods),
  )


def bind(
  module: Any, methods: Mapping[Replaced, Replacement], memory: LayerMemory
) -> Any:
  """Gives the layers of a module of one's own other methods.

  Args:
    module: changed in place.
    methods: see `paged_module`.
    memory: their second argument.

  Returns:
    The module.
  """
  nnx = packages.nnx()
  for path, layer in list(nnx.iter_modules(module)):
    own = {
      key[1] if isinstance(key, tuple) else "__call__": _bound(method, memory)
      for key, method in methods.items()
      if _is_meant(key, path, layer)
    }
    if own:
      kind = type(layer)
      # Past `Module.__setattr__`, which takes no such thing for an attribute.
      object.__setattr__(layer, "__class__", type(kind.__name__, (kind,), own))
  return module


def _is_meant(key: Replaced, path: tuple[Any, ...], layer: Any) -> bool:
  if isinstance(key, str):
    return key == ".".join(map(str, path))
  return isinstance(layer, key[0] if isinstance(key, tuple) else key)


def _bound(replacement: Replacement, memory: LayerMemory) -> Callable[..., Any]:
  def method(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return replacement(layer, memory, *args, **kwargs)

  return method
