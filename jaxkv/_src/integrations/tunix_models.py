"""How the decoders of tunix attend to the paged memory."""

import functools
from typing import Any

from jaxkv._src.integrations import packages
from jaxkv._src.integrations.layer_memory import LayerMemory
from jaxkv._src.integrations.paged_module import PagedModule
from jaxkv._src.integrations.paged_module import paged_module

_KNOWN = ("llama3", "qwen2", "qwen3", "gemma3")


def paged_module_of(module: Any, *, dtype: Any = None) -> PagedModule:
  """A decoder of tunix as a model of rollouts.

  Known are Llama 3, Qwen2, Qwen3 (its experts included) and Gemma 3 without
  images. Attention is jaxkv's: `use_flash_attention` and rematerialization,
  which are for training, have no effect.

  Args:
    module: an instance of tunix's `Llama3`, `Qwen2`, `Qwen3` or `Gemma3`, with
      or without LoRA.
    dtype: of keys and values; None for that of the embedding.

  Raises:
    ImportError: tunix is not installed.
    ValueError: it is another module.
  """
  # With LoRA, a model is of a class derived from tunix's.
  homes = [kind.__module__ for kind in type(module).__mro__]
  for name in _KNOWN:
    home = f"tunix.models.{name}.model"
    if home in homes:
      return _PAGED[name](module, packages.of_tunix(home), dtype)
  raise ValueError(
    f"`module` must be one of tunix's {', '.join(_KNOWN)}, got "
    f"{type(module).__name__} of {homes[0]}; describe it with "
    "jaxkv.integrations.nnx.paged_module."
  )


def _plain(layer: Any, memory: LayerMemory, *args: Any, **kwargs: Any) -> Any:
  """A layer without rematerialization."""
  del memory
  return layer.block(*args, **kwargs)


def _picked(layer: Any, memory: LayerMemory, x: Any) -> Any:
  """The last norm, of the columns that get logits alone."""
  norm: Any = super(type(layer), layer)
  return norm.__call__(memory.pick(x))


def _call(module: Any, memory: LayerMemory, tokens: Any, positions: Any) -> Any:
  del memory
  return module(tokens, positions, None, None)[0]


def _paged(
  module: Any,
  kind: Any,
  dtype: Any,
  attention: Any,
  windows: list[int | None] | None = None,
) -> PagedModule:
  config = module.config
  if dtype is None:
    dtype = module.embedder.input_embedding[...].dtype
    dtype = getattr(config, "dtype", dtype)
  layer = module.layers[0]
  plain = [
    own
    for own in vars(kind).values()
    if isinstance(own, type)
    and hasattr(own, "block")
    and any(isinstance(part, own) for part in (layer, layer.mlp))
  ]
  return paged_module(
    module,
    call=_call,
    methods={
      kind.Attention: attention,
      "final_norm": _picked,
      **dict.fromkeys(plain, _plain),
    },
    windows=windows or [None] * config.num_layers,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    dtype=dtype,
  )


def _rotary(module: Any, kind: Any, dtype: Any) -> PagedModule:
  """Llama 3 and Qwen3, which alone has norms of heads."""

  def attention(
    layer: Any,
    memory: LayerMemory,
    x: Any,
    positions: Any,
    *_: Any,
    **__: Any,
  ) -> Any:
    def rotated(name: str) -> Any:
      out = getattr(layer, f"{name}_proj")(x)
      norm = getattr(layer, f"{name}_norm", None)
      out = out if norm is None else norm(out)
      return kind.apply_rope(out, positions, head_dim=layer.head_dim)

    q, k, v = rotated("q"), rotated("k"), layer.v_proj(x)
    return None, layer.o_proj(memory.attend(q, k, v, scale=layer.scale))

  return _paged(module, kind, dtype, attention)


def _qwen2(module: Any, kind: Any, dtype: Any) -> PagedModule:
  wide = module.config.dtype

  def biased(x: Any, bias: Any) -> Any:
    return x + bias[...].astype(wide).reshape(x.shape[2:])

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
    q = kind.apply_rotary_embedding(q, sin, cos)
    k = kind.apply_rotary_embedding(k, sin, cos)
    return None, layer.o_proj(memory.attend(q, k, v, scale=layer.scale))

  return _paged(module, kind, dtype, attention)


def _gemma3(module: Any, kind: Any, dtype: Any) -> PagedModule:
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
      q, (k, v) = layer.q_einsum(x), layer.kv_einsum(x)
    rotated = functools.partial(
      kind.apply_rope,
      head_dim=layer.head_dim,
      base_frequency=layer.rope_base_frequency,
      scale_factor=layer.rope_scale_factor,
    )
    q = rotated(layer._query_norm(q), positions)
    k = rotated(layer._key_norm(k), positions)
    out = memory.attend(q, k, v, scale=layer.query_pre_attn_scalar)
    return None, layer.attn_vec_einsum(out)

  local = kind.AttentionType.LOCAL_SLIDING
  windows = [
    layer.attn.sliding_window_size if layer.attn.attn_type == local else None
    for layer in module.layers
  ]
  return _paged(module, kind, dtype, attention, windows)


_PAGED = {
  "llama3": _rotary,
  "qwen2": _qwen2,
  "qwen3": _rotary,
  "gemma3": _gemma3,
}
