"""Adapts the decoders of SkyRL-tx to the paged memory."""

from typing import Any

import jax.numpy as jnp

from jaxkv._src.integrations import packages
from jaxkv._src.integrations.paged_module import PagedModule
from jaxkv._src.integrations.paged_module import paged_module
from jaxkv.kv import LayerMemory

_SUPPORTED = {"llama3": "Llama3Attention", "qwen3": "Qwen3Attention"}


def paged_module_of(module: Any) -> PagedModule:
  """Adapts a decoder of SkyRL-tx for rollouts.

  These decoders take one LoRA adapter for each row of a batch. So each column
  of a packed call becomes a row of one token, whose adapter index is in
  `batch.rows.extra["adapter"]`.

  Args:
    module: an instance of tx's Llama 3 or Qwen3, with or without experts.

  Raises:
    ImportError: SkyRL-tx is not installed.
    ValueError: the module is not supported.
  """
  module_name = type(module).__module__
  name = module_name.removeprefix("tx.models.")
  if name not in _SUPPORTED:
    raise ValueError(
      f"`module` must be tx's Llama 3 or Qwen3, got {type(module).__name__} of "
      f"{module_name}; sample with SkyRL's own engine."
    )
  library = packages.of_skyrl(module_name)
  config = module.config
  layers = module.model.layers
  return paged_module(
    module,
    call=_call,
    methods={getattr(library, _SUPPORTED[name]): _attention(library)},
    windows=[None] * len(layers),
    num_kv_heads=config.num_key_value_heads,
    head_dim=layers[0].self_attn.head_dim,
    dtype=module.model.embed_tokens.embedding[...].dtype,
  )


def _call(module: Any, memory: LayerMemory, tokens: Any, positions: Any) -> Any:
  adapters = memory.batch.rows.extra["adapter"]
  outputs = module(
    tokens.T,
    attention_mask=jnp.ones_like(tokens.T),
    positions=positions.T,
    adapter_indices=adapters,
  )
  hidden = memory.pick(outputs.last_hidden_state.swapaxes(0, 1))
  logits = module.compute_logits(
    hidden.swapaxes(0, 1), memory.of_columns(adapters)
  )
  return logits.swapaxes(0, 1)


def _attention(library: Any) -> Any:
  """Returns paged attention for Llama 3 and Qwen3."""

  def attention(
    layer: Any,
    memory: LayerMemory,
    x: Any,
    *,
    positions: Any,
    adapter_indices: Any,
    **_: Any,
  ) -> Any:
    def heads(name: str, count: int) -> Any:
      project = getattr(layer, f"{name}_proj")
      out = project(x, adapter_indices=adapter_indices)
      out = out.reshape(*x.shape[:2], count, layer.head_dim)
      norm = getattr(layer, f"{name}_norm", None)
      return out if norm is None else norm(out)

    def rotated(array: Any) -> Any:
      base = layer.config.rope_theta
      return library.apply_rope(array, positions, layer.head_dim, base)

    q = rotated(heads("q", layer.num_heads))
    k = rotated(heads("k", layer.num_kv_heads))
    v = heads("v", layer.num_kv_heads)
    # Converts C rows of one token to one row of C tokens, for packed attention.
    packed = (array.swapaxes(0, 1) for array in (q, k, v))
    out = memory.attend(*packed).swapaxes(0, 1).reshape(*x.shape[:2], -1)
    return layer.o_proj(out, adapter_indices=adapter_indices), (k, v)

  return attention
