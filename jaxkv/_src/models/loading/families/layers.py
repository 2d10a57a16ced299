"""Sources (see `weight_maps`) and settings that several families share."""

from jaxkv._src.models.decoder.description import Activation
from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import Experts
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.weight_maps import Source
from jaxkv._src.models.loading.weight_maps import head_bias
from jaxkv._src.models.loading.weight_maps import head_inputs
from jaxkv._src.models.loading.weight_maps import head_outputs
from jaxkv._src.models.loading.weight_maps import linear
from jaxkv._src.models.loading.weight_maps import plain
from jaxkv._src.models.loading.weight_maps import stacked

_ACTIVATIONS: dict[str, Activation] = {
  "silu": "silu",
  "swish": "silu",
  "gelu": "gelu",
  "gelu_pytorch_tanh": "gelu_tanh",
  "gelu_new": "gelu_tanh",
  "relu": "relu",
}

# The usual names of an MLP's gate, up and down projections.
MLP_NAMES = ("gate_proj", "up_proj", "down_proj")


def activation(config: ConfigFile, key: str, default: str) -> Activation:
  """Returns the `Activation` for the value of a key."""
  config.only(key, *_ACTIVATIONS)
  return _ACTIVATIONS[config.get(key, default)]


def head_dim_of(config: ConfigFile) -> int:
  """Returns the head size, by default hidden_size // num_attention_heads."""
  heads, width = config.size("num_attention_heads"), config.size("hidden_size")
  # Without `max`, a damaged file with more heads than elements would give 0.
  return config.size("head_dim", max(width // heads, 1))


def layer_types(config: ConfigFile, default: list[str], kind: str) -> list[str]:
  """Returns each layer's type. `default` replaces missing `layer_types`."""
  types = config.items("layer_types", str, default)
  num_layers = config.size("num_hidden_layers")
  names = {"full_attention", kind}
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
  return [window if kind == "sliding_attention" else None for kind in types]


def attention_sources(a: Attention, e: int, path: str) -> dict[str, Source]:
  """Returns the sources of attention, whose tensor names begin with `path`."""
  h, k, d = a.num_heads, a.num_kv_heads, a.head_dim
  sources = {
    "query": head_inputs(f"{path}q_proj.weight", e, h, d),
    "key": head_inputs(f"{path}k_proj.weight", e, k, d),
    "value": head_inputs(f"{path}v_proj.weight", e, k, d),
    "output": head_outputs(f"{path}o_proj.weight", h, d, e),
  }
  if a.biased:
    sources["query_bias"] = head_bias(f"{path}q_proj.bias", h, d)
    sources["key_bias"] = head_bias(f"{path}k_proj.bias", k, d)
    sources["value_bias"] = head_bias(f"{path}v_proj.bias", k, d)
  if a.output_biased:
    sources["output_bias"] = plain(f"{path}o_proj.bias", e)
  if a.query_key_norm:
    sources["query_norm"] = plain(f"{path}q_norm.weight", d)
    sources["key_norm"] = plain(f"{path}k_norm.weight", d)
  if a.sinks:
    sources["sinks"] = plain(f"{path}sinks", h)
  return sources


def mlp_sources(
  f: int, e: int, path: str, prefix: str = ""
) -> dict[str, Source]:
  """Returns the sources of a gated MLP, with `prefix` before their keys."""
  return {
    f"{prefix}gate": linear(f"{path}gate_proj.weight", e, f),
    f"{prefix}up": linear(f"{path}up_proj.weight", e, f),
    f"{prefix}down": linear(f"{path}down_proj.weight", f, e),
  }


def experts_sources(
  m: Experts,
  e: int,
  path: str,
  names: tuple[str, str, str] = MLP_NAMES,
) -> dict[str, Source]:
  """Returns the sources of a router and of experts stored one by one."""
  gate, up, down = (
    [f"{path}experts.{x}.{name}.weight" for x in range(m.num_experts)]
    for name in names
  )
  return {
    "router": linear(f"{path}gate.weight", e, m.num_experts),
    "expert_gate": stacked(gate, e, m.inner_dim),
    "expert_up": stacked(up, e, m.inner_dim),
    "expert_down": stacked(down, m.inner_dim, e),
  }


def norm_sources(e: int, path: str) -> dict[str, Source]:
  """Returns the sources of the norms before attention and MLP."""
  return {
    "attention_norm": plain(f"{path}input_layernorm.weight", e),
    "mlp_norm": plain(f"{path}post_attention_layernorm.weight", e),
  }
