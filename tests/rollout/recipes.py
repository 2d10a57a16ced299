"""Runs the recipes in the docstring of `jaxkv.rollout.devices`."""

import dataclasses
import functools
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

import jaxkv
from jaxkv import kv as kv_memory
from jaxkv import models
from jaxkv import rollout
from jaxkv.rollout import devices
from tests.rollout import by_hand

TITLES = (
  "Data parallel",
  "Tensor parallel",
  "Data and tensor parallel",
  "Several processes",
  "Checkpoints",
)
_STEPS = 7
"""Steps of a call; a rollout takes several calls."""

LLAMA = models.llama(
  vocab_size=48,
  num_layers=2,
  embed_dim=16,
  num_heads=16,
  num_kv_heads=8,
  head_dim=4,
  mlp_dim=32,
)


def pieces(title: str) -> list[str]:
  """Returns the pieces of code of a recipe, in order."""
  text = devices.__doc__ or ""
  begins = {name: text.index(f"\n\n{name}") for name in TITLES}
  later = [place for place in begins.values() if place > begins[title]]
  lines = text[begins[title] : min(later, default=None)].split("\n")
  code = [""]
  for line in lines:
    if line.startswith("  ") or (code[-1] and not line):
      code[-1] += line + "\n"
    elif code[-1]:
      code.append("")
  return [textwrap.dedent(piece) for piece in code if piece.strip()]


def run(
  title: str,
  names: dict[str, Any],
  piece: int = 0,
  device_count: int | None = None,
) -> None:
  """Runs a piece of a recipe, which reads and binds names.

  Args:
    title: the title of the recipe.
    names: the names that the recipe reads, and those that it binds.
    piece: the index of the piece.
    device_count: the number of devices to use; None for all.
  """
  code = pieces(title)[piece]
  if device_count is not None:
    code = code.replace("jax.device_count()", str(device_count))
  exec(compile(code, f"recipe: {title}", "exec"), names)


def _names(model, params, sizes, config, memory, prompts) -> dict[str, Any]:
  """Returns the names that recipes read; samples have temperature 1."""
  width = max(map(len, prompts))
  rows = [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]
  return {
    "AxisType": AxisType,
    "NamedSharding": NamedSharding,
    "P": PartitionSpec,
    "config": config,
    "devices": devices,
    "functools": functools,
    "generate": functools.partial(
      rollout.generate,
      until=rollout.Until(steps=_STEPS),
      model=model,
    ),
    "jax": jax,
    "jaxkv": jaxkv,
    "job": (
      np.asarray(rows, np.int32),
      np.asarray([len(prompt) for prompt in prompts], np.int32),
      jax.random.key(3),
      jax.random.key(4),
    ),
    "memory": memory,
    "multihost_utils": multihost_utils,
    "params": params,
    "rollout": rollout,
    "sizes": sizes,
  }


def _poisoned(kv: kv_memory.KVPages) -> kv_memory.KVPages:
  """Fills pages with NaN, so that an unused page must not reach a logit."""
  return dataclasses.replace(kv, k=kv.k * jnp.nan, v=kv.v * jnp.nan)


def attention_alone() -> dict[str, Any]:
  """Returns names for the fast model of `by_hand`, with four prompts."""
  sizes = by_hand.sizes(20, 3)

  def memory() -> kv_memory.KVPages:
    kv = kv_memory.init(
      sizes,
      num_layers=1,
      num_kv_heads=1,
      head_dim=by_hand.WIDTH,
      dtype=jnp.float32,
    )
    return _poisoned(kv)

  return _names(
    rollout.all_logits(by_hand.model),
    None,
    sizes,
    rollout.RolloutConfig(
      num_samples=3, max_new_tokens=6, stop_token=4, prefill_chunk=4
    ),
    memory,
    by_hand.PROMPTS,
  )


def llama(**options: Any) -> dict[str, Any]:
  """Returns names for a decoder with 8 K/V heads; 16 prompts of 1 to 9 tokens.

  Args:
    **options: options of `models.forward`.
  """
  random = np.random.default_rng(1)
  sizes = jaxkv.CacheConfig(
    num_pages=1500, page_size=4, num_slots=3, pages_per_slot=5
  )
  return _names(
    functools.partial(models.forward, config=LLAMA, **options),
    models.init_params(jax.random.key(0), LLAMA),
    sizes,
    rollout.RolloutConfig(
      num_samples=2, max_new_tokens=9, stop_token=3, prefill_chunk=8
    ),
    lambda: _poisoned(models.init_kv(LLAMA, sizes)),
    [random.integers(0, 48, 1 + row % 9).tolist() for row in range(16)],
  )


def begun(names: dict[str, Any], cache=None, kv=None) -> rollout.RolloutState:
  """Returns the rollout of the job, by default in a new cache and memory."""
  prompts, lengths, key, secret = names["job"]
  requests = rollout.Requests(prompts, lengths)
  cache = jaxkv.init(names["sizes"], secret) if cache is None else cache
  kv = names["memory"]() if kv is None else kv
  # The weights have the version of the pages in the cache.
  return rollout.init(
    cache, kv, requests, key, names["config"], version=cache.epoch
  )


def done(names: dict[str, Any], run: Any, state: Any) -> rollout.RolloutState:
  """Calls `run` until the rollout is done."""
  while not bool(rollout.is_done(state)):
    state = run(names["params"], state)
  return state
