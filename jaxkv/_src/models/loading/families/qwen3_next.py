"""Qwen3-Next: three layers of the gated delta rule per attention layer."""

import functools
from typing import Any

import numpy as np

from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import DeltaNet
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.loading import rope_config
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.families import layers
from jaxkv._src.models.loading.families.llama import sparse_mlps
from jaxkv._src.models.loading.weight_maps import Name
from jaxkv._src.models.loading.weight_maps import Source
from jaxkv._src.models.loading.weight_maps import WeightMap
from jaxkv._src.models.loading.weight_maps import weight_map

_SHARED = "mlp.shared_expert."
_NAMES = layers.NAMES | {
  "shared_gate": f"{_SHARED}gate_proj.weight",
  "shared_up": f"{_SHARED}up_proj.weight",
  "shared_down": f"{_SHARED}down_proj.weight",
  "shared_switch": "mlp.shared_expert_gate.weight",
}


def qwen3_next(config: ConfigFile, dtype: Any) -> WeightMap:
  """Returns the weight map of Qwen3-Next."""
  config.only("attention_bias", False)
  config.only("use_sliding_window", False)
  attention = _attention(config)
  delta = _delta(config)
  mlps = sparse_mlps(
    config,
    normalized=config.flag("norm_topk_prob", True),
    shared_dim=config.size("shared_expert_intermediate_size"),
    shared_gated=True,
  )
  blocks = (
    Layer(attention=attention if name == "full_attention" else delta, mlp=mlp)
    for name, mlp in zip(_layer_types(config), mlps, strict=True)
  )
  decoder = layers.decoder(config, dtype, blocks, norm_offset=1.0)
  # Ignores the tensors of multi-token prediction, which is not supported.
  names = functools.partial(_names, e=decoder.embed_dim)
  return weight_map(decoder, names, r"mtp\..*")


def _names(layer: Layer, e: int) -> dict[str, Name]:
  a = layer.attention
  if isinstance(a, DeltaNet):
    return _NAMES | _delta_names(a, e)
  assert isinstance(a, Attention)
  h, d = a.num_heads, a.head_dim
  # One tensor has the query projection and the gate projection of each head.
  tensors = (("self_attn.q_proj.weight", (2 * h * d, e)),)

  def halves(w: np.ndarray) -> np.ndarray:
    return w.reshape(h, 2, d, e).transpose(1, 3, 0, 2)

  return _NAMES | {
    "query": Source(tensors, lambda w: halves(w)[0]),
    "query_gate": Source(tensors, lambda w: halves(w)[1]),
  }


def _layer_types(config: ConfigFile) -> list[str]:
  interval = config.size("full_attention_interval", 4)
  default = [
    "linear_attention" if (index + 1) % interval else "full_attention"
    for index in range(config.size("num_hidden_layers"))
  ]
  return layers.layer_types(config, default, "linear_attention")


def _attention(config: ConfigFile) -> Attention:
  dim = layers.head_dim_of(config)
  table = rope_config.rope_table(config, 10_000.0, default_fraction=0.25)
  return Attention(
    num_heads=config.size("num_attention_heads"),
    num_kv_heads=config.size("num_key_value_heads"),
    head_dim=dim,
    rope=rope_config.rope_of(table, config, dim),
    query_key_norm=True,
    gated=True,
  )


def _delta(config: ConfigFile) -> DeltaNet:
  return DeltaNet(
    num_key_heads=config.size("linear_num_key_heads"),
    num_value_heads=config.size("linear_num_value_heads"),
    key_dim=config.size("linear_key_head_dim"),
    value_dim=config.size("linear_value_head_dim"),
    kernel_size=config.size("linear_conv_kernel_dim", 4),
  )


def _delta_names(a: DeltaNet, e: int) -> dict[str, Name]:
  k, h = a.num_key_heads, a.num_value_heads
  key = a.key_dim
  value = h // k * a.value_dim
  # `in_proj_qkvz` has a block of rows per key head: its query and key, then the
  # values and the gates of the h // k value heads that use this key head.
  ends = np.cumsum([key, key, value, value])
  mixed = (("linear_attn.in_proj_qkvz.weight", (k * int(ends[-1]), e)),)
  beta_decay = (("linear_attn.in_proj_ba.weight", (2 * h, e)),)
  convolution = (a.num_channels, 1, a.kernel_size)

  def cut(index: int, dim: int) -> Source:
    def convert(w: np.ndarray) -> np.ndarray:
      rows = np.split(w.reshape(k, -1, e), ends[:-1], axis=1)[index]
      return rows.reshape(-1, dim, e).transpose(2, 0, 1)

    return Source(mixed, convert)

  def half(index: int) -> Source:
    return Source(
      beta_decay, lambda w: w.reshape(k, 2, h // k, e)[:, index].reshape(h, e).T
    )

  return {
    "query": cut(0, key),
    "key": cut(1, key),
    "value": cut(2, a.value_dim),
    "output_gate": cut(3, a.value_dim),
    "beta": half(0),
    "decay": half(1),
    "convolution": Source(
      (("linear_attn.conv1d.weight", convolution),), lambda w: w[:, 0]
    ),
    "decay_bias": "linear_attn.dt_bias",
    "decay_log": "linear_attn.A_log",
    "output_norm": "linear_attn.norm.weight",
    "output": "linear_attn.out_proj.weight",
  }
