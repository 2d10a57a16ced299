"""Runs a `flax.nnx` decoder on the paged memory without changing its code."""

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv import CacheConfig
from jaxkv._src.arrays.no_mesh import no_mesh
from jaxkv._src.integrations import packages
from jaxkv.kv import Batch
from jaxkv.kv import LayerMemory
from jaxkv.kv import LayerPlan
from jaxkv.kv import plan_layers

Replaced = type | tuple[type, str] | str
"""The key of a method to replace, see `paged_module`."""


@dataclasses.dataclass(frozen=True)
class PagedModule:
  """A decoder whose layers read and write the paged memory.

  Attributes:
    graphdef: the decoder's structure.
    params: the decoder's variables, the first argument of `model`. They are one
      `nnx` state, or a tuple of several.
    plan: the layer group and the memory layer of each decoder layer.
    num_kv_heads: K, the number of key-value heads.
    head_dim: D, elements of a key.
    dtype: the dtype of keys and values.
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
  methods: Mapping[Replaced, Callable[..., Any]]

  def cache_config(self, **sizes: Any) -> CacheConfig:
    """Sizes a cache, see `jaxkv.kv.LayerPlan.cache_config`."""
    return self.plan.cache_config(**sizes)

  def init_kv(self, config: CacheConfig) -> Any:
    """Returns pages of zeros for all layers, see `LayerPlan.init_kv`."""
    return self.plan.init_kv(
      config,
      num_kv_heads=self.num_kv_heads,
      head_dim=self.head_dim,
      dtype=self.dtype,
    )

  def model(self, params: Any, batch: Batch, kv: Any) -> tuple[jax.Array, Any]:
    """Calls the decoder, with the signature of `jaxkv.rollout.Model`.

    The decoder is traced with jax's default dtype and rank promotion. It is
    traced without a mesh, because the one row of packed tokens cannot be
    sharded.
    """
    nnx = packages.nnx()
    memory = LayerMemory(self.plan, batch, kv)
    states = params if type(params) is tuple else (params,)
    module = bind(nnx.merge(self.graphdef, *states), self.methods, memory)
    # The decoder may need promotions that the caller's settings forbid.
    with (
      jax.numpy_dtype_promotion("standard"),
      jax.numpy_rank_promotion("allow"),
      no_mesh(),
    ):
      logits = self.call(module, memory, batch.tokens, batch.positions)
    return memory.logits(logits), memory.kv


def paged_module(
  module: Any,
  *,
  call: Callable[..., Any],
  methods: Mapping[Replaced, Callable[..., Any]],
  windows: Sequence[int | None],
  num_kv_heads: int,
  head_dim: int,
  dtype: Any = jnp.bfloat16,
) -> PagedModule:
  """Adapts a decoder of `flax.nnx` to the paged memory.

  The decoder itself does not change, because each trace merges a copy of it and
  replaces only the methods of the copy.

  Args:
    module: the decoder.
    call: runs the module: `(module, memory, tokens, positions) -> logits`.
      Tokens and positions are int32[1, C], and padding has position 0. Logits
      are [1, C, V], or [1, X, V] after `memory.pick`, see `LayerMemory`.
    methods: maps the methods to replace to functions `(layer, memory, *args,
      **kwargs)`. A key is a class, or the path of a layer such as
      "layers.0.mlp", to replace `__call__`; or `(Class, "f")`, to replace the
      method `f`. `memory` is a `LayerMemory`; the arguments after it and the
      result are those of the method. A function can call the original method as
      `super(type(layer), layer).__call__`.
    windows: the sliding window of each layer, in the order in which the layers
      attend; None for full attention.
    num_kv_heads: K, the number of key-value heads.
    head_dim: D, elements of a key.
    dtype: the dtype of keys and values, as in `jaxkv.kv.init`.

  Returns:
    The adapted decoder, for `jaxkv.rollout`.

  Raises:
    ImportError: flax is not installed.
    ValueError: `windows` is empty, or a key of `methods` matches no layer.
  """
  nnx = packages.nnx()
  layers = list(nnx.iter_modules(module))
  # A key that matches nothing would leave the original attention in place.
  for key in methods:
    if not any(_matches(key, path, layer) for path, layer in layers):
      class_names = sorted({type(layer).__name__ for _, layer in layers})
      raise ValueError(
        f"`methods` must name layers of the decoder, got {key!r}; its layers "
        f"are {', '.join(class_names)}."
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
  module: Any,
  methods: Mapping[Replaced, Callable[..., Any]],
  memory: LayerMemory,
) -> Any:
  """Replaces methods of a module's layers, in place.

  Args:
    module: the module to change.
    methods: see `paged_module`.
    memory: the second argument of the functions in `methods`.

  Returns:
    The module.
  """
  nnx = packages.nnx()
  for path, layer in list(nnx.iter_modules(module)):
    methods_of_layer = {
      key[1] if isinstance(key, tuple) else "__call__": _bound(method, memory)
      for key, method in methods.items()
      if _matches(key, path, layer)
    }
    if methods_of_layer:
      cls = type(layer)
      # Each layer gets its own subclass, because Python looks up `__call__` on
      # the class, and other instances must keep the original method.
      # `object.__setattr__` bypasses `Module.__setattr__`, which does not
      # accept a class.
      object.__setattr__(
        layer, "__class__", type(cls.__name__, (cls,), methods_of_layer)
      )
  return module


def _matches(key: Replaced, path: tuple[Any, ...], layer: Any) -> bool:
  if isinstance(key, str):
    return key == ".".join(map(str, path))
  return isinstance(layer, key[0] if isinstance(key, tuple) else key)


def _bound(
  replacement: Callable[..., Any], memory: LayerMemory
) -> Callable[..., Any]:
  def method(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return replacement(layer, memory, *args, **kwargs)

  return method
