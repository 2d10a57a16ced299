"""gpt-oss: sinks, a window in every other layer, experts with clipped gates."""

import dataclasses
from typing import Any

from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import Experts
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.loading import rope_config
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.families import layers
from jaxkv._src.models.loading.weight_maps import Name
from jaxkv._src.models.loading.weight_maps import Source
from jaxkv._src.models.loading.weight_maps import WeightMap
from jaxkv._src.models.loading.weight_maps import unchanged
from jaxkv._src.models.loading.weight_maps import weight_map

_BASE = 150_000.0
# The scaling of transformers for a config.json without a rope table.
_DEFAULT_SCALING: rope_config.Table = {
  "rope_type": "yarn",
  "factor": 32.0,
  "original_max_position_embeddings": 4096,
  "beta_fast": 32.0,
  "beta_slow": 1.0,
  "truncate": False,
}


def gpt_oss(config: ConfigFile, dtype: Any) -> WeightMap:
  """Returns the weight map of gpt-oss, for dequantized weights."""
  config.only("hidden_act", "silu")
  # The only supported value is the constant `_SLOPE` of `decoder/mlp.py`.
  config.only("swiglu_alpha", 1.702)
  # These are older names of keys that are read under newer names.
  config.ignore("experts_per_token", "initial_context_length")
  num_layers = config.size("num_hidden_layers")
  types = [
    "full_attention" if index % 2 else "sliding_attention"
    for index in range(num_layers)
  ]
  windows = layers.windows_of(config, types, config.size("sliding_window", 128))
  dim = config.size("head_dim", 64)
  # One flag turns on the biases of all four projections.
  biased = config.flag("attention_bias", True)
  attention = Attention(
    num_heads=config.size("num_attention_heads"),
    num_kv_heads=config.size("num_key_value_heads"),
    head_dim=dim,
    rope=rope_config.rope_of(_rope_table(config), config, dim),
    biased=biased,
    output_biased=biased,
    sinks=True,
  )
  experts = Experts(
    num_experts=config.size("num_local_experts"),
    num_chosen=config.size("num_experts_per_tok"),
    inner_dim=config.size("intermediate_size"),
    scores="chosen_softmax",
    router_biased=True,
    biased=True,
    limit=config.number("swiglu_limit", 7.0),
  )
  blocks = (
    Layer(attention=dataclasses.replace(attention, window=window), mlp=experts)
    for window in windows
  )
  decoder = layers.decoder(config, dtype, blocks, default_eps=1e-5)
  names = _names(experts, decoder.embed_dim)
  return weight_map(decoder, lambda _: names)


def _rope_table(config: ConfigFile) -> rope_config.Table:
  table = rope_config.rope_table(config, _BASE)
  # An empty `rope_parameters` turns scaling off, but a null does not.
  has_parameters = config.get("rope_parameters", None) is not None
  if has_parameters or config.table("rope_scaling"):
    return table
  return table | _DEFAULT_SCALING


def _names(m: Experts, e: int) -> dict[str, Name]:
  x, f = m.num_experts, m.inner_dim
  # In `gate_up_proj` and its bias, columns of gate and up projection alternate.
  gate_up = (("mlp.experts.gate_up_proj", (x, e, 2 * f)),)
  biases = (("mlp.experts.gate_up_proj_bias", (x, 2 * f)),)
  return layers.NAMES | {
    "router": "mlp.router.weight",
    "router_bias": "mlp.router.bias",
    "expert_gate": Source(gate_up, lambda w: w[..., 0::2]),
    "expert_up": Source(gate_up, lambda w: w[..., 1::2]),
    "expert_down": unchanged("mlp.experts.down_proj", x, f, e),
    "expert_gate_bias": Source(biases, lambda b: b[..., 0::2]),
    "expert_up_bias": Source(biases, lambda b: b[..., 1::2]),
    "expert_down_bias": unchanged("mlp.experts.down_proj_bias", x, e),
  }
