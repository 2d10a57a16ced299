"""Gemma 2 and 3: four norms per layer with an offset, scaled embeddings."""

import math
from typing import Any

from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.decoder.description import Mlp
from jaxkv._src.models.decoder.rope import Rope
from jaxkv._src.models.loading import rope_config
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.families import layers
from jaxkv._src.models.loading.weight_maps import WeightMap
from jaxkv._src.models.loading.weight_maps import weight_map

_FIXED_BASE = 10_000.0
_GLOBAL_BASE = 1_000_000.0
_NAMES = layers.NAMES | {
  "post_attention_norm": "post_attention_layernorm.weight",
  "mlp_norm": "pre_feedforward_layernorm.weight",
  "post_mlp_norm": "post_feedforward_layernorm.weight",
}


def gemma2(config: ConfigFile, dtype: Any) -> WeightMap:
  """Returns the weight map of Gemma 2: a window in every other layer."""
  dim = config.size("head_dim", 256)
  rope = rope_config.rope_of(
    rope_config.rope_table(config, _FIXED_BASE), config, dim
  )
  config.ignore("use_bidirectional_attention")
  return _map(config, dtype, windows=_windows(config, 2), local=rope, full=rope)


def gemma3(config: ConfigFile, dtype: Any) -> WeightMap:
  """Returns the weight map of Gemma 3: a window in five of six layers."""
  config.only("use_bidirectional_attention", False)
  dim = config.size("head_dim", 256)
  local = config.number("rope_local_base_freq", _FIXED_BASE)
  interval = config.size("_sliding_window_pattern", 6)
  interval = config.size("sliding_window_pattern", interval)
  table = rope_config.rope_table(config, _GLOBAL_BASE)
  # New files have a rope table for each type of layer. In old files
  # `rope_scaling` applies only to layers without a window.
  full_table = table.pop("full_attention", table)
  local_table = table.pop("sliding_attention", {"rope_type": "default"})
  local_table = {"rope_theta": local, **local_table}
  full_table = {"rope_theta": _GLOBAL_BASE, **full_table}
  return _map(
    config,
    dtype,
    windows=_windows(config, interval),
    local=rope_config.rope_of(local_table, config, dim),
    full=rope_config.rope_of(full_table, config, dim),
    query_key_norm=True,
  )


def _windows(config: ConfigFile, interval: int) -> list[int | None]:
  num_layers = config.size("num_hidden_layers")
  types = [
    "sliding_attention" if (index + 1) % interval else "full_attention"
    for index in range(num_layers)
  ]
  window = config.size("sliding_window", 4096)
  # Some files of Gemma 2 have the window under both keys.
  config.only("sliding_window_size", window)
  return layers.windows_of(config, types, window)


def _map(
  config: ConfigFile,
  dtype: Any,
  *,
  windows: list[int | None],
  local: Rope,
  full: Rope,
  query_key_norm: bool = False,
) -> WeightMap:
  config.only("attention_bias", False)
  # Older files have "gelu" as `hidden_act`, but the models use the key
  # `hidden_activation`, whose default is the tanh approximation.
  config.ignore("hidden_act")
  mlp = Mlp(
    inner_dim=config.size("intermediate_size"),
    activation=layers.activation(
      config, "hidden_activation", "gelu_pytorch_tanh"
    ),
  )
  # Gemma 3 replaced the soft caps of Gemma 2 with norms of queries and keys.
  has_caps = not query_key_norm

  def attention(window: int | None) -> Attention:
    return Attention(
      num_heads=config.size("num_attention_heads", 8),
      num_kv_heads=config.size("num_key_value_heads", 4),
      head_dim=config.size("head_dim", 256),
      window=window,
      rope=full if window is None else local,
      scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
      soft_cap=config.nullable_number(
        "attn_logit_softcapping", 50.0 if has_caps else None
      ),
      query_key_norm=query_key_norm,
    )

  e = config.size("hidden_size")
  decoder = Decoder(
    vocab_size=config.size("vocab_size", 256_000 if has_caps else 262_208),
    embed_dim=e,
    layers=tuple(
      Layer(attention=attention(window), mlp=mlp, post_norms=True)
      for window in windows
    ),
    norm_eps=config.number("rms_norm_eps", 1e-6),
    norm_offset=1.0,
    embed_scale=math.sqrt(e),
    logit_cap=config.nullable_number(
      "final_logit_softcapping", 30.0 if has_caps else None
    ),
    tied_embeddings=config.flag("tie_word_embeddings", True),
    dtype=dtype,
  )
  return weight_map(decoder, lambda _: _NAMES)
