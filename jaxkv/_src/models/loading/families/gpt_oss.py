"""gpt-oss: sinks, alternating windows, and experts whose gates are limited."""

import dataclasses
from typing import Any

from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import Experts
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.loading import ropes
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.families import blocks
from jaxkv._src.models.loading.plans import Part
from jaxkv._src.models.loading.plans import Plan
from jaxkv._src.models.loading.plans import linear
from jaxkv._src.models.loading.plans import plain
from jaxkv._src.models.loading.plans import top_parts
from jaxkv._src.models.loading.plans import unused_names

_BASE = 150_000.0


def gpt_oss(config: ConfigFile, dtype: Any) -> Plan:
  """gpt-oss, from unpacked weights."""
  config.only("hidden_act", "silu")
  config.only("swiglu_alpha", 1.702)
  config.ignore("experts_per_token", "initial_context_length")
  layers, e = config.size("num_hidden_layers"), config.size("hidden_size")
  types = [
    "full_attention" if number % 2 else "sliding_attention"
    for number in range(layers)
  ]
  windows = blocks.windows_of(config, types, config.size("sliding_window", 128))
  dim = config.size("head_dim", 64)
  biased = config.flag("attention_bias", True)
  attention = Attention(
    num_heads=config.size("num_attention_heads"),
    num_kv_heads=config.size("num_key_value_heads"),
    head_dim=dim,
    rope=ropes.rope_of(ropes.rope_table(config, _BASE), config, dim),
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
  decoder = Decoder(
    vocab_size=config.size("vocab_size"),
    embed_dim=e,
    layers=tuple(
      Layer(
        attention=dataclasses.replace(attention, window=window), mlp=experts
      )
      for window in windows
    ),
    norm_eps=config.number("rms_norm_eps", 1e-5),
    tied_embeddings=config.flag("tie_word_embeddings", False),
    dtype=dtype,
  )

  def layer(number: int) -> dict[str, Part]:
    at = f"model.layers.{number}."
    parts = blocks.norm_parts(e, at)
    parts |= blocks.attention_parts(attention, e, f"{at}self_attn.")
    return parts | _experts(experts, e, f"{at}mlp.")

  return Plan(
    decoder=decoder,
    top=top_parts(decoder),
    layer=layer,
    unused=unused_names(decoder),
  )


def _experts(m: Experts, e: int, at: str) -> dict[str, Part]:
  """Gate and up are stored as one, in turns."""
  x, f = m.num_experts, m.inner_dim
  both = ((f"{at}experts.gate_up_proj", (x, e, 2 * f)),)
  biases = ((f"{at}experts.gate_up_proj_bias", (x, 2 * f)),)
  return {
    "router": linear(f"{at}router.weight", e, x),
    "router_bias": plain(f"{at}router.bias", x),
    "expert_gate": Part(both, lambda w: w[..., 0::2]),
    "expert_up": Part(both, lambda w: w[..., 1::2]),
    "expert_down": plain(f"{at}experts.down_proj", x, f, e),
    "expert_gate_bias": Part(biases, lambda b: b[..., 0::2]),
    "expert_up_bias": Part(biases, lambda b: b[..., 1::2]),
    "expert_down_bias": plain(f"{at}experts.down_proj_bias", x, e),
  }
