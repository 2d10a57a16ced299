"""An encoder-decoder of T5Gemma's kind in float64, a token at a time."""

from typing import Any

import jax
import numpy as np

from jaxkv import models
from tests.models import numpy_decoder


def _norm(x: Any, weight: Any, stack: Any) -> Any:
  """RMSNorm of [E]."""
  scale = np.sqrt(np.mean(x * x) + stack.norm_eps)
  return x / scale * (weight + stack.norm_offset)


def _turn(x: Any, position: int, rope: models.Rope) -> Any:
  """Rotates the pairs of [H, D]."""
  half = x.shape[-1] // 2
  angle = position * rope.base ** (-np.arange(half) / half)
  z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
  return np.concatenate([z.real, z.imag], axis=-1)


def _read(q: Any, seen: list[Any], a: models.Attention) -> Any:
  """What q [H, D] reads of the pairs (k, v) that it sees, [H, D]."""
  out = np.zeros_like(q)
  for head in range(a.num_heads if seen else 0):
    own = head // (a.num_heads // a.num_kv_heads)
    scale = a.head_dim**-0.5 if a.scale is None else a.scale
    score = np.array([q[head] @ k[own] for k, _ in seen]) * scale
    if a.soft_cap is not None:
      score = a.soft_cap * np.tanh(score / a.soft_cap)
    weight = np.exp(score)
    values = np.array([v[own] for _, v in seen])
    out[head] = weight / weight.sum() @ values
  return out


def _mlp(y: Any, w: Any) -> Any:
  gate = y @ w["gate"]
  inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
  return (0.5 * gate * (1 + np.tanh(inner)) * (y @ w["up"])) @ w["down"]


def _pairs(xs: Any, w: Any, prefix: str, rope: models.Rope | None) -> list[Any]:
  """Keys and values of tokens [X, E]."""
  found = []
  for position, x in enumerate(xs):
    k, v = (
      np.einsum("e,ekd->kd", x, w[f"{prefix}{name}"])
      for name in ("key", "value")
    )
    found.append((k if rope is None else _turn(k, position, rope), v))
  return found


def _stack(weights: Any, tokens: Any, stack: Any, encoded: Any) -> Any:
  """[T, E] after the last norm; `encoded` is None for the encoder itself."""
  xs = [weights["embed"][token] * stack.embed_scale for token in tokens]
  both = isinstance(stack, models.Encoder)
  for layer, w in zip(
    stack.layers, numpy_decoder.layers_of(weights), strict=True
  ):
    a, cross = layer.attention, layer.cross
    ys = [_norm(x, w["attention_norm"], stack) for x in xs]
    pairs = _pairs(ys, w, "", a.rope)
    more = _pairs(encoded, w, "cross_", None) if cross is not None else []
    for position, y in enumerate(ys):
      last = len(xs) if both else position + 1
      window = len(xs) if a.window is None else a.window
      seen = [
        pair
        for place, pair in enumerate(pairs[:last])
        if abs(place - position) < window
      ]
      q = _turn(np.einsum("e,ehd->hd", y, w["query"]), position, a.rope)
      out = np.einsum("hd,hde->e", _read(q, seen, a), w["output"])
      x = xs[position] + _norm(out, w["post_attention_norm"], stack)
      if cross is not None:
        y = _norm(x, w["cross_norm"], stack)
        q = np.einsum("e,ehd->hd", y, w["cross_query"])
        out = np.einsum("hd,hde->e", _read(q, more, cross), w["cross_output"])
        x = x + _norm(out, w["post_cross_norm"], stack)
      out = _mlp(_norm(x, w["mlp_norm"], stack), w)
      xs[position] = x + _norm(out, w["post_mlp_norm"], stack)
  out = [_norm(x, weights["final_norm"], stack) for x in xs]
  return np.array(out).reshape(-1, stack.embed_dim)


def encode(params: Any, tokens: Any, config: models.Decoder) -> Any:
  """[X, E] of an encoder's tokens, without padding."""
  weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
  return _stack(weights["encoder"], tokens, config.encoder, None)


def logits(params: Any, tokens: Any, encoded: Any, config: Any) -> Any:
  """[T, V] of a decoder's tokens."""
  weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
  out = _stack(weights, tokens, config, encoded) @ weights["embed"].T
  return config.logit_cap * np.tanh(out / config.logit_cap)
