"""Decoders whose layers differ only in window and rotary base."""

from typing import Any

import jax.numpy as jnp

from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.decoder.description import Mlp
from jaxkv._src.models.decoder.description import check_size
from jaxkv._src.models.decoder.rope import Rope


def llama(
  *,
  vocab_size: int,
  num_layers: int,
  embed_dim: int,
  num_heads: int,
  num_kv_heads: int,
  head_dim: int,
  mlp_dim: int,
  windows: tuple[int | None, ...] = (None,),
  rope_base: float | tuple[float, ...] = 10_000.0,
  norm_eps: float = 1e-5,
  tied_embeddings: bool = True,
  dtype: Any = jnp.float32,
) -> Decoder:
  """Returns a Llama-family `Decoder`, with a repeated pattern of windows.

  Args:
    vocab_size: V, number of tokens.
    num_layers: L, number of blocks.
    embed_dim: E, width of the residual stream.
    num_heads: H, query heads.
    num_kv_heads: K, key-value heads, a divisor of H.
    head_dim: D, size of a head, an even number. H * D can differ from E.
    mlp_dim: F, inner width of the gated MLP.
    windows: a pattern of windows, which repeats over the layers; see
      `Attention.window`.
    rope_base: base of the rotary positions (see `Rope`), or a tuple with one
      base for each window of the pattern.
    norm_eps: added to the mean square in RMSNorm.
    tied_embeddings: True if the embedding is also the output projection.
    dtype: dtype of parameters and activations.

  Raises:
    ValueError: an argument is out of range, or two arguments do not fit
      together.

  Examples:
    Two layers with a window of 8 and one without, twice:

    >>> decoder = llama(vocab_size=11, num_layers=6, embed_dim=8, num_heads=4,
    ...                 num_kv_heads=2, head_dim=2, mlp_dim=16,
    ...                 windows=(8, 8, None), rope_base=(1e4, 1e4, 1e6))
    >>> [layer.attention.window for layer in decoder.layers]
    [8, 8, None, 8, 8, None]
  """
  if not isinstance(windows, tuple) or not windows:
    raise ValueError(
      f"`windows` must be a tuple of one or more windows, got {windows!r}; use "
      "(None,) for full attention in every layer."
    )
  # A base for each window is allowed, because Gemma has two bases.
  bases = rope_base if isinstance(rope_base, tuple) else (rope_base,)
  if len(bases) not in (1, len(windows)):
    raise ValueError(
      f"`rope_base` must have a base for each of the {len(windows)} windows, "
      f"got {rope_base}; or pass one number for all layers."
    )
  # `Decoder` does not check `num_layers`, because it has no such field.
  check_size("num_layers", num_layers)
  pattern = [
    Layer(
      attention=Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        window=window,
        rope=Rope(base=bases[index % len(bases)]),
      ),
      mlp=Mlp(inner_dim=mlp_dim),
    )
    for index, window in enumerate(windows)
  ]
  return Decoder(
    vocab_size=vocab_size,
    embed_dim=embed_dim,
    layers=tuple(pattern[i % len(pattern)] for i in range(num_layers)),
    norm_eps=norm_eps,
    tied_embeddings=tied_embeddings,
    dtype=dtype,
  )
