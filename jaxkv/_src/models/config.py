"""Sizes of a Llama-family decoder, and the windows of its layers."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.group_kinds import SlidingWindow

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

  Layers may differ in window and rotary base, in a pattern of G layers that
  repeats. Layer i is in layer group i % G of the cache, and keeps its keys and
  values in memory layer i // G: groups of one cache never have a page in
  common, so the G layers of a repetition share a memory layer. Make the cache
  with `groups` and its memory with `num_memory_layers`, and call
  `jaxkv.recycle` before `jaxkv.allocate`, so that windows leave pages behind.

  Attributes:
    vocab_size: V, number of tokens.
    num_layers: L, number of blocks; a multiple of G.
    embed_dim: E, width of the residual stream.
    num_heads: H, query heads.
    num_kv_heads: K, key-value heads; divides H.
    head_dim: D, size of a head; even. H * D need not be E.
    mlp_dim: F, inner width of the gated MLP.
    windows: the pattern, a window for each of the G layers. With a window of w,
      a token attends to itself and the w - 1 tokens before it; with None, to
      all tokens before it.
    rope_base: wavelength base of the rotary positions; a tuple has one for each
      layer of the pattern.
    norm_eps: added to the mean square in RMSNorm.
    tied_embeddings: whether the embedding is also the output projection.
    dtype: of parameters and activations. Norms, rotations, softmax and
      logits are always float32.

  Raises:
    ValueError: a field is out of range, or two fields contradict each other.

  Examples:
    Two layers with a window of 8 and one without, twice:

    >>> config = LlamaConfig(vocab_size=11, num_layers=6, embed_dim=8,
    ...                      num_heads=4, num_kv_heads=2, head_dim=2,
    ...                      mlp_dim=16, windows=(8, 8, None),
    ...                      rope_base=(1e4, 1e4, 1e6))
    >>> len(config.groups), config.groups[0], config.num_memory_layers
    (3, SlidingWindow(page_size=None, window=8), 2)
  """

  vocab_size: int
  num_layers: int
  embed_dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  windows: tuple[int | None, ...] = (None,)
  rope_base: float | tuple[float, ...] = 10_000.0
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
    if not self.norm_eps > 0:
      raise ValueError(f"`norm_eps` must be positive, got {self.norm_eps}.")
    self._check_pattern()
    dtype = jnp.dtype(self.dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
      raise ValueError(f"`dtype` must be a floating type, got {dtype.name}.")
    object.__setattr__(self, "dtype", dtype)

  def _check_pattern(self) -> None:
    windows, bases = self.windows, self.rope_base
    if not isinstance(windows, tuple) or not windows:
      raise ValueError(
        "`windows` must be a tuple of one or more windows, got "
        f"{windows!r}; use (None,) for full attention in every layer."
      )
    for window in windows:
      if window is not None and not _is_size(window):
        raise ValueError(
          "`windows` must hold ints of at least 1, or None for full attention, "
          f"got {window!r}."
        )
    if self.num_layers % len(windows):
      raise ValueError(
        f"`num_layers` must be a multiple of len(windows), {len(windows)}, got "
        f"{self.num_layers}; if the pattern does not fit, name the window of "
        "every layer."
      )
    if isinstance(bases, tuple) and len(bases) != len(windows):
      raise ValueError(
        f"`rope_base` must have a base for each of the {len(windows)} windows, "
        f"got {bases}; or give one number for all layers."
      )
    for base in self.rope_bases:
      if not isinstance(base, int | float | np.number) or not base > 0:
        raise ValueError(
          "`rope_base` must be a positive number, or a tuple of them, got "
          f"{bases!r}."
        )
    ints = (None if window is None else int(window) for window in windows)
    object.__setattr__(self, "windows", tuple(ints))

  @property
  def rope_bases(self) -> tuple[float, ...]:
    """The rotary base of each layer of the pattern, G of them."""
    if isinstance(self.rope_base, tuple):
      return self.rope_base
    return (self.rope_base,) * len(self.windows)

  @property
  def groups(self) -> tuple[GroupKind, ...]:
    """For `CacheConfig.groups`: G groups, one for each window."""
    return tuple(
      FullAttention() if window is None else SlidingWindow(window)
      for window in self.windows
    )

  @property
  def num_memory_layers(self) -> int:
    """For `jaxkv.kv.init(num_layers=)`: repetitions of the pattern, L // G."""
    return self.num_layers // len(self.windows)


def _is_size(value: Any) -> bool:
  whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
  return whole and int(value) >= 1


def _check_size(name: str, value: Any) -> None:
  if not _is_size(value):
    raise ValueError(f"`{name}` must be an int of at least 1, got {value!r}.")
