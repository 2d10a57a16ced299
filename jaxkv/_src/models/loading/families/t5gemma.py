"""T5Gemma: an encoder and a decoder, each with the blocks of Gemma 2."""

import dataclasses
import math
from typing import Any

from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import Encoder
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.decoder.description import Mlp
from jaxkv._src.models.decoder.description import Stack
from jaxkv._src.models.decoder.rope import Rope
from jaxkv._src.models.loading import ropes
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.families import blocks
from jaxkv._src.models.loading.plans import Part
from jaxkv._src.models.loading.plans import Plan
from jaxkv._src.models.loading.plans import linear
from jaxkv._src.models.loading.plans import plain
from jaxkv._src.models.loading.plans import unused_names

_BASE = 10_000.0
_NORMS = {
  "attention_norm": "pre_self_attn_layernorm",
  "post_attention_norm": "post_self_attn_layernorm",
  "cross_norm": "pre_cross_attn_layernorm",
  "post_cross_norm": "post_cross_attn_layernorm",
  "mlp_norm": "pre_feedforward_layernorm",
  "post_mlp_norm": "post_feedforward_layernorm",
}


def t5gemma(config: ConfigFile, dtype: Any) -> Plan:
  """T5Gemma; encoder and decoder may have other sizes."""
  config.only("is_encoder_decoder", True)
  config.ignore("dropout_rate", "classifier_dropout_rate", "vocab_size")
  tied = bool(config.get("tie_word_embeddings", True))
  encoder_file, decoder_file = (
    ConfigFile(dict(config.get(name)), f"`{name}` in {config.where}")
    for name in ("encoder", "decoder")
  )
  encoder = Encoder(
    **_sizes(encoder_file, dtype), layers=_layers(encoder_file, crosses=False)
  )
  # Caps of logits that it does not have.
  encoder_file.ignore("final_logit_softcapping")
  decoder = Decoder(
    **_sizes(decoder_file, dtype),
    layers=_layers(decoder_file, crosses=True),
    logit_cap=decoder_file.get("final_logit_softcapping", 30.0),
    tied_embeddings=tied,
    encoder=encoder,
  )
  width = decoder_file.size("cross_attention_hidden_size", encoder.embed_dim)
  if width != encoder.embed_dim:
    raise ValueError(
      f"`cross_attention_hidden_size` in {decoder_file.where} must be "
      f"{encoder.embed_dim}, the encoder's hidden_size, got {width}."
    )
  encoder_file.check_all_read()
  decoder_file.check_all_read()
  unused = unused_names(decoder, r"lm_head\.out_proj\.weight")
  plan, other = (
    Plan(
      decoder=stack,
      top=_top(stack, at),
      layer=lambda number, stack=stack, at=at: _parts(stack, at, number),
      unused=unused,
    )
    for stack, at in ((decoder, "model.decoder."), (encoder, "model.encoder."))
  )
  return dataclasses.replace(plan, encoder=other)


def _sizes(config: ConfigFile, dtype: Any) -> dict[str, Any]:
  """What encoders and decoders have beside their layers."""
  config.ignore("dropout_rate", "tie_word_embeddings")
  e = config.size("hidden_size", 2304)
  return {
    "vocab_size": config.size("vocab_size", 256_000),
    "embed_dim": e,
    "norm_eps": config.get("rms_norm_eps", 1e-6),
    "norm_offset": 1.0,
    "embed_scale": math.sqrt(e),
    "dtype": dtype,
  }


def _layers(config: ConfigFile, *, crosses: bool) -> tuple[Layer, ...]:
  config.only("attention_bias", False)
  dim, layers = (
    config.size("head_dim", 256),
    config.size("num_hidden_layers", 26),
  )
  types = [
    "full_attention" if number % 2 else "sliding_attention"
    for number in range(layers)
  ]
  windows = blocks.windows_of(
    config, types, config.size("sliding_window", 4096)
  )
  rope = ropes.rope_of(ropes.rope_table(config, _BASE), config, dim)
  mlp = Mlp(
    inner_dim=config.size("intermediate_size", 9216),
    activation=blocks.activation(
      config, "hidden_activation", "gelu_pytorch_tanh"
    ),
  )

  def attention(window: int | None, rope: Rope | None) -> Attention:
    return Attention(
      num_heads=config.size("num_attention_heads", 8),
      num_kv_heads=config.size("num_key_value_heads", 4),
      head_dim=dim,
      window=window,
      rope=rope,
      scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
      soft_cap=config.get("attn_logit_softcapping", 50.0),
    )

  return tuple(
    Layer(
      attention=attention(window, rope),
      cross=attention(None, None) if crosses else None,
      mlp=mlp,
      post_norms=True,
    )
    for window in windows
  )


def _top(stack: Stack, at: str) -> dict[str, Part]:
  v, e = stack.vocab_size, stack.embed_dim
  parts = {
    "embed": plain(f"{at}embed_tokens.weight", v, e),
    "final_norm": plain(f"{at}norm.weight", e),
  }
  if isinstance(stack, Decoder) and not stack.tied_embeddings:
    parts["unembed"] = linear("lm_head.out_proj.weight", e, v)
  return parts


def _parts(stack: Stack, at: str, number: int) -> dict[str, Part]:
  """The parameters of a layer."""
  at, layer, e = f"{at}layers.{number}.", stack.layers[number], stack.embed_dim
  own, cross = layer.attention, layer.cross
  assert isinstance(own, Attention) and isinstance(layer.mlp, Mlp)
  parts = {
    name: plain(f"{at}{theirs}.weight", e)
    for name, theirs in _NORMS.items()
    if cross is not None or "cross" not in name
  }
  parts |= blocks.attention_parts(own, e, f"{at}self_attn.")
  if cross is not None and isinstance(stack, Decoder):
    assert stack.encoder is not None
    more = blocks.attention_parts(
      cross, e, f"{at}cross_attn.", seen_dim=stack.encoder.embed_dim
    )
    parts |= {f"cross_{name}": part for name, part in more.items()}
  return parts | blocks.mlp_parts(layer.mlp.inner_dim, e, f"{at}mlp.")
