"""Tiny decoders of every kind, and their steps."""

from typing import Any

import numpy as np

import jaxkv
from jaxkv import models

VOCABULARY = 31
EXPERTS = models.Experts(num_experts=6, num_chosen=2, inner_dim=12)
LATENTS = models.LatentAttention(
  num_heads=2, latent_dim=8, plain_dim=4, rotated_dim=4, value_dim=6
)
DELTA_NET = models.DeltaNet(
  num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=4, kernel_size=3
)
_MLP = models.Mlp(inner_dim=24)


def attention(**fields: Any) -> models.Attention:
  return models.Attention(num_heads=4, num_kv_heads=2, head_dim=4, **fields)


def layer(mixer: Any, mlp: Any = _MLP, **fields: Any) -> models.Layer:
  return models.Layer(attention=mixer, mlp=mlp, **fields)


# As in Llama, Gemma 2, gpt-oss, Qwen3-Next and DeepSeek-V3.
LAYERS: dict[str, tuple[models.Layer, ...]] = {
  "llama": (layer(attention()),) * 2,
  "windows and caps": (
    layer(attention(window=4, soft_cap=2.0), post_norms=True),
    layer(attention(soft_cap=2.0, scale=0.7), post_norms=True),
  )
  * 2,
  "sinks and experts": (
    layer(attention(window=3, sinks=True, biased=True), EXPERTS),
    layer(attention(sinks=True, gated=True), EXPERTS),
  ),
  "states": (
    layer(DELTA_NET),
    layer(DELTA_NET, EXPERTS),
    layer(attention(query_key_norm=True)),
  ),
  "latents": (layer(LATENTS),) * 2,
}


def decoder(layers: tuple[models.Layer, ...], **fields: Any) -> models.Decoder:
  return models.Decoder(
    vocab_size=VOCABULARY, embed_dim=16, layers=layers, **fields
  )


def llama(**changes: Any) -> models.Decoder:
  """Returns a decoder of `models.llama`, by default with one small layer."""
  sizes = {
    "vocab_size": 11,
    "num_layers": 1,
    "embed_dim": 8,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
    "mlp_dim": 8,
  }
  return models.llama(**(sizes | changes))


def cache_config(
  decoder: models.Decoder,
  *,
  num_pages: int,
  offload_pages: int = 0,
  **sizes: Any,
) -> jaxkv.CacheConfig:
  """Returns a cache whose pools all have the same numbers of pages.

  States are kept by a `StateRetention`, as in `models.cache_config`.
  """
  groups = models.cache_groups(decoder)
  num_pools = 1 + max(kind.pool for kind in groups)
  if any(kind.holds_states for kind in groups):
    sizes = {"prefix_retention_interval": jaxkv.StateRetention()} | sizes
  return jaxkv.CacheConfig(
    num_pages=(num_pages,) * num_pools,
    offload_pages=(offload_pages,) * num_pools,
    groups=groups,
    **sizes,
  )


def in_steps(step: Any, tokens: np.ndarray, prompts: Any, chunk: int) -> Any:
  """Runs prompts in chunks, and every other token alone.

  `step` gets tokens, starts and num_tokens. Returns the logits, [B, T, V].
  """
  num_rows, num_columns = tokens.shape
  prompts = np.asarray(prompts)
  starts = np.zeros(num_rows, np.int32)
  parts = np.empty((num_rows, num_columns), object)
  while np.any(starts < num_columns):
    left = np.where(starts < prompts, prompts - starts, starts < num_columns)
    num_tokens = np.minimum(left, chunk).astype(np.int32)
    width = chunk if np.any(num_tokens > 1) else 1
    piece = np.zeros((num_rows, width), np.int32)
    for row, count in enumerate(num_tokens):
      piece[row, :count] = tokens[row, starts[row] : starts[row] + count]
    logits = step(piece, starts, num_tokens)
    for row, count in enumerate(num_tokens):
      for column in range(count):
        parts[row, starts[row] + column] = logits[row, column]
    starts = starts + num_tokens
  return np.array(parts.tolist())
