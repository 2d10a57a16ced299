"""DeepSeek V2 and V3: latent attention, and experts beside shared ones."""

from typing import Any

from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import Experts
from jaxkv._src.models.decoder.description import LatentAttention
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.decoder.description import Mlp
from jaxkv._src.models.loading import ropes
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.families import blocks
from jaxkv._src.models.loading.plans import Part
from jaxkv._src.models.loading.plans import Plan
from jaxkv._src.models.loading.plans import into_heads
from jaxkv._src.models.loading.plans import linear
from jaxkv._src.models.loading.plans import out_of_heads
from jaxkv._src.models.loading.plans import plain
from jaxkv._src.models.loading.plans import top_parts
from jaxkv._src.models.loading.plans import unused_names


def deepseek_v2(config: ConfigFile, dtype: Any) -> Plan:
  """DeepSeek V2: the best groups by their best expert, or no groups."""
  config.only("norm_topk_prob", False)
  config.only("scoring_func", "softmax")
  config.only("topk_method", "greedy", "group_limited_greedy")
  grouped = config.get("topk_method", "greedy") != "greedy"
  config.ignore("n_group", "topk_group")
  experts = Experts(
    num_experts=_num_experts(config, 64),
    normalized=False,
    num_groups=config.size("n_group") if grouped else 1,
    num_chosen_groups=config.size("topk_group") if grouped else 1,
    **_chosen(config, 1.0),
  )
  return _plan(config, dtype, experts, interleaved=True)


def deepseek_v3(config: ConfigFile, dtype: Any) -> Plan:
  """DeepSeek V3 and R1: sigmoid scores, with a correction of the choice."""
  config.only("scoring_func", "sigmoid")
  config.only("topk_method", "noaux_tc")
  experts = Experts(
    num_experts=_num_experts(config, 256),
    scores="sigmoid",
    normalized=config.flag("norm_topk_prob", True),
    corrected=True,
    num_groups=config.size("n_group", 8),
    num_chosen_groups=config.size("topk_group", 4),
    group_score="best_two",
    **_chosen(config, 2.5),
  )
  interleaved = config.flag("rope_interleave", True)
  return _plan(config, dtype, experts, interleaved=interleaved)


def _num_experts(config: ConfigFile, default: int) -> int:
  number = config.size("n_routed_experts", default)
  return config.size("num_local_experts", number)


def _chosen(config: ConfigFile, scale: float) -> dict[str, Any]:
  inner = config.size("moe_intermediate_size")
  shared = config.count("n_shared_experts", 0)
  return {
    "num_chosen": config.size("num_experts_per_tok"),
    "inner_dim": inner,
    "activation": blocks.activation(config, "hidden_act", "silu"),
    "scale": config.number("routed_scaling_factor", scale),
    "shared_dim": inner * shared if shared else None,
  }


def _plan(
  config: ConfigFile, dtype: Any, experts: Experts, *, interleaved: bool
) -> Plan:
  for key in ("attention_bias", "mlp_bias"):
    config.only(key, False)
  config.only("moe_layer_freq", 1)
  # The norms of latents have this one whatever the others have.
  config.only("rms_norm_eps", 1e-6)
  config.ignore("head_dim", "qk_head_dim", "num_key_value_heads")
  attention = _attention(config, interleaved)
  layers, e = config.size("num_hidden_layers"), config.size("hidden_size")
  first = config.count("first_k_dense_replace", 0)
  mlp = Mlp(
    inner_dim=config.size("intermediate_size"), activation=experts.activation
  )
  decoder = Decoder(
    vocab_size=config.size("vocab_size"),
    embed_dim=e,
    layers=tuple(
      Layer(attention=attention, mlp=mlp if number < first else experts)
      for number in range(layers)
    ),
    norm_eps=1e-6,
    tied_embeddings=config.flag("tie_word_embeddings", False),
    dtype=dtype,
  )

  def layer(number: int) -> dict[str, Part]:
    at = f"model.layers.{number}."
    parts = blocks.norm_parts(e, at)
    parts |= _attention_parts(attention, e, f"{at}self_attn.")
    if number < first:
      return parts | blocks.mlp_parts(mlp.inner_dim, e, f"{at}mlp.")
    return parts | _experts_parts(experts, e, f"{at}mlp.")

  # Layers after the last one predict further tokens, in training.
  more = config.count("num_nextn_predict_layers", 0)
  extra = [rf"model\.layers\.{layers + number}\..*" for number in range(more)]
  return Plan(
    decoder=decoder,
    top=top_parts(decoder),
    layer=layer,
    unused=unused_names(decoder, *extra),
  )


def _attention(config: ConfigFile, interleaved: bool) -> LatentAttention:
  plain_dim = config.size("qk_nope_head_dim")
  rotated = config.size("qk_rope_head_dim")
  table = ropes.rope_table(config, 10_000.0)
  scale = (plain_dim + rotated) ** -0.5
  if table["rope_type"] != "default" and table.get("mscale_all_dim"):
    growth = ropes.magnitude(table["factor"], table["mscale_all_dim"])
    scale *= growth * growth
  rank = config.size("q_lora_rank", None)
  return LatentAttention(
    num_heads=config.size("num_attention_heads"),
    latent_dim=config.size("kv_lora_rank"),
    plain_dim=plain_dim,
    rotated_dim=rotated,
    value_dim=config.size("v_head_dim"),
    query_rank=rank,
    rope=ropes.rope_of(table, config, rotated, interleaved=interleaved),
    scale=scale,
  )


def _attention_parts(a: LatentAttention, e: int, at: str) -> dict[str, Part]:
  h, latent, rank = a.num_heads, a.latent_dim, a.query_rank
  n, v = a.plain_dim, a.value_dim
  size = n + a.rotated_dim
  both = ((f"{at}kv_b_proj.weight", (h * (n + v), latent)),)

  def heads(w: Any) -> Any:
    return w.reshape(h, n + v, latent).transpose(2, 0, 1)

  parts = {
    "latent": linear(
      f"{at}kv_a_proj_with_mqa.weight", e, latent + a.rotated_dim
    ),
    "latent_norm": plain(f"{at}kv_a_layernorm.weight", latent),
    "key": Part(both, lambda w: heads(w)[..., :n]),
    "value": Part(both, lambda w: heads(w)[..., n:]),
    "output": out_of_heads(f"{at}o_proj.weight", h, v, e),
  }
  if rank is None:
    parts["query"] = into_heads(f"{at}q_proj.weight", e, h, size)
    return parts
  return parts | {
    "query_down": linear(f"{at}q_a_proj.weight", e, rank),
    "query_norm": plain(f"{at}q_a_layernorm.weight", rank),
    "query": into_heads(f"{at}q_b_proj.weight", rank, h, size),
  }


def _experts_parts(m: Experts, e: int, at: str) -> dict[str, Part]:
  parts = blocks.experts_parts(m, e, at)
  if m.corrected:
    name = f"{at}gate.e_score_correction_bias"
    parts["correction"] = plain(name, m.num_experts)
  if m.shared_dim is not None:
    at = f"{at}shared_experts."
    parts |= blocks.mlp_parts(m.shared_dim, e, at, "shared_")
  return parts
