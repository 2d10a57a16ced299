"""Times exact numerics against fast ones, with the same programs.

The model has four float32 layers of SmolLM2's width, and a vocabulary of 8,192.
The tile is the number of tokens that exact numerics compute together.

| row | contents |
|---|---|
| decode | a step of 16 or 64 sequences, each with about 300 cached tokens |
| prefill | a prompt of 1,024 tokens in chunks of 256, without logits |
| gradient | `value_and_grad` of the log-probs of 4 sequences of 256 tokens |

Figures are CPU milliseconds, the minimum and median of calls that take turns.

  python benchmarks/exact.py [--quick] [--json FILE]
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rows
from groups import small_llama
from rows import Row

import jaxkv
from jaxkv import models

_VOCABULARY = 8192
_STEPS = 8
_PAGE = 16

_Call = tuple[Any, Any]
"""A function to time and its input."""


def _config(quick: bool, **fields: Any) -> models.Decoder:
  config = small_llama(_VOCABULARY, 72 if quick else 576)
  return dataclasses.replace(config, **fields)


def _cache(config: models.Decoder, slots: int, tokens: int) -> tuple[Any, Any]:
  """Returns a page table for sequences of `tokens` tokens, and their K/V."""
  columns = -(-tokens // _PAGE)
  cache_config = jaxkv.CacheConfig(
    num_pages=1 + slots * columns,
    page_size=_PAGE,
    num_slots=slots,
    pages_per_slot=columns,
  )
  # Pages are shuffled, as in a running cache. Page 0 is the null page.
  table = 1 + np.random.default_rng(0).permutation(slots * columns)
  table = jnp.asarray(table.reshape(slots, columns), jnp.int32)
  return table, models.init_kv(config, cache_config)


def _view(table: jax.Array, starts: jax.Array, count: int) -> jaxkv.kv.View:
  return jaxkv.kv.View(
    page_table=table, starts=starts, num_tokens=jnp.full_like(starts, count)
  )


def _decode(config: models.Decoder, params: Any, slots: int) -> _Call:
  table, kv = _cache(config, slots, 400)
  starts = np.random.default_rng(1).integers(200, 390, slots)
  starts = jnp.asarray(starts, jnp.int32)

  @jax.jit
  def steps(params: Any, kv: Any, tokens: jax.Array) -> jax.Array:
    def decode_step(_: Any, loop: Any) -> Any:
      kv, tokens, starts = loop
      views = (_view(table, starts, 1),)
      batch = jaxkv.kv.Batch(
        tokens=tokens, positions=starts[:, None], views=views
      )
      logits, kv = models.forward(params, batch, kv, config=config)
      return kv, jnp.argmax(logits, -1).astype(jnp.int32), starts + 1

    return jax.lax.fori_loop(0, _STEPS, decode_step, (kv, tokens, starts))[1]

  return functools.partial(steps, params, kv), jnp.ones((slots, 1), jnp.int32)


def _prefill(config: models.Decoder, params: Any) -> _Call:
  chunk, tokens = 256, 1024
  table, kv = _cache(config, 1, tokens)
  prompt = np.random.default_rng(2).integers(0, _VOCABULARY, (1, tokens))

  @jax.jit
  def chunks(params: Any, kv: Any, prompt: jax.Array) -> Any:
    def compute_chunk(index: jax.Array, kv: Any) -> Any:
      start = index * chunk
      part = jax.lax.dynamic_slice_in_dim(prompt, start, chunk, 1)
      positions = start + jnp.arange(chunk, dtype=jnp.int32)[None]
      views = (_view(table, start[None], chunk),)
      batch = jaxkv.kv.Batch(
        tokens=part,
        positions=positions,
        views=views,
        columns=jnp.zeros((0,), jnp.int32),
      )
      return models.forward(params, batch, kv, config=config)[1]

    kv = jax.lax.fori_loop(0, tokens // chunk, compute_chunk, kv)
    # Returns only one element, so that the pages are not copied out.
    return kv.k[1, 0, 0, 0]

  return functools.partial(chunks, params, kv), jnp.asarray(prompt, jnp.int32)


def _gradient(config: models.Decoder, params: Any) -> _Call:
  tokens = np.random.default_rng(3).integers(0, _VOCABULARY, (4, 1, 255))
  tokens = jnp.asarray(tokens, jnp.int32)
  prompts, ones = tokens[:, 0, :1], jnp.ones((4,), jnp.int32)

  def loss(params: Any) -> jax.Array:
    log_probs = models.grouped_log_probs(
      params, prompts, ones, tokens, ones[:, None] * 255, config=config
    )
    return jnp.mean(log_probs)

  return jax.jit(jax.value_and_grad(loss)), params


def rows_of(quick: bool, rounds: int) -> Iterator[Row]:
  """Yields all rows."""
  params = models.init_params(jax.random.key(0), _config(quick))
  works: tuple[tuple[str, Any, float, tuple[int, ...]], ...] = (
    ("decode 16", functools.partial(_decode, slots=16), 1.15, (16,)),
    ("decode 64", functools.partial(_decode, slots=64), 1.15, (16, 64)),
    ("prefill", _prefill, 1.4, (16, 64)),
    ("gradient", _gradient, 1.3, (16, 64)),
  )
  for name, make, bound, tiles in works:
    sides = {"fast": make(_config(quick), params)}
    for tile in tiles:
      config = _config(quick, numerics="exact", tile=tile)
      sides[f"tile {tile}"] = make(config, params)
    seconds, _ = rows.alternated(sides, rounds)
    fast = float(np.median(seconds["fast"][:, 1]))
    for side in sides:
      minimum = float(seconds[side][:, 1].min())
      median = float(np.median(seconds[side][:, 1]))
      yield Row(name, f"{side}, CPU ms, least", minimum * 1e3)
      yield Row(name, f"{side}, CPU ms, median", median * 1e3)
      if side != "fast":
        yield rows.at_most(name, f"{side}, times fast", median / fast, bound)


if __name__ == "__main__":
  rows.run(
    __doc__,
    rows_of,
    rounds=9,
    quick_rounds=2,
    not_measured="compilation, accelerators, bfloat16, other families",
  )
