"""Names of tensors and settings that several families share."""

from collections.abc import Iterable
from typing import Any

from jaxkv._src.models.decoder.description import Activation
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.weight_maps import Name

_ACTIVATIONS: dict[str, Activation] = {
  "silu": "silu",
  "swish": "silu",
  "gelu": "gelu",
  "gelu_pytorch_tanh": "gelu_tanh",
  "gelu_new": "gelu_tanh",
  "relu": "relu",
}

# The usual names of a layer's tensors, see `weight_maps.Name`.
NAMES: dict[str, Name] = {
  "attention_norm": "input_layernorm.weight",
  "query": "self_attn.q_proj.weight",
  "key": "self_attn.k_proj.weight",
  "value": "self_attn.v_proj.weight",
  "output": "self_attn.o_proj.weight",
  "query_bias": "self_attn.q_proj.bias",
  "key_bias": "self_attn.k_proj.bias",
  "value_bias": "self_attn.v_proj.bias",
  "output_bias": "self_attn.o_proj.bias",
  "query_norm": "self_attn.q_norm.weight",
  "key_norm": "self_attn.k_norm.weight",
  "sinks": "self_attn.sinks",
  "mlp_norm": "post_attention_layernorm.weight",
  "gate": "mlp.gate_proj.weight",
  "up": "mlp.up_proj.weight",
  "down": "mlp.down_proj.weight",
  "router": "mlp.gate.weight",
  "expert_gate": "mlp.experts.{}.gate_proj.weight",
  "expert_up": "mlp.experts.{}.up_proj.weight",
  "expert_down": "mlp.experts.{}.down_proj.weight",
}


def decoder(
  config: ConfigFile,
  dtype: Any,
  layers: Iterable[Layer],
  *,
  default_eps: float = 1e-6,
  **fields: Any,
) -> Decoder:
  """Returns a `Decoder` with the sizes that most families name alike."""
  return Decoder(
    vocab_size=config.size("vocab_size"),
    embed_dim=config.size("hidden_size"),
    layers=tuple(layers),
    norm_eps=config.number("rms_norm_eps", default_eps),
    tied_embeddings=config.flag("tie_word_embeddings", False),
    dtype=dtype,
    **fields,
  )


def activation(config: ConfigFile, key: str, default: str) -> Activation:
  """Returns the `Activation` for the value of a key."""
  config.only(key, *_ACTIVATIONS)
  return _ACTIVATIONS[config.get(key, default)]


def head_dim_of(config: ConfigFile) -> int:
  """Returns the head size, by default hidden_size // num_attention_heads."""
  heads = config.size("num_attention_heads")
  width = config.size("hidden_size")
  # Without `max`, a damaged file with more heads than elements would give 0.
  return config.size("head_dim", max(width // heads, 1))


def layer_types(
  config: ConfigFile, default: list[str], layer_type: str
) -> list[str]:
  """Returns each layer's type. `default` replaces missing `layer_types`."""
  types = config.items("layer_types", str, default)
  num_layers = config.size("num_hidden_layers")
  names = {"full_attention", layer_type}
  # Callers would treat an unknown type as one of the two.
  if len(types) != num_layers or not names.issuperset(types):
    raise ValueError(
      f"`layer_types` in {config.file} must be {num_layers} of "
      f"{sorted(names)}, got {types!r}."
    )
  return types


def windows_of(
  config: ConfigFile, default: list[str], window: int | None
) -> list[int | None]:
  """Returns each layer's window. `default` replaces missing `layer_types`."""
  types = layer_types(config, default, "sliding_attention")
  if window is None and "sliding_attention" in types:
    raise ValueError(f"{config.file} lacks `sliding_window`; complete it.")
  return [window if name == "sliding_attention" else None for name in types]
