"""Llama and what is built like it: Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE.

They differ in biases, norms of queries and keys, windows, and experts.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import Experts
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.decoder.description import Mlp
from jaxkv._src.models.loading import ropes
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.families import blocks
from jaxkv._src.models.loading.plans import Part
from jaxkv._src.models.loading.plans import Plan
from jaxkv._src.models.loading.plans import top_parts
from jaxkv._src.models.loading.plans import unused_names

_NAMES = ("mlp", blocks.LINEAR)
_MIXTRAL_NAMES = ("block_sparse_moe", ("w1", "w3", "w2"))


def llama(config: ConfigFile, dtype: Any) -> Plan:
  """Llama 1 to 3, and SmolLM2."""
  config.only("mlp_bias", False)
  config.only("rope_interleaved", False)
  biased = config.flag("attention_bias", False)
  windows = [None] * config.size("num_hidden_layers")
  attention = _attention(config, biased=biased, output_biased=biased)
  return _plan(config, dtype, attention, windows, _mlps(config))


def mistral(config: ConfigFile, dtype: Any) -> Plan:
  """Mistral: all layers have a window, or none."""
  windows = _same_windows(config)
  return _plan(config, dtype, _attention(config), windows, _mlps(config))


def qwen2(config: ConfigFile, dtype: Any) -> Plan:
  """Qwen2 and Qwen2.5: biases of queries, keys and values."""
  attention = _attention(config, biased=True)
  windows = _later_windows(config)
  return _plan(config, dtype, attention, windows, _mlps(config))


def qwen3(config: ConfigFile, dtype: Any) -> Plan:
  """Qwen3: norms of queries and keys."""
  biased = config.flag("attention_bias", False)
  attention = _attention(
    config, biased=biased, output_biased=biased, query_key_norm=True
  )
  windows = _later_windows(config)
  return _plan(config, dtype, attention, windows, _mlps(config))


def mixtral(config: ConfigFile, dtype: Any) -> Plan:
  """Mixtral: experts in every layer, weighed by a softmax of the chosen."""
  experts = Experts(
    num_experts=config.size("num_local_experts", 8),
    num_chosen=config.size("num_experts_per_tok", 2),
    inner_dim=config.size("intermediate_size"),
    activation=blocks.activation(config, "hidden_act", "silu"),
  )
  mlps: list[Mlp | Experts] = [experts] * config.size("num_hidden_layers")
  attention, windows = _attention(config), _same_windows(config)
  return _plan(config, dtype, attention, windows, mlps, _MIXTRAL_NAMES)


def qwen3_moe(config: ConfigFile, dtype: Any) -> Plan:
  """Qwen3-MoE: experts in most layers."""
  config.only("use_sliding_window", False)
  config.ignore("sliding_window", "max_window_layers")
  biased = config.flag("attention_bias", False)
  attention = _attention(
    config, biased=biased, output_biased=biased, query_key_norm=True
  )
  windows = [None] * config.size("num_hidden_layers")
  return _plan(config, dtype, attention, windows, sparse_mlps(config))


def sparse_mlps(config: ConfigFile, **more: Any) -> list[Mlp | Experts]:
  """Experts as in Qwen3-MoE; `more` are further fields of theirs."""
  kind = blocks.activation(config, "hidden_act", "silu")
  number = config.size("num_experts", None)
  experts = Experts(
    num_experts=config.size("num_local_experts", number),
    num_chosen=config.size("num_experts_per_tok"),
    inner_dim=config.size("moe_intermediate_size"),
    activation=kind,
    normalized=config.flag("norm_topk_prob", False),
    **more,
  )
  dense = Mlp(inner_dim=config.size("intermediate_size"), activation=kind)
  step = config.size("decoder_sparse_step", 1)
  only_dense = set(config.items("mlp_only_layers", int, []))
  return [
    dense if number in only_dense or (number + 1) % step else experts
    for number in range(config.size("num_hidden_layers"))
  ]


def _attention(config: ConfigFile, **more: Any) -> Attention:
  heads, dim = config.size("num_attention_heads"), blocks.head_dim_of(config)
  table = ropes.rope_table(config, 10_000.0)
  return Attention(
    num_heads=heads,
    num_kv_heads=config.size("num_key_value_heads", heads),
    head_dim=dim,
    rope=ropes.rope_of(table, config, dim),
    **more,
  )


def _mlps(config: ConfigFile) -> list[Mlp | Experts]:
  mlp = Mlp(
    inner_dim=config.size("intermediate_size"),
    activation=blocks.activation(config, "hidden_act", "silu"),
  )
  return [mlp] * config.size("num_hidden_layers")


def _same_windows(config: ConfigFile) -> list[int | None]:
  window = config.size("sliding_window", None)
  layers = config.size("num_hidden_layers")
  kind = "full_attention" if window is None else "sliding_attention"
  return blocks.windows_of(config, [kind] * layers, window)


def _later_windows(config: ConfigFile) -> list[int | None]:
  """Windows in layers from `max_window_layers` on, if they are switched on."""
  used = config.flag("use_sliding_window", False)
  window = config.size("sliding_window", None)
  first = config.count("max_window_layers", 0)
  layers = config.size("num_hidden_layers")
  first = first if used and window is not None else layers
  types = [
    "full_attention" if number < first else "sliding_attention"
    for number in range(layers)
  ]
  return blocks.windows_of(config, types, window)


def _plan(
  config: ConfigFile,
  dtype: Any,
  attention: Attention,
  windows: Sequence[int | None],
  mlps: Sequence[Mlp | Experts],
  experts: tuple[str, tuple[str, str, str]] = _NAMES,
) -> Plan:
  decoder = Decoder(
    vocab_size=config.size("vocab_size"),
    embed_dim=config.size("hidden_size"),
    layers=tuple(
      Layer(attention=dataclasses.replace(attention, window=window), mlp=mlp)
      for window, mlp in zip(windows, mlps, strict=True)
    ),
    norm_eps=config.number("rms_norm_eps", 1e-6),
    tied_embeddings=config.flag("tie_word_embeddings", False),
    dtype=dtype,
  )
  e = decoder.embed_dim

  def layer(number: int) -> dict[str, Part]:
    at, mlp = f"model.layers.{number}.", decoder.layers[number].mlp
    parts = blocks.norm_parts(e, at)
    parts |= blocks.attention_parts(attention, e, f"{at}self_attn.")
    if isinstance(mlp, Mlp):
      parts |= blocks.mlp_parts(mlp.inner_dim, e, f"{at}mlp.")
    else:
      parts |= blocks.experts_parts(mlp, e, f"{at}{experts[0]}.", experts[1])
    return parts

  return Plan(
    decoder=decoder,
    top=top_parts(decoder),
    layer=layer,
    unused=unused_names(decoder),
  )
