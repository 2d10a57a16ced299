"""Small decoders of every kind with exact numerics, and ways to call them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import models
from tests import as_users
from tests.engine import by_hand
from tests.models import tiny_decoders as tiny

VOCABULARY = 61


def _layer(attention, mlp=None, **fields):
  mlp = models.Mlp(inner_dim=48) if mlp is None else mlp
  return models.Layer(attention=attention, mlp=mlp, **fields)


def _softmax(**fields):
  return models.Attention(num_heads=6, num_kv_heads=2, head_dim=8, **fields)


def _gemma(window, base):
  attention = _softmax(
    window=window,
    rope=models.Rope(base=base),
    soft_cap=20.0,
    query_key_norm=True,
  )
  return _layer(attention, post_norms=True)


_EXPERTS = models.Experts(
  num_experts=8, num_chosen=2, inner_dim=24, shared_dim=16
)
_LATENTS = models.LatentAttention(
  num_heads=4, latent_dim=16, plain_dim=8, rotated_dim=8, value_dim=8
)
_DELTA = models.DeltaNet(
  num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8, kernel_size=4
)

_FAMILIES = {
  "llama": ((_layer(_softmax()),) * 2, {}),
  "qwen3": ((_layer(_softmax(query_key_norm=True, biased=True)),) * 2, {}),
  "gemma": (
    # Two rotary bases, as in Gemma 3, and a soft cap, as in Gemma 2.
    (_gemma(8, 1e4), _gemma(8, 1e4), _gemma(None, 1e6)),
    {"norm_offset": 1.0, "embed_scale": 7.0, "logit_cap": 30.0},
  ),
  "gpt_oss": (
    (
      _layer(_softmax(window=8, sinks=True, gated=True), _EXPERTS),
      _layer(_softmax(sinks=True, output_biased=True), _EXPERTS),
    ),
    {},
  ),
  "experts": ((_layer(_softmax(), _EXPERTS),) * 2, {}),
  "latents": ((_layer(_LATENTS),) * 2, {}),
  "delta_net": ((_layer(_DELTA), _layer(_softmax(gated=True))), {}),
}
NAMES = tuple(_FAMILIES)


def decoder(name, dtype=jnp.float32, **fields):
  """Returns a decoder of a family, and its parameters."""
  layers, facts = _FAMILIES[name]
  facts = {"numerics": "exact", "tile": 16} | facts | fields
  config = models.Decoder(
    vocab_size=VOCABULARY, embed_dim=48, layers=layers, dtype=dtype, **facts
  )
  return config, models.init_params(jax.random.key(0), config)


def tokens_of(rows, columns):
  """Returns random tokens, int32[B, T]."""
  rng = np.random.default_rng(3)
  return jnp.asarray(rng.integers(0, VOCABULARY, (rows, columns)), jnp.int32)


def whole(config, params, tokens, **options):
  """Returns the logits [B, T, V] of the trainer's forward pass."""
  columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)
  positions = jnp.broadcast_to(columns, tokens.shape)
  call = functools.partial(models.forward_uncached, config=config, **options)
  return np.asarray(as_users.jit(call)(params, tokens, positions))


def in_chunks(
  config, params, tokens, chunks, page_size=16, kv_dtype=None, jit=as_users.jit
):
  """Returns the logits [B, T, V] of a forward pass in chunks of tokens.

  Unused pages hold NaN. `chunks` are the sizes, or one of all.
  """
  rows, columns = tokens.shape
  cache = _cache(config, rows, columns, page_size)
  kv = by_hand.poisoned(models.init_kv(config, cache.config, dtype=kv_dtype))
  parts = []
  step = jit(functools.partial(models.forward, config=config))
  sizes = itertools.repeat(chunks) if isinstance(chunks, int) else iter(chunks)
  start = 0
  while start < columns:
    chunk = next(sizes)
    num_tokens = jnp.full((rows,), min(chunk, columns - start), jnp.int32)
    part = tokens[:, start : start + chunk]
    part = jnp.pad(part, ((0, 0), (0, chunk - part.shape[1])))
    cache, _ = jaxkv.recycle(cache)
    cache, outcome = jaxkv.allocate(cache, num_tokens)
    assert outcome.ok.all()
    views = _views(cache, num_tokens)
    positions = cache.length[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None]
    batch = jaxkv.kv.Batch(tokens=part, positions=positions, views=views)
    logits, kv = step(params, batch, kv)
    cache, _ = jaxkv.commit(cache, part, num_tokens)
    parts.append(logits[:, : columns - start])
    start += chunk
  return np.concatenate(parts, axis=1)


def lowered(config, params, rows, columns):
  """Lowers `forward` of [rows, columns] tokens, without compiling it."""
  cache = _cache(config, rows, 64, 16)
  num_tokens = jnp.full((rows,), columns, jnp.int32)
  tokens = jnp.zeros((rows, columns), jnp.int32)
  call = functools.partial(models.forward, config=config)
  kv = models.init_kv(config, cache.config)
  views = _views(cache, num_tokens)
  batch = jaxkv.kv.Batch(tokens=tokens, positions=tokens, views=views)
  return jax.jit(call).lower(params, batch, kv)


def _cache(config, rows, columns, page_size):
  pages = -(-columns // page_size)
  return jaxkv.init(
    tiny.cache_config(
      config,
      num_pages=1 + 6 * rows * pages,
      page_size=page_size,
      num_slots=rows,
      pages_per_slot=pages,
    )
  )


def _views(cache, num_tokens):
  return tuple(
    jaxkv.view(cache, group=group, num_tokens=num_tokens)
    for group in range(len(cache.config.groups))
  )
