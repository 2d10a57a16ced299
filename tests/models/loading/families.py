"""Model families of transformers, in tiny sizes."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv import models

SIZES = {
  "vocab_size": 96,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 4,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 256,
}
_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
_LATENT = {
  "num_key_value_heads": 4,
  "q_lora_rank": 24,
  "kv_lora_rank": 16,
  "qk_nope_head_dim": 8,
  "qk_rope_head_dim": 4,
  "v_head_dim": 12,
  "n_routed_experts": 8,
  "num_experts_per_tok": 2,
  "moe_intermediate_size": 16,
  "n_shared_experts": 2,
  "first_k_dense_replace": 1,
  "n_group": 4,
  "topk_group": 2,
}
_YARN = {
  "rope_type": "yarn",
  "rope_theta": 1e4,
  "factor": 4.0,
  "original_max_position_embeddings": 16,
}
# The name in transformers, and what the checkpoint is made with.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
  "Llama 2": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
  "Llama 3": (
    "Llama",
    {
      "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
      },
      "head_dim": 16,
      "tie_word_embeddings": True,
    },
  ),
  "Llama, linear": (
    "Llama",
    {
      "rope_parameters": {
        "rope_type": "linear", "rope_theta": 1e4, "factor": 4.0,
      }
    },
  ),
  "Mistral": ("Mistral", {"sliding_window": 9, "head_dim": 8}),
  "Mixtral": ("Mixtral", _EXPERTS | {"sliding_window": None}),
  "Qwen2": ("Qwen2", {}),
  "Qwen2, windows": (
    "Qwen2",
    {
      "use_sliding_window": True,
      "sliding_window": 7,
      "max_window_layers": 2,
    },
  ),
  "Qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
  "Qwen3-MoE": (
    "Qwen3Moe",
    {
      "head_dim": 16,
      "num_local_experts": 6,
      "num_experts_per_tok": 3,
      "moe_intermediate_size": 24,
      "norm_topk_prob": True,
      "mlp_only_layers": [1],
    },
  ),
  "Qwen3-Next": (
    "Qwen3Next",
    {
      "head_dim": 16,
      "num_experts": 6,
      "num_experts_per_tok": 3,
      "moe_intermediate_size": 24,
      "shared_expert_intermediate_size": 16,
      "linear_num_key_heads": 2,
      "linear_num_value_heads": 4,
      "linear_key_head_dim": 8,
      "linear_value_head_dim": 12,
    },
  ),
  "Gemma 2": (
    "Gemma2",
    {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24},
  ),
  "Gemma 3": (
    "Gemma3",
    {
      "num_hidden_layers": 8,
      "head_dim": 16,
      "sliding_window": 6,
      "query_pre_attn_scalar": 24,
      "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
          "rope_type": "linear", "rope_theta": 1e6, "factor": 8.0,
        },
      },
    },
  ),
  "gpt-oss": (
    "GptOss",
    _EXPERTS
    | {
      "head_dim": 16,
      # More experts than tensors, because one tensor has those of a layer.
      "num_local_experts": 64,
      "sliding_window": 6,
      "rope_parameters": _YARN | {"truncate": False},
    },
  ),
  "DeepSeek-V2": (
    "DeepseekV2",
    _LATENT
    | {
      "topk_method": "group_limited_greedy",
      "routed_scaling_factor": 2.0,
      "rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
  ),
  "DeepSeek-V2-Lite": (
    "DeepseekV2",
    _LATENT | {"topk_method": "greedy", "q_lora_rank": None},
  ),
  "DeepSeek-V3": (
    "DeepseekV3",
    _LATENT
    | {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
  ),
}  # fmt: skip
TOKENS = 33


def randomized(model: Any) -> Any:
  """Adds noise to a model of transformers, so that no weight is 0 or 1."""
  import torch  # pyright: ignore[reportMissingImports]

  model = model.eval().float()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(torch.randn_like(parameter) * 0.1)
  return model


def model_of(transformers: Any, name: str, **changes: Any) -> Any:
  """Makes a random model of a family."""
  import torch  # pyright: ignore[reportMissingImports]

  prefix, values = FAMILIES[name]
  text = "Gemma3Text" if prefix == "Gemma3" else prefix
  torch.manual_seed(0)
  config = getattr(transformers, f"{text}Config")(**(SIZES | values | changes))
  config._attn_implementation = "eager"
  if hasattr(config, "_experts_implementation"):
    config._experts_implementation = "eager"
  return randomized(getattr(transformers, f"{prefix}ForCausalLM")(config))


def uncached(loaded: models.Pretrained, tokens: np.ndarray) -> np.ndarray:
  """Returns the logits of a loaded model."""
  columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)
  logits = models.forward_uncached(
    loaded.params,
    jnp.asarray(tokens),
    jnp.broadcast_to(columns, tokens.shape),
    config=loaded.config,
  )
  return np.asarray(logits)


def expected(model: Any, tokens: np.ndarray) -> np.ndarray:
  import torch  # pyright: ignore[reportMissingImports]

  with torch.no_grad():
    return model(torch.asarray(tokens).long()).logits.float().numpy()


def tokens() -> np.ndarray:
  rng = np.random.default_rng(0)
  return rng.integers(3, 96, (3, TOKENS)).astype(np.int32)
