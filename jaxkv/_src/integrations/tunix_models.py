"""Adapts the decoders of tunix to the paged memory."""

import functools
from typing import Any

from jaxkv._src.integrations import packages
from jaxkv._src.integrations.paged_module import PagedModule
from jaxkv._src.integrations.paged_module import paged_module
from jaxkv.kv import LayerMemory

_SUPPORTED = ("llama3", "qwen2", "qwen3", "gemma3")


def paged_module_of(module: Any, *, dtype: Any = None) -> PagedModule:
  """Adapts a decoder of tunix for rollouts.

  Supports Llama 3, Qwen2, Qwen3 (also with experts) and Gemma 3 without images.
  Two settings for training have no effect in rollouts: `use_flash_attention`
  and rematerialization.

  Args:
    module: an instance of tunix's `Llama3`, `Qwen2`, `Qwen3` or `Gemma3`, with
      or without LoRA.
    dtype: the dtype of keys and values; None for `dtype` of the module's
      config, or for the dtype of the embedding if the config has none.

  Raises:
    ImportError: tunix is not installed.
    ValueError: the module is not supported.
  """
  # With LoRA the module's class is derived from tunix's class, so base classes
  # are searched, too.
  module_names = [cls.__module__ for cls in type(module).__mro__]
  for name in _SUPPORTED:
    module_name = f"tunix.models.{name}.model"
    if module_name in module_names:
      return _ADAPTERS[name](module, packages.of_tunix(module_name), dtype)
  raise ValueError(
    f"`module` must be one of tunix's {', '.join(_SUPPORTED)}, got "
    f"{type(module).__name__} of {module_names[0]}; describe it with "
    "jaxkv.integrations.nnx.paged_module."
  )


def _block(layer: Any, memory: LayerMemory, *args: Any, **kwargs: Any) -> Any:
  """Calls a layer without rematerialization."""
  del memory
  return layer.block(*args, **kwargs)


def _norm_of_picked(layer: Any, memory: LayerMemory, x: Any) -> Any:
  """Applies the final norm to the columns that get logits."""
  # The output layer follows, so it computes no logits of other columns.
  norm: Any = super(type(layer), layer)
  return norm.__call__(memory.pick(x))


def _call(module: Any, memory: LayerMemory, tokens: Any, positions: Any) -> Any:
  del memory
  return module(tokens, positions, None, None)[0]


def _adapt(
  module: Any,
  library: Any,
  dtype: Any,
  attention: Any,
  windows: list[int | None] | None = None,
) -> PagedModule:
  config = module.config
  if dtype is None:
    dtype = module.embedder.input_embedding[...].dtype
    dtype = getattr(config, "dtype", dtype)
  layer = module.layers[0]
  # Rematerialization would call `block` in a nested trace, in which `attend`
  # must not mutate the memory. So `_block` calls it without rematerialization.
  remat_classes = [
    cls
    for cls in vars(library).values()
    if isinstance(cls, type)
    and hasattr(cls, "block")
    and any(isinstance(part, cls) for part in (layer, layer.mlp))
  ]
  return paged_module(
    module,
    call=_call,
    methods={
      library.Attention: attention,
      "final_norm": _norm_of_picked,
      **dict.fromkeys(remat_classes, _block),
    },
    windows=windows or [None] * config.num_layers,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    dtype=dtype,
  )


def _rotary(module: Any, library: Any, dtype: Any) -> PagedModule:
  """Adapts Llama 3 or Qwen3."""

  def attention(
    layer: Any, memory: LayerMemory, x: Any, positions: Any, *_: Any, **__: Any
  ) -> Any:
    def rotated(name: str) -> Any:
      out = getattr(layer, f"{name}_proj")(x)
      norm = getattr(layer, f"{name}_norm", None)
      out = out if norm is None else norm(out)
      return library.apply_rope(out, positions, head_dim=layer.head_dim)

    # tunix's attention also returns its dense cache, which is None here.
    q = rotated("q")
    k = rotated("k")
    v = layer.v_proj(x)
    return None, layer.o_proj(memory.attend(q, k, v, scale=layer.scale))

  return _adapt(module, library, dtype, attention)


def _qwen2(module: Any, library: Any, dtype: Any) -> PagedModule:
  model_dtype = module.config.dtype

  def biased(x: Any, bias: Any) -> Any:
    return x + bias[...].astype(model_dtype).reshape(x.shape[2:])

  def attention(
    layer: Any,
    memory: LayerMemory,
    x: Any,
    cache: Any,
    attn_mask: Any,
    sin: Any,
    cos: Any,
    **_: Any,
  ) -> Any:
    del cache, attn_mask
    q = biased(layer.q_proj(x), layer.q_bias)
    k = biased(layer.k_proj(x), layer.k_bias)
    v = biased(layer.v_proj(x), layer.v_bias)
    q = library.apply_rotary_embedding(q, sin, cos)
    k = library.apply_rotary_embedding(k, sin, cos)
    return None, layer.o_proj(memory.attend(q, k, v, scale=layer.scale))

  return _adapt(module, library, dtype, attention)


def _gemma3(module: Any, library: Any, dtype: Any) -> PagedModule:
  if module.vision_encoder is not None:
    raise ValueError(
      "`module` must be a Gemma3 of text alone, got one with a vision encoder; "
      "make it with vision_config=None."
    )

  def attention(
    layer: Any, memory: LayerMemory, x: Any, positions: Any, *_: Any
  ) -> Any:
    if layer.use_qkv_einsum:
      q, k, v = layer.qkv_einsum(x)
    else:
      q = layer.q_einsum(x)
      k, v = layer.kv_einsum(x)
    rotated = functools.partial(
      library.apply_rope,
      head_dim=layer.head_dim,
      base_frequency=layer.rope_base_frequency,
      scale_factor=layer.rope_scale_factor,
    )
    q = rotated(layer._query_norm(q), positions)
    k = rotated(layer._key_norm(k), positions)
    out = memory.attend(q, k, v, scale=layer.query_pre_attn_scalar)
    return None, layer.attn_vec_einsum(out)

  local = library.AttentionType.LOCAL_SLIDING
  windows = [
    layer.attn.sliding_window_size if layer.attn.attn_type == local else None
    for layer in module.layers
  ]
  return _adapt(module, library, dtype, attention, windows)


_ADAPTERS = {
  "llama3": _rotary,
  "qwen2": _qwen2,
  "qwen3": _rotary,
  "gemma3": _gemma3,
}
