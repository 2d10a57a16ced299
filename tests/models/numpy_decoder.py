"""The reference decoder: float64 NumPy, one token at a time."""

from typing import Any

import jax
import numpy as np

from jaxkv import models


def layers_of(params: Any) -> list[dict[str, Any]]:
  """Returns the parameters of each layer, from first to last."""
  layers = []
  for segment in params["layers"]:
    num_repeats = len(segment[0]["mlp_norm"])
    for i in range(num_repeats):
      layers += [
        {name: leaf[i] for name, leaf in layer.items()} for layer in segment
      ]
  return layers


def logits(params: Any, tokens: Any, config: models.Decoder) -> Any:
  """Computes a decoder of `models.llama` in float64, token by token."""
  weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
  memory: list[list[Any]] = [[] for _ in config.layers]

  def norm(x, weight):
    return x / np.sqrt(np.mean(x * x) + config.norm_eps) * weight

  def turn(x, position, rope):
    half = x.shape[-1] // 2
    angle = position * rope.base ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], axis=-1)

  logits = []
  for position, token in enumerate(tokens):
    x = weights["embed"][token]
    for layer, w, layer_memory in zip(
      config.layers, layers_of(weights), memory, strict=True
    ):
      a = layer.attention
      y = norm(x, w["attention_norm"])
      q = turn(np.einsum("e,ehd->hd", y, w["query"]), position, a.rope)
      k = turn(np.einsum("e,ekd->kd", y, w["key"]), position, a.rope)
      layer_memory.append((k, np.einsum("e,ekd->kd", y, w["value"])))
      visible = layer_memory[-(a.window or position + 1) :]
      for head in range(a.num_heads):
        kv_head = head // (a.num_heads // a.num_kv_heads)
        score = [q[head] @ k[kv_head] for k, _ in visible]
        score = np.exp(np.array(score) / np.sqrt(a.head_dim))
        values = np.array([v[kv_head] for _, v in visible])
        x = x + (score / score.sum()) @ values @ w["output"][head]
      y = norm(x, w["mlp_norm"])
      gate = y @ w["gate"]
      x = x + (gate / (1 + np.exp(-gate)) * (y @ w["up"])) @ w["down"]
    unembed = weights.get("unembed", weights["embed"].T)
    logits.append(norm(x, weights["final_norm"]) @ unembed)
  return np.array(logits)
