"""Gemma 2 and 3: four norms a block, with an offset, and scaled embeddings."""

import math
from typing import Any

from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.decoder.description import Mlp
from jaxkv._src.models.decoder.rope import Rope
from jaxkv._src.models.loading import ropes
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.families import blocks
from jaxkv._src.models.loading.plans import Part
from jaxkv._src.models.loading.plans import Plan
from jaxkv._src.models.loading.plans import plain
from jaxkv._src.models.loading.plans import top_parts
from jaxkv._src.models.loading.plans import unused_names

_FIXED_BASE = 10_000.0
_GLOBAL_BASE = 1_000_000.0


def gemma2(config: ConfigFile, dtype: Any) -> Plan:
  """Gemma 2: soft caps; every second layer has a window."""
  dim = config.size("head_dim", 256)
  rope = ropes.rope_of(ropes.rope_table(config, _FIXED_BASE), config, dim)
  config.ignore("use_bidirectional_attention")
  return _plan(config, dtype, windows=_windows(config, 2), near=rope, far=rope)


def gemma3(config: ConfigFile, dtype: Any) -> Plan:
  """Gemma 3: queries and keys are normed; every sixth layer has no window."""
  config.only("use_bidirectional_attention", False)
  dim = config.size("head_dim", 256)
  local = config.number("rope_local_base_freq", _FIXED_BASE)
  every = config.size("_sliding_window_pattern", 6)
  every = config.size("sliding_window_pattern", every)
  both = ropes.rope_table(config, _GLOBAL_BASE)
  far = both.pop("full_attention", both)
  near = both.pop("sliding_attention", {"rope_type": "default"})
  near = {"rope_theta": local, **near}
  far = {"rope_theta": _GLOBAL_BASE, **far}
  return _plan(
    config,
    dtype,
    windows=_windows(config, every),
    near=ropes.rope_of(near, config, dim),
    far=ropes.rope_of(far, config, dim),
    query_key_norm=True,
  )


def _windows(config: ConfigFile, every: int) -> list[int | None]:
  layers = config.size("num_hidden_layers")
  types = [
    "sliding_attention" if (number + 1) % every else "full_attention"
    for number in range(layers)
  ]
  return blocks.windows_of(config, types, config.size("sliding_window", 4096))


def _plan(
  config: ConfigFile,
  dtype: Any,
  *,
  windows: list[int | None],
  near: Rope,
  far: Rope,
  query_key_norm: bool = False,
) -> Plan:
  config.only("attention_bias", False)
  # Older files have "gelu" there, which the family has never meant.
  config.ignore("hidden_act")
  mlp = Mlp(
    inner_dim=config.size("intermediate_size"),
    activation=blocks.activation(
      config, "hidden_activation", "gelu_pytorch_tanh"
    ),
  )
  caps = not query_key_norm

  def attention(window: int | None) -> Attention:
    return Attention(
      num_heads=config.size("num_attention_heads", 8),
      num_kv_heads=config.size("num_key_value_heads", 4),
      head_dim=config.size("head_dim", 256),
      window=window,
      rope=far if window is None else near,
      scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
      soft_cap=config.number("attn_logit_softcapping", 50.0 if caps else None),
      query_key_norm=query_key_norm,
    )

  e = config.size("hidden_size")
  decoder = Decoder(
    vocab_size=config.size("vocab_size", 256_000 if caps else 262_208),
    embed_dim=e,
    layers=tuple(
      Layer(attention=attention(window), mlp=mlp, post_norms=True)
      for window in windows
    ),
    norm_eps=config.number("rms_norm_eps", 1e-6),
    norm_offset=1.0,
    embed_scale=math.sqrt(e),
    logit_cap=config.number("final_logit_softcapping", 30.0 if caps else None),
    tied_embeddings=config.flag("tie_word_embeddings", True),
    dtype=dtype,
  )

  def layer(number: int) -> dict[str, Part]:
    at, own = f"model.layers.{number}.", decoder.layers[number].attention
    assert isinstance(own, Attention)
    names = {
      "attention_norm": "input_layernorm",
      "post_attention_norm": "post_attention_layernorm",
      "mlp_norm": "pre_feedforward_layernorm",
      "post_mlp_norm": "post_feedforward_layernorm",
    }
    parts = {
      name: plain(f"{at}{theirs}.weight", e) for name, theirs in names.items()
    }
    parts |= blocks.attention_parts(own, e, f"{at}self_attn.")
    return parts | blocks.mlp_parts(mlp.inner_dim, e, f"{at}mlp.")

  return Plan(
    decoder=decoder,
    top=top_parts(decoder),
    layer=layer,
    unused=unused_names(decoder),
  )
