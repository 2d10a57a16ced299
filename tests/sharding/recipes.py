"""Runs the examples in the docstring of `jaxkv.sharding`."""

import functools
import textwrap
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

import jaxkv
from jaxkv import models
from jaxkv import rollout
from jaxkv import sharding
from tests.engine import by_hand
from tests.models import tiny_decoders as tiny

TITLES = (
  "Data parallel",
  "Tensor parallel",
  "Both",
  "Data parallel attention",
  "All four",
  "Results",
  "Several processes",
  "Snapshots",
)
STEPS = 7
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
  """Returns the pieces of code of an example, in order."""
  text = sharding.__doc__ or ""
  offsets = {name: text.index(f"\n\n{name}") for name in TITLES}
  later = [offset for offset in offsets.values() if offset > offsets[title]]
  lines = text[offsets[title] : min(later, default=None)].split("\n")
  code = [""]
  for line in lines:
    if line.startswith("  ") or (code[-1] and not line):
      code[-1] += line + "\n"
    elif code[-1]:
      code.append("")
  return [textwrap.dedent(piece) for piece in code if piece.strip()]


def run(title: str, names: dict[str, Any], piece: int = 0) -> None:
  """Runs a piece of an example, which reads and binds names."""
  exec(compile(pieces(title)[piece], f"example: {title}", "exec"), names)


def names_of(model, params, sizes, config, pages, prompts) -> dict[str, Any]:
  """Returns the names that examples read; samples have temperature 1."""
  secret = jax.random.key(4)
  return {
    "config": config,
    "functools": functools,
    "jax": jax,
    "jaxkv": jaxkv,
    "key": jax.random.key(3),
    "memory": lambda: (jaxkv.init(sizes, secret), pages()),
    "model": model,
    "params": params,
    "requests": by_hand.requests_of(prompts),
    "rollout": rollout,
    "sharding": sharding,
    "sizes": sizes,
  }


def attention_alone() -> dict[str, Any]:
  """Returns names for the fast model of `by_hand`, with four prompts."""
  sizes = by_hand.sizes(20, 3)

  return names_of(
    by_hand.all_logits(by_hand.model),
    None,
    sizes,
    rollout.RolloutConfig(
      num_samples=3, max_new_tokens=6, stop_token=4, prefill_chunk=4
    ),
    lambda: by_hand.poisoned(by_hand.pages(sizes)),
    by_hand.PROMPTS,
  )


def llama(**options: Any) -> dict[str, Any]:
  """Returns names for a decoder with 8 K/V heads; 16 prompts of 1 to 9 tokens.

  Args:
    **options: options of `models.forward`.
  """
  random = np.random.default_rng(1)
  names = of_decoder(
    LLAMA,
    models.init_params(jax.random.key(0), LLAMA),
    [random.integers(0, 48, 1 + row % 9).tolist() for row in range(16)],
  )
  return names | {"model": functools.partial(names["model"], **options)}


def of_decoder(
  decoder: models.Decoder,
  params: Any,
  prompts: list[list[int]],
  *,
  num_pages: int = 1500,
  pages_per_slot: int = 5,
  **options: Any,
) -> dict[str, Any]:
  """Returns names for a decoder; `options` are more of the rollout's config."""
  sizes = tiny.cache_config(
    decoder,
    num_pages=num_pages,
    page_size=4,
    num_slots=3,
    pages_per_slot=pages_per_slot,
  )
  config = rollout.RolloutConfig(
    num_samples=2, max_new_tokens=9, stop_token=3, prefill_chunk=8, **options
  )
  make_kv = functools.partial(
    models.init_kv, decoder, sizes, record_experts=config.record_experts
  )
  return names_of(
    functools.partial(models.forward, config=decoder),
    params,
    sizes,
    config,
    lambda: by_hand.poisoned(make_kv()),
    prompts,
  )


def begun(names: dict[str, Any], cache=None, kv=None) -> rollout.RolloutState:
  """Returns the rollout on one device, by default in a new memory."""
  new_cache, new_kv = names["memory"]()
  cache = new_cache if cache is None else cache
  kv = new_kv if kv is None else kv
  # The weights have the version of the pages in the cache.
  return rollout.init(
    cache,
    kv,
    names["requests"],
    names["key"],
    names["config"],
    version=cache.epoch,
  )


def done(names: dict[str, Any], state: Any, axes: Any = None) -> Any:
  """Generates until the rollout is done, on a mesh unless `axes` is None."""
  run = functools.partial(sharding.generate, axes=axes)
  if axes is None:
    run = jax.jit(rollout.generate, static_argnames="model")
  until = rollout.Until(steps=STEPS)
  while not bool(rollout.is_done(state)):
    state = run(names["params"], state, until, model=names["model"])
  return state


def begun_on(names: dict[str, Any], axes: Any, **options: Any) -> Any:
  """Returns the rollout on a mesh, and places the parameters there."""
  names["params"] = jax.device_put(
    names["params"], sharding.param_shardings(names["params"], axes=axes)
  )
  cache, kv = sharding.init_memory(names["memory"], axes=axes, **options)
  arguments = names["requests"], names["key"], names["config"]
  return sharding.init(cache, kv, *arguments, axes=axes)


def axes_of(data=0, model=0, axis_type=AxisType.Auto) -> sharding.MeshAxes:
  """Returns a mesh of `data` by `model` devices; 0 means no such axis."""
  axis_sizes = {"data": data, "model": model}
  names = tuple(name for name, axis_size in axis_sizes.items() if axis_size)
  shape = tuple(axis_sizes[name] for name in names)
  mesh = jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))
  return sharding.MeshAxes(mesh, **{name: name for name in names})


def assert_equal_results(results, expected) -> None:
  """Compares the results of a mesh with those of one device."""
  count = len(expected.lengths)
  assert not np.asarray(results.valid)[count:].any()
  for name in ("ids", "tokens", "lengths", "finish", "valid"):
    actual = np.asarray(getattr(results, name))[:count]
    np.testing.assert_array_equal(actual, getattr(expected, name))
  # A sum of float32 numbers may be taken in another order, as where the token
  # is computed in a call of another width.
  np.testing.assert_allclose(
    np.asarray(results.log_probs)[:count],
    expected.log_probs,
    rtol=1e-5,
    atol=1e-5,
  )
