"""Parameters of a decoder: names, shapes and random initialization.

The parameters are a dict with "embed" [V, E], "final_norm" [E], "unembed"
[E, V] unless tied, and "layers". A segment is a run of layers that repeat a
pattern R times (see `groups`). "layers" is a tuple with one entry per segment,
and an entry is a tuple with one dict per layer of the pattern. All arrays of a
dict have a leading axis of R repeats, so that a scan can slice them. The
tables omit this axis. `description` defines the letters, and `delta_net` those
of `DeltaNet`. A word in a shape names a field: latent is `latent_dim`.

| name                       | of `Attention`                                  |
|----------------------------|-------------------------------------------------|
| `attention_norm`           | [E]                                             |
| `query`                    | [E, H, D]                                       |
| `key`, `value`             | [E, K, D]                                       |
| `output`                   | [H, D, E]                                       |
| `query_bias`               | [H, D], if biased                               |
| `key_bias`, `value_bias`   | [K, D], if biased                               |
| `output_bias`              | [E], if the output is biased                    |
| `query_norm`, `key_norm`   | [D], if queries and keys are normalized         |
| `sinks`                    | [H], with sinks                                 |
| `query_gate`               | [E, H, D], if gated                             |
| `post_attention_norm`      | [E], with post norms                            |

| name                       | of `LatentAttention`                            |
|----------------------------|-------------------------------------------------|
| `attention_norm`           | [E]                                             |
| `query_down`               | [E, rank], with a query rank                    |
| `query_norm`               | [rank], with a query rank                       |
| `query`                    | [E or rank, H, plain + rotated]                 |
| `latent`                   | [E, latent + rotated]                           |
| `latent_norm`              | [latent]                                        |
| `key`                      | [latent, H, plain]                              |
| `value`                    | [latent, H, value]                              |
| `output`                   | [H, value, E]                                   |

| name                       | of `DeltaNet`, with C = 2 K Dk + H Dv channels  |
|----------------------------|-------------------------------------------------|
| `attention_norm`           | [E]                                             |
| `query`, `key`             | [E, K, Dk]                                      |
| `value`, `output_gate`     | [E, H, Dv]                                      |
| `beta`, `decay`            | [E, H]                                          |
| `convolution`              | [C, kernel], for queries, keys and values       |
| `decay_bias`, `decay_log`  | [H]                                             |
| `output_norm`              | [Dv], without `norm_offset`                     |
| `output`                   | [H, Dv, E]                                      |

| name                       | of `Mlp`                                        |
|----------------------------|-------------------------------------------------|
| `mlp_norm`                 | [E]                                             |
| `gate`, `up`               | [E, F]                                          |
| `down`                     | [F, E]                                          |
| `post_mlp_norm`            | [E], with post norms                            |

| name                       | of `Experts`, with F' for the shared MLP        |
|----------------------------|-------------------------------------------------|
| `mlp_norm`                 | [E]                                             |
| `post_mlp_norm`            | [E], with post norms                            |
| `router`                   | [E, X]                                          |
| `router_bias`              | [X], if the router is biased                    |
| `correction`               | float32[X], if corrected                        |
| `expert_gate`, `expert_up` | [X, E, F]                                       |
| `expert_down`              | [X, F, E]                                       |
| `expert_gate_bias`         | [X, F], if biased; `expert_up_bias` likewise    |
| `expert_down_bias`         | [X, E], if biased                               |
| `shared_gate`, `shared_up` | [E, F'], with a shared MLP                      |
| `shared_down`              | [F', E], with a shared MLP                      |
| `shared_switch`            | [E, 1], if the shared MLP is gated              |
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._src.models.decoder import groups
from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import DeltaNet
from jaxkv._src.models.decoder.description import Experts
from jaxkv._src.models.decoder.description import LatentAttention
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.decoder.description import Mlp
from jaxkv._src.models.decoder.description import check_decoder

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Leaf:
  """The shape and the initialization of one parameter.

  Attributes:
    shape: shape of the array.
    fan_in: number of inputs of a projection with random initial weights; None
      for a parameter that is initially 1, 0 for one that is initially 0.
    residual: True if the projection's output is added to the residual stream.
    offset: True to subtract `Decoder.norm_offset` from an initial value of 1.
    dtype: dtype of the array; None for the decoder's dtype.
  """

  shape: tuple[int, ...]
  fan_in: int | None = None
  residual: bool = False
  offset: bool = True
  dtype: Any = None


def layer_leaves(layer: Layer, embed_dim: int) -> dict[str, Leaf]:
  """Returns a `Leaf` for each parameter of a layer, without the axis R."""
  attention = layer.attention
  leaves = {
    "attention_norm": Leaf((embed_dim,)),
    "mlp_norm": Leaf((embed_dim,)),
  }
  if isinstance(attention, Attention):
    leaves |= _attention(attention, embed_dim)
  elif isinstance(attention, LatentAttention):
    leaves |= _latent(attention, embed_dim)
  else:
    leaves |= _delta_net(attention, embed_dim)
  if isinstance(layer.mlp, Mlp):
    leaves |= _mlp(layer.mlp.inner_dim, embed_dim)
  else:
    leaves |= _experts(layer.mlp, embed_dim)
  if layer.post_norms:
    leaves["post_attention_norm"] = Leaf((embed_dim,))
    leaves["post_mlp_norm"] = Leaf((embed_dim,))
  return leaves


def _attention(a: Attention, e: int) -> dict[str, Leaf]:
  h, k, d = a.num_heads, a.num_kv_heads, a.head_dim
  leaves = {
    "query": Leaf((e, h, d), e),
    "key": Leaf((e, k, d), e),
    "value": Leaf((e, k, d), e),
    "output": Leaf((h, d, e), h * d, residual=True),
  }
  if a.biased:
    leaves["query_bias"] = Leaf((h, d), 0)
    leaves |= {name: Leaf((k, d), 0) for name in ("key_bias", "value_bias")}
  if a.output_biased:
    leaves["output_bias"] = Leaf((e,), 0)
  if a.query_key_norm:
    leaves |= {name: Leaf((d,)) for name in ("query_norm", "key_norm")}
  if a.sinks:
    leaves["sinks"] = Leaf((h,), 0)
  if a.gated:
    leaves["query_gate"] = Leaf((e, h, d), e)
  return leaves


def _latent(a: LatentAttention, e: int) -> dict[str, Leaf]:
  h, latent, rank = a.num_heads, a.latent_dim, a.query_rank
  width = e if rank is None else rank
  leaves = {
    "query": Leaf((width, h, a.plain_dim + a.rotated_dim), width),
    "latent": Leaf((e, latent + a.rotated_dim), e),
    "latent_norm": Leaf((latent,)),
    "key": Leaf((latent, h, a.plain_dim), latent),
    "value": Leaf((latent, h, a.value_dim), latent),
    "output": Leaf((h, a.value_dim, e), h * a.value_dim, residual=True),
  }
  if rank is not None:
    # A low-rank query projection has two matrices, with a norm between them.
    leaves["query_down"] = Leaf((e, rank), e)
    leaves["query_norm"] = Leaf((rank,))
  return leaves


def _delta_net(a: DeltaNet, e: int) -> dict[str, Leaf]:
  k, h, key, value = a.num_key_heads, a.num_value_heads, a.key_dim, a.value_dim
  return {
    "query": Leaf((e, k, key), e),
    "key": Leaf((e, k, key), e),
    "value": Leaf((e, h, value), e),
    "output_gate": Leaf((e, h, value), e),
    "beta": Leaf((e, h), e),
    "decay": Leaf((e, h), e),
    "convolution": Leaf((a.num_channels, a.kernel_size), a.kernel_size),
    "decay_bias": Leaf((h,), offset=False),
    "decay_log": Leaf((h,), 0),
    "output_norm": Leaf((value,), offset=False),
    "output": Leaf((h, value, e), h * value, residual=True),
  }


def _mlp(f: int, e: int) -> dict[str, Leaf]:
  return {
    "gate": Leaf((e, f), e),
    "up": Leaf((e, f), e),
    "down": Leaf((f, e), f, residual=True),
  }


def _experts(m: Experts, e: int) -> dict[str, Leaf]:
  x, f = m.num_experts, m.inner_dim
  leaves = {
    "router": Leaf((e, x), e),
    "expert_gate": Leaf((x, e, f), e),
    "expert_up": Leaf((x, e, f), e),
    "expert_down": Leaf((x, f, e), f, residual=True),
  }
  if m.router_biased:
    leaves["router_bias"] = Leaf((x,), 0)
  if m.corrected:
    # DeepSeek stores the correction in float32, even with bfloat16 weights.
    leaves["correction"] = Leaf((x,), 0, dtype=jnp.float32)
  if m.biased:
    names = ("expert_gate_bias", "expert_up_bias")
    leaves |= {name: Leaf((x, f), 0) for name in names}
    leaves["expert_down_bias"] = Leaf((x, e), 0)
  if m.shared_dim is not None:
    shared = _mlp(m.shared_dim, e)
    leaves |= {f"shared_{name}": leaf for name, leaf in shared.items()}
  if m.shared_gated:
    leaves["shared_switch"] = Leaf((e, 1), e)
  return leaves


def leaves_of(decoder: Decoder) -> Params:
  """Returns the tree of parameters with a `Leaf` in place of each array."""
  v, e = decoder.vocab_size, decoder.embed_dim
  tree: Params = {"embed": Leaf((v, e), e), "final_norm": Leaf((e,))}
  tree["layers"] = tuple(
    tuple(
      {
        name: dataclasses.replace(
          leaf, shape=(segment.num_repeats, *leaf.shape)
        )
        for name, leaf in layer_leaves(layer, e).items()
      }
      for layer in segment.pattern
    )
    for segment in groups.segments(decoder)
  )
  if not decoder.tied_embeddings:
    tree["unembed"] = Leaf((e, v), e)
  return tree


def init_params(key: jax.Array, decoder: Decoder) -> Params:
  """Returns random parameters of a decoder.

  Args:
    key: a random key.
    decoder: the decoder.

  Returns:
    A dict with "embed" [V, E], "final_norm" [E], "unembed" [E, V] unless tied,
    and "layers", in which the arrays of repeated layers are stacked.

  Examples:
    >>> import jax
    >>> attention = Attention(num_heads=4, num_kv_heads=2, head_dim=2)
    >>> layer = Layer(attention=attention, mlp=Mlp(inner_dim=16))
    >>> decoder = Decoder(vocab_size=11, embed_dim=8, layers=(layer,) * 3)
    >>> params = init_params(jax.random.key(0), decoder)
    >>> params["layers"][0][0]["key"].shape
    (3, 8, 2, 2)
  """
  check_decoder("decoder", decoder)
  tree = leaves_of(decoder)
  # All random arrays are slices of one draw, because jax compiles a program for
  # each shape of a draw.
  num_random = sum(
    math.prod(leaf.shape)
    for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Leaf))
    if leaf.fan_in
  )
  noise = jax.random.normal(key, (num_random,), jnp.float32)
  # Each layer adds two outputs to the residual stream. This factor keeps the
  # variance of the stream independent of the depth (GPT-2).
  residual_gain = (2 * decoder.num_layers) ** -0.5
  cursor = 0

  def array(leaf: Leaf) -> jax.Array:
    nonlocal cursor
    dtype = leaf.dtype or decoder.dtype
    if not leaf.fan_in:
      # A norm multiplies by weight + offset, which must be 1 initially.
      offset = decoder.norm_offset if leaf.offset else 0
      value = 0 if leaf.fan_in == 0 else 1 - offset
      return jnp.full(leaf.shape, value, dtype)
    position = cursor
    cursor += math.prod(leaf.shape)
    gain = (residual_gain if leaf.residual else 1.0) * leaf.fan_in**-0.5
    return (noise[position:cursor].reshape(leaf.shape) * gain).astype(dtype)

  def arrays(node: Any) -> Any:
    # Keeps the order of names in `leaves_of`. `jax.tree.map` would sort the
    # names, and the same random key would give other parameters.
    if isinstance(node, Leaf):
      return array(node)
    if isinstance(node, dict):
      return {name: arrays(child) for name, child in node.items()}
    return tuple(arrays(child) for child in node)

  return arrays(tree)
