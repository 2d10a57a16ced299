"""Llama and its relatives: Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE.

The families differ in biases, norms of queries and keys, windows, and experts.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import Experts
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.decoder.description import Mlp
from jaxkv._src.models.loading import rope_config
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.families import layers
from jaxkv._src.models.loading.weight_maps import Name
from jaxkv._src.models.loading.weight_maps import WeightMap
from jaxkv._src.models.loading.weight_maps import weight_map

_MIXTRAL_NAMES: dict[str, Name] = {
  "router": "block_sparse_moe.gate.weight",
  "expert_gate": "block_sparse_moe.experts.{}.w1.weight",
  "expert_up": "block_sparse_moe.experts.{}.w3.weight",
  "expert_down": "block_sparse_moe.experts.{}.w2.weight",
}


def llama(config: ConfigFile, dtype: Any) -> WeightMap:
  """Returns the weight map of Llama 1 to 3, and of SmolLM2."""
  config.only("mlp_bias", False)
  config.only("rope_interleaved", False)
  biased = config.flag("attention_bias", False)
  windows = [None] * config.size("num_hidden_layers")
  attention = _attention(config, biased=biased, output_biased=biased)
  return _map(config, dtype, attention, windows, _mlps(config))


def mistral(config: ConfigFile, dtype: Any) -> WeightMap:
  """Returns the weight map of Mistral: one window for all layers, or none."""
  windows = _same_windows(config, default=4096)
  return _map(config, dtype, _attention(config), windows, _mlps(config))


def qwen2(config: ConfigFile, dtype: Any) -> WeightMap:
  """Returns the weight map of Qwen2 and Qwen2.5."""
  config.only("use_mrope", False)
  # Qwen2 always has biases of queries, keys and values, so there is no key.
  attention = _attention(config, biased=True)
  return _map(config, dtype, attention, _later_windows(config), _mlps(config))


def qwen3(config: ConfigFile, dtype: Any) -> WeightMap:
  """Returns the weight map of Qwen3, with norms of queries and keys."""
  biased = config.flag("attention_bias", False)
  attention = _attention(
    config, biased=biased, output_biased=biased, query_key_norm=True
  )
  return _map(config, dtype, attention, _later_windows(config), _mlps(config))


def mixtral(config: ConfigFile, dtype: Any) -> WeightMap:
  """Returns the weight map of Mixtral, with experts in every layer."""
  # Mixtral computes a softmax over the chosen experts. This equals a normalized
  # softmax over all experts, the default of `Experts`.
  experts = Experts(
    num_experts=config.size("num_local_experts", 8),
    num_chosen=config.size("num_experts_per_tok", 2),
    inner_dim=config.size("intermediate_size"),
    activation=layers.activation(config, "hidden_act", "silu"),
  )
  mlps: list[Mlp | Experts] = [experts] * config.size("num_hidden_layers")
  return _map(
    config,
    dtype,
    _attention(config, default_base=1e6),
    _same_windows(config, default=None),
    mlps,
    names=layers.NAMES | _MIXTRAL_NAMES,
    default_eps=1e-5,
  )


def qwen3_moe(config: ConfigFile, dtype: Any) -> WeightMap:
  """Returns the weight map of Qwen3-MoE, with experts in most layers."""
  # Windows are not supported in Qwen3-MoE.
  config.only("use_sliding_window", False)
  config.ignore("sliding_window", "max_window_layers")
  # Files of Qwen3-Coder also have these keys, each with its only valid value.
  config.only("qkv_bias", False)
  config.only("use_qk_norm", True)
  config.only("shared_expert_intermediate_size", 0)
  biased = config.flag("attention_bias", False)
  attention = _attention(
    config, biased=biased, output_biased=biased, query_key_norm=True
  )
  windows = [None] * config.size("num_hidden_layers")
  mlps = sparse_mlps(config, normalized=config.flag("norm_topk_prob", False))
  return _map(config, dtype, attention, windows, mlps)


def sparse_mlps(config: ConfigFile, **fields: Any) -> list[Mlp | Experts]:
  """Returns each layer's MLP; `fields` are additional fields of `Experts`."""
  activation = layers.activation(config, "hidden_act", "silu")
  num_experts = config.size("num_experts", None)
  experts = Experts(
    num_experts=config.size("num_local_experts", num_experts),
    num_chosen=config.size("num_experts_per_tok"),
    inner_dim=config.size("moe_intermediate_size"),
    activation=activation,
    **fields,
  )
  dense = Mlp(inner_dim=config.size("intermediate_size"), activation=activation)
  step = config.size("decoder_sparse_step", 1)
  only_dense = set(config.items("mlp_only_layers", int, []))
  return [
    dense if index in only_dense or (index + 1) % step else experts
    for index in range(config.size("num_hidden_layers"))
  ]


def _attention(
  config: ConfigFile, default_base: float = 10_000.0, **fields: Any
) -> Attention:
  heads = config.size("num_attention_heads")
  dim = layers.head_dim_of(config)
  table = rope_config.rope_table(config, default_base)
  return Attention(
    num_heads=heads,
    num_kv_heads=config.size("num_key_value_heads", heads),
    head_dim=dim,
    rope=rope_config.rope_of(table, config, dim),
    **fields,
  )


def _mlps(config: ConfigFile) -> list[Mlp | Experts]:
  mlp = Mlp(
    inner_dim=config.size("intermediate_size"),
    activation=layers.activation(config, "hidden_act", "silu"),
  )
  return [mlp] * config.size("num_hidden_layers")


def _same_windows(
  config: ConfigFile, *, default: int | None
) -> list[int | None]:
  window = config.nullable_size("sliding_window", default)
  num_layers = config.size("num_hidden_layers")
  layer_type = "full_attention" if window is None else "sliding_attention"
  return layers.windows_of(config, [layer_type] * num_layers, window)


def _later_windows(config: ConfigFile) -> list[int | None]:
  """Returns each layer's window; None for layers before `max_window_layers`."""
  # Files of models without windows can also have the key `sliding_window`. So
  # without `layer_types`, only `use_sliding_window` enables windows.
  is_enabled = config.flag("use_sliding_window", False)
  # The defaults of transformers.
  window = config.nullable_size("sliding_window", 4096 if is_enabled else None)
  num_full = config.count("max_window_layers", 28)
  num_layers = config.size("num_hidden_layers")
  num_full = num_full if is_enabled and window is not None else num_layers
  types = [
    "full_attention" if index < num_full else "sliding_attention"
    for index in range(num_layers)
  ]
  return layers.windows_of(config, types, window)


def _map(
  config: ConfigFile,
  dtype: Any,
  attention: Attention,
  windows: Sequence[int | None],
  mlps: Sequence[Mlp | Experts],
  *,
  names: dict[str, Name] = layers.NAMES,
  default_eps: float = 1e-6,
) -> WeightMap:
  blocks = (
    Layer(attention=dataclasses.replace(attention, window=window), mlp=mlp)
    for window, mlp in zip(windows, mlps, strict=True)
  )
  decoder = layers.decoder(config, dtype, blocks, default_eps=default_eps)
  return weight_map(decoder, lambda _: names)
