"""Sizes of a Llama-family decoder."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

_SIZES = (
  "vocab_size",
  "num_layers",
  "embed_dim",
  "num_heads",
  "num_kv_heads",
  "head_dim",
  "mlp_dim",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
  """Sizes of a Llama-family decoder; hashable, so static under `jit`.

  Attributes:
    vocab_size: V, number of tokens.
    num_layers: L, number of blocks.
    embed_dim: E, width of the residual stream.
    num_heads: H, query heads.
    num_kv_heads: K, key-value heads; divides H.
    head_dim: D, size of a head; even. H * D need not be E.
    mlp_dim: F, inner width of the gated MLP.
    rope_base: wavelength base of the rotary positions.
    norm_eps: added to the mean square in RMSNorm.
    tied_embeddings: whether the embedding is also the output projection.
    dtype: of parameters and activations. Norms, rotations, softmax and
      logits are always float32.
  """

  vocab_size: int
  num_layers: int
  embed_dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  rope_base: float = 10_000.0
  norm_eps: float = 1e-5
  tied_embeddings: bool = True
  dtype: Any = jnp.float32

  def __post_init__(self) -> None:
    for name in _SIZES:
      _check_size(name, getattr(self, name))
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"`num_kv_heads` must divide num_heads, {self.num_heads}, got "
        f"{self.num_kv_heads}."
      )
    if self.head_dim % 2:
      raise ValueError(
        "`head_dim` must be even, since rotary positions rotate pairs, got "
        f"{self.head_dim}."
      )
    for name in ("rope_base", "norm_eps"):
      value = getattr(self, name)
      if not value > 0:
        raise ValueError(f"`{name}` must be positive, got {value}.")
    dtype = jnp.dtype(self.dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
      raise ValueError(f"`dtype` must be a floating type, got {dtype.name}.")
    object.__setattr__(self, "dtype", dtype)


def _check_size(name: str, value: Any) -> None:
  whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
  if not whole or value < 1:
    raise ValueError(f"`{name}` must be an int of at least 1, got {value!r}.")
