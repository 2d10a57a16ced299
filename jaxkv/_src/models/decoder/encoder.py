"""What an encoder gives, and its keys and values for a decoder's layers.

An encoder's tokens see each other in both directions, so nothing of it is
cached. What it gives is turned into the keys and values of each layer with
cross-attention, and these are written once, when a sequence begins.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv import kv as paged
from jaxkv._src.models.decoder import attention as attentions
from jaxkv._src.models.decoder import blocks
from jaxkv._src.models.decoder import layout
from jaxkv._src.models.decoder import memories
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import Encoder
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.decoder.logits import check_integers
from jaxkv._src.models.decoder.memories import Place
from jaxkv._src.models.decoder.memory import check_memory
from jaxkv._src.models.decoder.norms import rms_norm
from jaxkv._src.models.decoder.params import Params
from jaxkv_kernels._src import check


@functools.partial(jax.jit, static_argnames=("config",))
def encode(
  params: Params, tokens: jax.Array, lengths: jax.Array, *, config: Decoder
) -> jax.Array:
  """Runs the encoder of a decoder over whole inputs.

  Every token sees all tokens of its row, later ones, too; in layers with a
  window, those near it. Differentiable in `params`.

  Args:
    params: of the decoder, as `init_params` returns.
    tokens: int32[B, X], padded at the end. A token outside the vocabulary makes
      its row NaN, unless it is padding.
    lengths: int32[B], tokens of each row.
    config: static; the decoder, which has an encoder.

  Returns:
    [B, X, E] of the encoder's width, zeros in padding; for `write_encoded` and
    `forward_uncached`.

  Raises:
    TypeError: `tokens` or `lengths` are no array of integers.
    ValueError: the decoder has no encoder, or an argument has the wrong shape.

  Examples:
    >>> import jax, jax.numpy as jnp
    >>> from jaxkv import models
    >>> heads = models.Attention(num_heads=2, num_kv_heads=1, head_dim=4)
    >>> cross = models.Attention(
    ...   num_heads=2, num_kv_heads=1, head_dim=4, rope=None
    ... )
    >>> mlp = models.Mlp(inner_dim=16)
    >>> config = models.Decoder(
    ...   vocab_size=11, embed_dim=8,
    ...   layers=(models.Layer(attention=heads, cross=cross, mlp=mlp),) * 2,
    ...   encoder=models.Encoder(
    ...     vocab_size=11, embed_dim=6,
    ...     layers=(models.Layer(attention=heads, mlp=mlp),),
    ...   ),
    ... )
    >>> params = models.init_params(jax.random.key(0), config)
    >>> encode(params, jnp.array([[3, 1, 4]]), jnp.array([2]),
    ...        config=config).shape
    (1, 3, 6)
  """
  encoder = encoder_of(config)
  check_integers("tokens", tokens)
  if tokens.ndim != 2:
    raise ValueError(f"`tokens` must be [B, X], got shape {tokens.shape}.")
  check_lengths("lengths", lengths, tokens.shape[0])
  own, place = params["encoder"], jnp.arange(tokens.shape[1], dtype=jnp.int32)
  real = place[None] < lengths[:, None]
  # What padding says must not be NaN: zero weights do not keep that out.
  tokens = jnp.where(real, tokens, 0)
  positions = jnp.broadcast_to(place[None], tokens.shape)
  keep = memories.BothWays(lengths)
  x, _ = blocks.run(own, tokens, positions, (), keep, encoder)
  x = rms_norm(x, own["final_norm"], encoder.norm_eps, encoder.norm_offset)
  return jnp.where(real[..., None], x, jnp.zeros_like(x))


@functools.partial(jax.jit, static_argnames=("config",))
def write_encoded(
  params: Params,
  encoded: jax.Array,
  lengths: jax.Array,
  kv: Any,
  view: tuple[Any, ...],
  *,
  config: Decoder,
) -> Any:
  """Writes the keys and values of encoded inputs, once for each sequence.

  Call it after `jaxkv.admit(num_encoder_tokens=)`, and before the first
  `forward` of these sequences. Sequences that are forked share the pages. In a
  rollout it is the `encode` of `jaxkv.rollout.generate`, which calls it. Never
  donates: outside your own `jit`, each call copies the pages.

  Args:
    params: of the decoder.
    encoded: [B, X, E], from `encode`.
    lengths: int32[B], tokens of each row, at most X, or what it says is NaN; 0
      for a row to leave alone.
    kv: the memory, from `init_kv`.
    view: a `jaxkv.kv.View` for each of `cache_groups(config)`, of which the
      page tables are read.
    config: static; the decoder.

  Returns:
    The memory.

  Raises:
    ValueError: an argument has the wrong shape, or the views or the memory are
      not those of the decoder.

  Examples:
    A sequence, to the logits of its second token.

    >>> import jax, jax.numpy as jnp, jaxkv
    >>> from jaxkv import models
    >>> heads = models.Attention(num_heads=2, num_kv_heads=1, head_dim=4)
    >>> cross = models.Attention(
    ...   num_heads=2, num_kv_heads=1, head_dim=4, rope=None
    ... )
    >>> mlp = models.Mlp(inner_dim=16)
    >>> config = models.Decoder(
    ...   vocab_size=11, embed_dim=8,
    ...   layers=(models.Layer(attention=heads, cross=cross, mlp=mlp),) * 2,
    ...   encoder=models.Encoder(
    ...     vocab_size=11, embed_dim=6,
    ...     layers=(models.Layer(attention=heads, mlp=mlp),),
    ...   ),
    ... )
    >>> params = models.init_params(jax.random.key(0), config)
    >>> cache = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=4, num_slots=1, pages_per_slot=2,
    ...   groups=models.cache_groups(config), prefix_caching=False,
    ... ))
    >>> kv = models.init_kv(config, cache.config)
    >>> lengths = jnp.array([3])
    >>> encoded = models.encode(
    ...   params, jnp.array([[3, 1, 4]]), lengths, config=config
    ... )
    >>> def views(cache):
    ...   return tuple(
    ...     jaxkv.view(
    ...       cache, group=group, counts=[1],
    ...       num_encoder_tokens=lengths if kind.holds_encoder else None,
    ...     )
    ...     for group, kind in enumerate(cache.config.groups)
    ...   )
    >>> token = jnp.array([[2]])
    >>> cache, out = jaxkv.admit(
    ...   cache, [0], token, [1], num_encoder_tokens=lengths
    ... )
    >>> kv = write_encoded(
    ...   params, encoded, lengths, kv, views(cache), config=config
    ... )
    >>> logits, kv = models.forward(
    ...   params, token, cache.length[:, None], kv, views(cache), config=config
    ... )
    >>> cache, _ = jaxkv.commit(cache, token, [1])
    >>> logits.shape, cache.length.tolist()
    ((1, 1, 11), [1])
  """
  groups, pools = layout.groups(config), kv if type(kv) is tuple else (kv,)
  views = view if isinstance(view, tuple) else (view,)
  check_memory(pools, views, config)
  rows = views[0].page_table.shape[0]
  encoded = prepared(encoded, lengths, rows, config)
  whole = {
    group: paged.View(
      page_table=one.page_table,
      starts=jnp.zeros_like(lengths),
      counts=lengths,
    )
    for group, (kind, one) in enumerate(zip(groups, views, strict=True))
    if kind.holds_encoder
  }

  def visit(
    carry: blocks.Carry, layer: Layer, weights: Params, place: Place
  ) -> blocks.Carry:
    x, memory = carry
    if layer.cross is None:
      return carry
    assert place.cross_group is not None and place.cross_pool is not None
    own, number = attentions.cross_weights(weights), place.cross_pool
    k, v = attentions.keys_and_values(x, own, layer.cross, config)
    there = whole[place.cross_group]
    pool = paged.write(memory[number], there, place.layer, k, v)
    return x, memories.with_pool(memory, number, pool)

  _, pools = blocks.visit_layers((encoded, pools), params, visit, config)
  return pools if type(kv) is tuple else pools[0]


def encoder_of(config: Decoder) -> Encoder:
  """The encoder of a decoder.

  Raises:
    ValueError: it has none.
  """
  if config.encoder is None:
    raise ValueError(
      "`config` must be a Decoder with an encoder, got one without; describe "
      "it with Decoder(encoder=)."
    )
  return config.encoder


def given(
  encoded: jax.Array | None,
  lengths: jax.Array | None,
  rows: int,
  config: Decoder,
) -> tuple[jax.Array, jax.Array] | tuple[None, None]:
  """What `prepared` gives, and lengths, if the decoder has an encoder.

  Raises:
    ValueError: an argument has another shape, is missing, or given in vain.
  """
  there = encoded is not None, lengths is not None
  if there != (config.encoder is not None,) * 2:
    raise ValueError(
      "`encoded` and `encoded_lengths` must be given if and only if config has "
      "an encoder."
    )
  if encoded is None or lengths is None:
    return None, None
  return prepared(encoded, lengths, rows, config), lengths


def prepared(
  encoded: jax.Array, lengths: jax.Array, rows: int, config: Decoder
) -> jax.Array:
  """[B, X, E] for B rows of a decoder, with zeros in padding.

  A row whose length is more than X becomes NaN: nothing is known of the tokens
  behind, and in pages there may be those of others.

  Raises:
    ValueError: an argument has another shape.
  """
  width = encoder_of(config).embed_dim
  check.is_array("encoded", encoded)
  if encoded.ndim != 3 or encoded.shape[::2] != (rows, width):
    raise ValueError(
      f"`encoded` must be [{rows}, X, {width}], as `encode` returns, got "
      f"{list(encoded.shape)}; repeat the row of a prompt for each sample."
    )
  check_lengths("encoded_lengths", lengths, rows)
  place = jnp.arange(encoded.shape[1], dtype=jnp.int32)
  real = (place[None] < lengths[:, None])[..., None]
  # Zero weights do not keep NaN out.
  encoded = jnp.where(real, encoded, jnp.zeros_like(encoded))
  fits = (lengths <= encoded.shape[1])[:, None, None]
  return jnp.where(fits, encoded, jnp.full_like(encoded, jnp.nan))


def check_lengths(name: str, lengths: jax.Array, rows: int) -> None:
  """Raises unless lengths are int32[B]."""
  check_integers(name, lengths)
  if lengths.shape != (rows,):
    raise ValueError(
      f"`{name}` must have shape {(rows,)}, a number for each row, got "
      f"{lengths.shape}."
    )
