"""The reference decoder in float64 NumPy, one token at a time."""

from typing import Any

import jax
import numpy as np

from jaxkv import models


def logits(params: Any, tokens: Any, config: models.LlamaConfig) -> Any:
  """The decoder in float64, one token and one head at a time."""
  weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
  group = config.num_heads // config.num_kv_heads
  half = config.head_dim // 2

  def norm(x, weight):
    return x / np.sqrt(np.mean(x * x) + config.norm_eps) * weight

  period = len(config.windows)
  bases = np.broadcast_to(config.rope_base, period)

  def turn(x, position, layer):
    angle = position * bases[layer % period] ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], axis=-1)

  memory: list[list[Any]] = [[] for _ in range(config.num_layers)]
  logits = []
  for position, token in enumerate(tokens):
    x = weights["embed"][token]
    for layer in range(config.num_layers):
      w = {name: leaf[layer] for name, leaf in weights["layers"].items()}
      y = norm(x, w["attention_norm"])
      q = turn(np.einsum("e,ehd->hd", y, w["query"]), position, layer)
      k = turn(np.einsum("e,ekd->kd", y, w["key"]), position, layer)
      memory[layer].append((k, np.einsum("e,ekd->kd", y, w["value"])))
      seen = memory[layer][-(config.windows[layer % period] or position + 1) :]
      for head in range(config.num_heads):
        score = [q[head] @ k[head // group] for k, _ in seen]
        score = np.exp(np.array(score) / np.sqrt(config.head_dim))
        values = np.array([v[head // group] for _, v in seen])
        x = x + (score / score.sum()) @ values @ w["output"][head]
      y = norm(x, w["mlp_norm"])
      gate = y @ w["gate"]
      x = x + (gate / (1 + np.exp(-gate)) * (y @ w["up"])) @ w["down"]
    unembed = weights.get("unembed", weights["embed"].T)
    logits.append(norm(x, weights["final_norm"]) @ unembed)
  return np.array(logits)
