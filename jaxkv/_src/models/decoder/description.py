"""Classes that describe a decoder. A `Decoder` has one `Layer` per block.

All classes are hashable, so a `Decoder` can be a static argument under `jit`.
Letters: E embedding width, H query heads, K key-value heads, D head size, F
inner width of an MLP, X experts, V vocabulary size, L layers.
"""

import dataclasses
import math
from typing import Any
from typing import Literal
from typing import get_args

import jax.numpy as jnp
import numpy as np

from jaxkv._src.arrays.arguments import check_type
from jaxkv._src.arrays.arguments import is_number
from jaxkv._src.models.decoder.rope import Rope

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Numerics = Literal["fast", "exact"]
_Scores = Literal["softmax", "chosen_softmax", "sigmoid"]
_GroupScore = Literal["best", "best_two"]

# The defaults of `rope` are constants, since RUF009 forbids calls as defaults.
_HALVES = Rope()
_PAIRS = Rope(interleaved=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
  """Softmax attention, in which H / K query heads share a key-value head.

  Attributes:
    num_heads: H.
    num_kv_heads: K, a divisor of H.
    head_dim: D. H * D can differ from E.
    window: each token attends to this many most recent tokens, itself included;
      None for itself and all tokens before it.
    rope: rotary positions; None for no rotation.
    scale: factor of the attention logits; None for D ** -0.5.
    soft_cap: a cap c maps each attention logit x to c * tanh(x / c); None for
      no cap.
    query_key_norm: True to normalize each head of queries and keys before the
      rotation.
    biased: True if queries, keys and values have biases.
    output_biased: True if the output projection has a bias.
    sinks: True if each head has an attention sink: an additional logit in the
      softmax, whose weight multiplies no value.
    gated: True to multiply the output, before its projection, by a gate: the
      sigmoid of a projection of the layer's normalized input.
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  window: int | None = None
  rope: Rope | None = _HALVES
  scale: float | None = None
  soft_cap: float | None = None
  query_key_norm: bool = False
  biased: bool = False
  output_biased: bool = False
  sinks: bool = False
  gated: bool = False

  def __post_init__(self) -> None:
    _sizes(self, "num_heads", "num_kv_heads", "head_dim")
    # Each key-value head serves the same number of query heads.
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"`num_kv_heads` must divide num_heads, {self.num_heads}, got "
        f"{self.num_kv_heads}."
      )
    if self.window is not None:
      _sizes(self, "window")
    if self.scale is not None:
      _check_factor("scale", self.scale)
    if self.soft_cap is not None:
      _check_factor("soft_cap", self.soft_cap, is_positive=True)
    if self.rope is not None:
      _check_rope(self.rope, "head_dim", self.head_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttention:
  """Multi-head latent attention (DeepSeek-V2, section 2.1).

  The cache holds one vector per token. It begins with the latent, from which
  values and the plain part of keys are projected. It ends with the rotated part
  of the key, which all heads share.

  Attributes:
    num_heads: H.
    latent_dim: size of the latent.
    plain_dim: number of elements of a head's query and key without rotation.
    rotated_dim: number of elements of a head's query and key with rotation.
    value_dim: size of a head's value.
    query_rank: rank of the query projection; None for full rank.
    rope: rotary positions of the `rotated_dim` elements.
    scale: factor of the attention logits; None for
      (plain_dim + rotated_dim) ** -0.5.
  """

  num_heads: int
  latent_dim: int
  plain_dim: int
  rotated_dim: int
  value_dim: int
  query_rank: int | None = None
  rope: Rope = _PAIRS
  scale: float | None = None

  def __post_init__(self) -> None:
    _sizes(
      self, "num_heads", "latent_dim", "plain_dim", "rotated_dim", "value_dim"
    )
    if self.query_rank is not None:
      _sizes(self, "query_rank")
    if self.scale is not None:
      _check_factor("scale", self.scale)
    _check_rope(self.rope, "rotated_dim", self.rotated_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNet:
  """The gated delta rule (Yang et al., 2025), with a recurrent state.

  Attributes:
    num_key_heads: heads of queries and keys.
    num_value_heads: heads of values, a multiple of `num_key_heads`.
    key_dim: size of a head of queries and keys.
    value_dim: size of a head of values.
    kernel_size: width of the convolution before the recurrence, in tokens; at
      least 2.
  """

  num_key_heads: int
  num_value_heads: int
  key_dim: int
  value_dim: int
  kernel_size: int

  def __post_init__(self) -> None:
    _sizes(self, *(field.name for field in dataclasses.fields(self)))
    # The memory stores `kernel_size - 1` inputs, and no array of size 0.
    if self.kernel_size < 2:
      raise ValueError(
        f"`kernel_size` must be at least 2, got {self.kernel_size}."
      )
    if self.num_value_heads % self.num_key_heads:
      raise ValueError(
        "`num_value_heads` must be a multiple of num_key_heads, "
        f"{self.num_key_heads}, got {self.num_value_heads}."
      )

  @property
  def num_channels(self) -> int:
    """C, the number of channels of queries, keys and values together."""
    keys = 2 * self.num_key_heads * self.key_dim
    return keys + self.num_value_heads * self.value_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mlp:
  """A gated MLP: down(activation(gate(x)) * up(x)).

  Attributes:
    inner_dim: F.
    activation: activation of the gate.
  """

  inner_dim: int
  activation: Activation = "silu"

  def __post_init__(self) -> None:
    _sizes(self, "inner_dim")
    _check_choice("activation", self.activation, Activation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
  """A mixture of experts: a router sends each token to a few gated MLPs.

  Attributes:
    num_experts: X.
    num_chosen: number of experts that the router chooses for each token.
    inner_dim: F of an expert.
    activation: activation of the gate.
    scores: function from the router's logits to the weights of experts:
      "softmax" over all experts, "chosen_softmax" over chosen experts, or
      "sigmoid".
    normalized: True to divide the weights of a token's experts by their sum.
    scale: factor of the weights of experts.
    corrected: True if a bias per expert changes the choice of experts, but not
      their weights.
    num_groups: number of groups of experts; 1 for no groups. The router first
      chooses `num_chosen_groups` groups, then experts of these groups.
    num_chosen_groups: number of groups that the router chooses for each token.
    group_score: "best" to choose groups by the score of their best expert,
      "best_two" to choose them by the sum of their two best scores.
    router_biased: True if the router has a bias.
    biased: True if the MLPs of experts have biases.
    limit: None for plain gated MLPs. With a limit, an expert ignores
      `activation` and computes down((up + 1) * gate * sigmoid(1.702 * gate)),
      with gate at most `limit` and up clipped to -limit .. limit (gpt-oss).
    shared_dim: F of a shared MLP, whose output is added for every token; None
      for no shared MLP.
    shared_gated: True to multiply the shared MLP's output by a sigmoid gate.
  """

  num_experts: int
  num_chosen: int
  inner_dim: int
  activation: Activation = "silu"
  scores: _Scores = "softmax"
  normalized: bool = True
  scale: float = 1.0
  corrected: bool = False
  num_groups: int = 1
  num_chosen_groups: int = 1
  group_score: _GroupScore = "best"
  router_biased: bool = False
  biased: bool = False
  limit: float | None = None
  shared_dim: int | None = None
  shared_gated: bool = False

  def __post_init__(self) -> None:
    _sizes(self, "num_experts", "num_chosen", "inner_dim", "num_groups")
    _sizes(self, "num_chosen_groups")
    _check_factor("scale", self.scale)
    if self.limit is not None:
      _check_factor("limit", self.limit, is_positive=True)
    if self.shared_dim is not None:
      _sizes(self, "shared_dim")
    if self.num_chosen > self.num_experts:
      raise ValueError(
        f"`num_chosen` must be at most num_experts, {self.num_experts}, got "
        f"{self.num_chosen}."
      )
    if self.num_experts % self.num_groups:
      raise ValueError(
        f"`num_groups` must divide num_experts, {self.num_experts}, got "
        f"{self.num_groups}."
      )
    _check_choice("scores", self.scores, _Scores)
    _check_choice("group_score", self.group_score, _GroupScore)
    _check_choice("activation", self.activation, Activation)
    group_size = self.num_experts // self.num_groups
    min_groups = -(-self.num_chosen // group_size)
    if not min_groups <= self.num_chosen_groups <= self.num_groups:
      raise ValueError(
        f"`num_chosen_groups` must be {min_groups} .. {self.num_groups}, "
        f"enough for {self.num_chosen} experts, got {self.num_chosen_groups}."
      )
    if (
      self.num_groups > 1 and self.group_score == "best_two" and group_size < 2
    ):
      raise ValueError(
        '`group_score` must be "best" for groups of one expert, got '
        f"{self.group_score!r}."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
  """A decoder block: token mixer and MLP, each with a residual connection.

  Attributes:
    attention: the token mixer, which is attention or a recurrence.
    mlp: the MLP or mixture of experts.
    post_norms: True to also normalize the output of the mixer and that of the
      MLP, before each is added to the residual stream.
  """

  attention: Attention | LatentAttention | DeltaNet
  mlp: Mlp | Experts
  post_norms: bool = False

  def __post_init__(self) -> None:
    for name, classes in (
      ("attention", (Attention, LatentAttention, DeltaNet)),
      ("mlp", (Mlp, Experts)),
    ):
      value = getattr(self, name)
      if not isinstance(value, classes):
        names = " or ".join(cls.__name__ for cls in classes)
        raise ValueError(f"`{name}` must be of {names}, got {value!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
  """A decoder-only language model, described layer by layer.

  Attributes:
    vocab_size: V.
    embed_dim: E.
    layers: L layers, from first to last.
    norm_eps: added to the mean square in RMSNorm.
    norm_offset: added to norm weights other than `output_norm`; 1 in Gemma.
    embed_scale: factor of the embeddings; it is rounded to `dtype`.
    logit_cap: a cap c maps each logit x to c * tanh(x / c); None for no cap.
    tied_embeddings: True if the embedding is also the output projection.
    numerics: "fast" or "exact". With "exact", `forward`, `forward_uncached` and
      `grouped_log_probs` compute bit-identical logits for a token, whether or
      not a call is differentiated. The bits do not depend on slots, chunks,
      pages or other sequences. Log-probs of a rollout equal those of a trainer
      and of `score` at the same temperature, unless other fields of `Sampling`
      or `process` change the distribution. All calls must use the same kind of
      device, jax version and `backend`, and weights must not be sharded. The
      page size must be 16 on a GPU or TPU, and a divisor of 64 on a CPU.
      Gradients are computed as with "fast", and only in reverse mode.
    tile: with "exact", the number of tokens that are computed together. Rollout
      and trainer need the same tile, because rounding depends on it. Decode
      steps are fastest if `tile` is the number of slots. Other calls are
      fastest with a tile of 64.
    dtype: dtype of parameters and activations. Norms, rotations, softmax and
      logits are always computed in float32.

  Raises:
    ValueError: a field has a value that is not supported.

  Examples:
    Five layers with a window and one without, three times:

    >>> local, full = (
    ...   Layer(
    ...     attention=Attention(
    ...       num_heads=4, num_kv_heads=1, head_dim=8, window=window
    ...     ),
    ...     mlp=Mlp(inner_dim=16),
    ...   )
    ...   for window in (512, None)
    ... )
    >>> decoder = Decoder(
    ...   vocab_size=11, embed_dim=8, layers=((local,) * 5 + (full,)) * 3
    ... )
    >>> len(decoder.layers)
    18
  """

  vocab_size: int
  embed_dim: int
  layers: tuple[Layer, ...]
  norm_eps: float = 1e-5
  norm_offset: float = 0.0
  embed_scale: float = 1.0
  logit_cap: float | None = None
  tied_embeddings: bool = True
  numerics: Numerics = "fast"
  tile: int = 16
  dtype: Any = jnp.float32

  def __post_init__(self) -> None:
    _sizes(self, "vocab_size", "embed_dim", "tile")
    _check_choice("numerics", self.numerics, Numerics)
    if not isinstance(self.layers, tuple) or not self.layers:
      raise ValueError(
        f"`layers` must be a tuple of one or more Layers, got {self.layers!r}."
      )
    for layer in self.layers:
      if not isinstance(layer, Layer):
        raise ValueError(f"`layers` must hold Layers, got {layer!r}.")
    _check_factor("norm_eps", self.norm_eps, is_positive=True)
    _check_factor("norm_offset", self.norm_offset)
    _check_factor("embed_scale", self.embed_scale)
    if self.logit_cap is not None:
      _check_factor("logit_cap", self.logit_cap, is_positive=True)
    dtype = jnp.dtype(self.dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
      raise ValueError(f"`dtype` must be a floating type, got {dtype.name}.")
    # `jnp.bfloat16` and `jnp.dtype("bfloat16")` are equal but hash differently.
    # Without this conversion jit would compile two programs for equal decoders.
    object.__setattr__(self, "dtype", dtype)

  @property
  def num_layers(self) -> int:
    """L, the number of layers."""
    return len(self.layers)


def _check_rope(rope: Rope, name: str, dim: int) -> None:
  if rope.dim is None and dim % 2:
    raise ValueError(
      f"`{name}` must be even, since rotary positions rotate pairs, got {dim}."
    )
  rotated = dim if rope.dim is None else rope.dim
  if rotated % 2 or not 0 < rotated <= dim:
    raise ValueError(
      f"`rope.dim` must be even and in 2 .. {dim}, since pairs are rotated, "
      f"got {rotated}."
    )


def _check_choice(name: str, value: Any, choices: Any) -> None:
  """Raises ValueError unless a value is in the `Literal` type `choices`."""
  if value not in get_args(choices):
    raise ValueError(
      f"`{name}` must be one of {', '.join(map(repr, get_args(choices)))}, got "
      f"{value!r}."
    )


def _sizes(description: Any, *names: str) -> None:
  """Raises ValueError unless the named fields are ints of at least 1."""
  for name in names:
    check_size(name, getattr(description, name))


def check_size(name: str, value: Any) -> None:
  """Raises ValueError unless a value is an int from 1 to 2**31 - 1."""
  # bool is a subclass of int, and True would pass as 1.
  is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
  if not is_int or not 1 <= value < 2**31:
    raise ValueError(
      f"`{name}` must be an int of at least 1 and below 2**31, got {value!r}."
    )


def check_decoder(name: str, value: Any) -> None:
  """Raises TypeError unless a value is a `Decoder`."""
  hint = "describe one, such as with `models.llama`"
  check_type(name, value, Decoder, "a Decoder", hint)


def _check_factor(name: str, value: Any, *, is_positive: bool = False) -> None:
  """Raises ValueError unless a value is a finite (and positive) number."""
  # In a comparison, NaN is False.
  is_finite = is_number(value) and abs(value) < math.inf
  if not is_finite or (is_positive and not value > 0):
    kind = "positive and finite" if is_positive else "finite"
    raise ValueError(f"`{name}` must be a {kind} number, got {value!r}.")
