"""DeepSeek V2 and V3: latent attention, routed and shared experts."""

from typing import Any

from jaxkv._src.models.decoder.description import Experts
from jaxkv._src.models.decoder.description import LatentAttention
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.decoder.description import Mlp
from jaxkv._src.models.loading import rope_config
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.families import layers
from jaxkv._src.models.loading.weight_maps import Name
from jaxkv._src.models.loading.weight_maps import Source
from jaxkv._src.models.loading.weight_maps import WeightMap
from jaxkv._src.models.loading.weight_maps import weight_map


def deepseek_v2(config: ConfigFile, dtype: Any) -> WeightMap:
  """Returns the weight map of DeepSeek V2, with or without expert groups."""
  config.only("norm_topk_prob", False)
  config.only("scoring_func", "softmax")
  config.only("topk_method", "greedy", "group_limited_greedy")
  has_groups = config.get("topk_method", "greedy") != "greedy"
  # Without groups these keys have no effect.
  config.ignore("n_group", "topk_group")
  experts = Experts(
    normalized=False,
    num_groups=config.size("n_group") if has_groups else 1,
    num_chosen_groups=config.size("topk_group") if has_groups else 1,
    **_expert_sizes(config, num_experts=64, scale=1.0),
  )
  return _map(config, dtype, experts, interleaved=True)


def deepseek_v3(config: ConfigFile, dtype: Any) -> WeightMap:
  """Returns the weight map of DeepSeek V3 and R1."""
  config.only("scoring_func", "sigmoid")
  config.only("topk_method", "noaux_tc")
  experts = Experts(
    scores="sigmoid",
    normalized=config.flag("norm_topk_prob", True),
    corrected=True,
    num_groups=config.size("n_group", 8),
    num_chosen_groups=config.size("topk_group", 4),
    group_score="best_two",
    **_expert_sizes(config, num_experts=256, scale=2.5),
  )
  interleaved = config.flag("rope_interleave", True)
  return _map(config, dtype, experts, interleaved=interleaved)


def _expert_sizes(
  config: ConfigFile, *, num_experts: int, scale: float
) -> dict[str, Any]:
  """Returns fields of `Experts`; `num_experts` and `scale` are defaults."""
  # Files use one of two keys for the number of experts.
  num_experts = config.size("n_routed_experts", num_experts)
  inner = config.size("moe_intermediate_size")
  shared = config.count("n_shared_experts", 0)
  return {
    "num_experts": config.size("num_local_experts", num_experts),
    "num_chosen": config.size("num_experts_per_tok"),
    "inner_dim": inner,
    "activation": layers.activation(config, "hidden_act", "silu"),
    "scale": config.number("routed_scaling_factor", scale),
    "shared_dim": inner * shared if shared else None,
  }


def _map(
  config: ConfigFile, dtype: Any, experts: Experts, *, interleaved: bool
) -> WeightMap:
  for key in ("attention_bias", "mlp_bias"):
    config.only(key, False)
  config.only("moe_layer_freq", 1)
  # The reference code always uses 1e-6 in the norms of latents, but a `Decoder`
  # has one eps for all norms. So `rms_norm_eps` must be 1e-6, too.
  config.only("rms_norm_eps", 1e-6)
  config.ignore("head_dim", "qk_head_dim", "num_key_value_heads")
  attention = _attention(config, interleaved)
  num_layers = config.size("num_hidden_layers")
  num_dense = config.count("first_k_dense_replace", 0)
  mlp = Mlp(
    inner_dim=config.size("intermediate_size"), activation=experts.activation
  )
  blocks = (
    Layer(attention=attention, mlp=mlp if index < num_dense else experts)
    for index in range(num_layers)
  )
  decoder = layers.decoder(config, dtype, blocks)
  # The tensors of layers after the first `num_layers` are ignored. They are for
  # multi-token prediction, which is not supported.
  count = config.count("num_nextn_predict_layers", 0)
  ignored = [rf"model\.layers\.{num_layers + i}\..*" for i in range(count)]
  names = _names(attention)
  return weight_map(decoder, lambda _: names, *ignored)


def _attention(config: ConfigFile, interleaved: bool) -> LatentAttention:
  plain_dim = config.size("qk_nope_head_dim")
  rotated = config.size("qk_rope_head_dim")
  table = rope_config.rope_table(config, 10_000.0)
  scale = (plain_dim + rotated) ** -0.5
  if table["rope_type"] != "default" and table.get("mscale_all_dim"):
    # YaRN multiplies both queries and keys by `growth`, so it multiplies logits
    # by the square of `growth`.
    growth = rope_config.magnitude(table["factor"], table["mscale_all_dim"])
    scale *= growth * growth
  rank = config.size("q_lora_rank", None)
  return LatentAttention(
    num_heads=config.size("num_attention_heads"),
    latent_dim=config.size("kv_lora_rank"),
    plain_dim=plain_dim,
    rotated_dim=rotated,
    value_dim=config.size("v_head_dim"),
    query_rank=rank,
    rope=rope_config.rope_of(table, config, rotated, interleaved=interleaved),
    scale=scale,
  )


def _names(a: LatentAttention) -> dict[str, Name]:
  h, latent = a.num_heads, a.latent_dim
  n, v = a.plain_dim, a.value_dim

  # One tensor has the key projection and the value projection of each head.
  tensors = (("self_attn.kv_b_proj.weight", (h * (n + v), latent)),)

  def heads(w: Any) -> Any:
    return w.reshape(h, n + v, latent).transpose(2, 0, 1)

  shared = "mlp.shared_experts."
  names = layers.NAMES | {
    "latent": "self_attn.kv_a_proj_with_mqa.weight",
    "latent_norm": "self_attn.kv_a_layernorm.weight",
    "key": Source(tensors, lambda w: heads(w)[..., :n]),
    "value": Source(tensors, lambda w: heads(w)[..., n:]),
    "correction": "mlp.gate.e_score_correction_bias",
    "shared_gate": f"{shared}gate_proj.weight",
    "shared_up": f"{shared}up_proj.weight",
    "shared_down": f"{shared}down_proj.weight",
  }
  if a.query_rank is not None:
    names |= {
      "query_down": "self_attn.q_a_proj.weight",
      "query_norm": "self_attn.q_a_layernorm.weight",
      "query": "self_attn.q_b_proj.weight",
    }
  return names
