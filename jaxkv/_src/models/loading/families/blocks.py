"""What families have in common: attention, MLPs and experts of a layer."""

from jaxkv._src.models.decoder.description import Activation
from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import Experts
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.plans import Part
from jaxkv._src.models.loading.plans import head_bias
from jaxkv._src.models.loading.plans import into_heads
from jaxkv._src.models.loading.plans import linear
from jaxkv._src.models.loading.plans import out_of_heads
from jaxkv._src.models.loading.plans import plain
from jaxkv._src.models.loading.plans import stacked

_ACTIVATIONS: dict[str, Activation] = {
  "silu": "silu",
  "swish": "silu",
  "gelu": "gelu",
  "gelu_pytorch_tanh": "gelu_tanh",
  "gelu_new": "gelu_tanh",
  "relu": "relu",
}

LINEAR = ("gate_proj", "up_proj", "down_proj")


def activation(config: ConfigFile, key: str, default: str) -> Activation:
  """The activation that a key names."""
  config.only(key, *_ACTIVATIONS)
  return _ACTIVATIONS[config.get(key, default)]


def head_dim_of(config: ConfigFile) -> int:
  """D, where it may be left to the width."""
  heads, width = config.size("num_attention_heads"), config.size("hidden_size")
  return config.size("head_dim", max(width // heads, 1))


def windows_of(
  config: ConfigFile, default: list[str], window: int | None
) -> list[int | None]:
  """The window of each layer, by `layer_types`.

  Args:
    config: has `layer_types`, or not.
    default: the types if it does not.
    window: of layers with sliding attention.
  """
  types = config.items("layer_types", str, default)
  layers = config.size("num_hidden_layers")
  known = {"full_attention", "sliding_attention"}
  if len(types) != layers or not known.issuperset(types):
    raise ValueError(
      f"`layer_types` in {config.where} must be {layers} of "
      f"{sorted(known)}, got {types!r}."
    )
  if window is None and "sliding_attention" in types:
    raise ValueError(f"{config.where} lacks `sliding_window`; complete it.")
  return [window if one == "sliding_attention" else None for one in types]


def attention_parts(a: Attention, e: int, at: str) -> dict[str, Part]:
  """Parameters of attention.

  Args:
    a: its sizes.
    e: E, the width of the tokens.
    at: begins the names of its tensors.
  """
  h, k, d = a.num_heads, a.num_kv_heads, a.head_dim
  parts = {
    "query": into_heads(f"{at}q_proj.weight", e, h, d),
    "key": into_heads(f"{at}k_proj.weight", e, k, d),
    "value": into_heads(f"{at}v_proj.weight", e, k, d),
    "output": out_of_heads(f"{at}o_proj.weight", h, d, e),
  }
  if a.biased:
    parts["query_bias"] = head_bias(f"{at}q_proj.bias", h, d)
    parts["key_bias"] = head_bias(f"{at}k_proj.bias", k, d)
    parts["value_bias"] = head_bias(f"{at}v_proj.bias", k, d)
  if a.output_biased:
    parts["output_bias"] = plain(f"{at}o_proj.bias", e)
  if a.query_key_norm:
    parts["query_norm"] = plain(f"{at}q_norm.weight", d)
    parts["key_norm"] = plain(f"{at}k_norm.weight", d)
  if a.sinks:
    parts["sinks"] = plain(f"{at}sinks", h)
  return parts


def mlp_parts(f: int, e: int, at: str, prefix: str = "") -> dict[str, Part]:
  """Parameters of a gated MLP; `prefix` begins their own names."""
  return {
    f"{prefix}gate": linear(f"{at}gate_proj.weight", e, f),
    f"{prefix}up": linear(f"{at}up_proj.weight", e, f),
    f"{prefix}down": linear(f"{at}down_proj.weight", f, e),
  }


def experts_parts(
  m: Experts,
  e: int,
  at: str,
  names: tuple[str, str, str] = LINEAR,
) -> dict[str, Part]:
  """Parameters of experts that are stored one by one, and of their router."""
  gate, up, down = (
    [f"{at}experts.{x}.{name}.weight" for x in range(m.num_experts)]
    for name in names
  )
  return {
    "router": linear(f"{at}gate.weight", e, m.num_experts),
    "expert_gate": stacked(gate, e, m.inner_dim),
    "expert_up": stacked(up, e, m.inner_dim),
    "expert_down": stacked(down, m.inner_dim, e),
  }


def norm_parts(e: int, at: str) -> dict[str, Part]:
  """The norms before attention and MLP."""
  return {
    "attention_norm": plain(f"{at}input_layernorm.weight", e),
    "mlp_norm": plain(f"{at}post_attention_layernorm.weight", e),
  }
