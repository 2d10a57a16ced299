"""Qwen3-Next: three layers of the gated delta rule for each of attention."""

from typing import Any

import numpy as np

from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import DeltaNet
from jaxkv._src.models.decoder.description import Experts
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.decoder.description import Mlp
from jaxkv._src.models.loading import ropes
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.families import blocks
from jaxkv._src.models.loading.families.llama import sparse_mlps
from jaxkv._src.models.loading.plans import Part
from jaxkv._src.models.loading.plans import Plan
from jaxkv._src.models.loading.plans import linear
from jaxkv._src.models.loading.plans import out_of_heads
from jaxkv._src.models.loading.plans import plain
from jaxkv._src.models.loading.plans import top_parts
from jaxkv._src.models.loading.plans import unused_names


def qwen3_next(config: ConfigFile, dtype: Any) -> Plan:
  """Qwen3-Next."""
  config.only("attention_bias", False)
  e = config.size("hidden_size")
  attention, delta = _attention(config), _delta(config)
  mlps = sparse_mlps(
    config,
    shared_dim=config.size("shared_expert_intermediate_size"),
    shared_gated=True,
  )
  decoder = Decoder(
    vocab_size=config.size("vocab_size"),
    embed_dim=e,
    layers=tuple(
      Layer(attention=attention if full else delta, mlp=mlp)
      for full, mlp in zip(_is_full(config), mlps, strict=True)
    ),
    norm_eps=config.number("rms_norm_eps", 1e-6),
    norm_offset=1.0,
    tied_embeddings=config.flag("tie_word_embeddings", False),
    dtype=dtype,
  )

  def layer(number: int) -> dict[str, Part]:
    at, own = f"model.layers.{number}.", decoder.layers[number]
    parts = blocks.norm_parts(e, at)
    if isinstance(own.attention, Attention):
      parts |= _attention_parts(attention, e, f"{at}self_attn.")
    else:
      parts |= _delta_parts(delta, e, f"{at}linear_attn.")
    if isinstance(own.mlp, Mlp):
      return parts | blocks.mlp_parts(own.mlp.inner_dim, e, f"{at}mlp.")
    return parts | _experts_parts(own.mlp, e, f"{at}mlp.")

  return Plan(
    decoder=decoder,
    top=top_parts(decoder),
    layer=layer,
    unused=unused_names(decoder, r"mtp\..*"),
  )


def _is_full(config: ConfigFile) -> list[bool]:
  layers = config.size("num_hidden_layers")
  every = config.size("full_attention_interval", 4)
  kinds = {"full_attention": True, "linear_attention": False}
  default = [
    "linear_attention" if (number + 1) % every else "full_attention"
    for number in range(layers)
  ]
  types = config.items("layer_types", str, default)
  if len(types) != layers or not set(kinds).issuperset(types):
    raise ValueError(
      f"`layer_types` in {config.where} must be {layers} of {sorted(kinds)}, "
      f"got {types!r}."
    )
  return [kinds[one] for one in types]


def _attention(config: ConfigFile) -> Attention:
  dim = blocks.head_dim_of(config)
  table = ropes.rope_table(config, 10_000.0)
  return Attention(
    num_heads=config.size("num_attention_heads"),
    num_kv_heads=config.size("num_key_value_heads"),
    head_dim=dim,
    rope=ropes.rope_of(table, config, dim),
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


def _attention_parts(a: Attention, e: int, at: str) -> dict[str, Part]:
  h, d = a.num_heads, a.head_dim
  both = ((f"{at}q_proj.weight", (2 * h * d, e)),)

  def halves(w: np.ndarray) -> np.ndarray:
    return w.reshape(h, 2, d, e).transpose(1, 3, 0, 2)

  return blocks.attention_parts(a, e, at) | {
    "query": Part(both, lambda w: halves(w)[0]),
    "query_gate": Part(both, lambda w: halves(w)[1]),
  }


def _delta_parts(a: DeltaNet, e: int, at: str) -> dict[str, Part]:
  k, h = a.num_key_heads, a.num_value_heads
  key, value = a.key_dim, h // k * a.value_dim
  ends = np.cumsum([key, key, value, value])
  all_four = ((f"{at}in_proj_qkvz.weight", (k * int(ends[-1]), e)),)
  both = ((f"{at}in_proj_ba.weight", (2 * h, e)),)
  channels = 2 * k * key + h * a.value_dim

  def cut(number: int, dim: int) -> Part:
    """Each key head has its query, key, values and gates together."""

    def make(w: np.ndarray) -> np.ndarray:
      own = np.split(w.reshape(k, -1, e), ends[:-1], axis=1)[number]
      return own.reshape(-1, dim, e).transpose(2, 0, 1)

    return Part(all_four, make)

  def half(number: int) -> Part:
    return Part(
      both, lambda w: w.reshape(k, 2, h // k, e)[:, number].reshape(h, e).T
    )

  return {
    "query": cut(0, key),
    "key": cut(1, key),
    "value": cut(2, a.value_dim),
    "output_gate": cut(3, a.value_dim),
    "beta": half(0),
    "decay": half(1),
    "convolution": Part(
      ((f"{at}conv1d.weight", (channels, 1, a.kernel_size)),),
      lambda w: w[:, 0],
    ),
    "decay_bias": plain(f"{at}dt_bias", h),
    "decay_log": plain(f"{at}A_log", h),
    "output_norm": plain(f"{at}norm.weight", a.value_dim),
    "output": out_of_heads(f"{at}out_proj.weight", h, a.value_dim, e),
  }


def _experts_parts(m: Experts, e: int, at: str) -> dict[str, Part]:
  assert m.shared_dim is not None
  parts = blocks.experts_parts(m, e, at)
  shared = f"{at}shared_expert."
  parts |= blocks.mlp_parts(m.shared_dim, e, shared, "shared_")
  parts["shared_switch"] = linear(f"{at}shared_expert_gate.weight", e, 1)
  return parts
