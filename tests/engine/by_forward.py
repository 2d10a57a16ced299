"""Groups of completions, and their log-probs by uncached forward passes."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import models
from jaxkv import rollout
from tests.engine import by_hand
from tests.models import tiny_decoders as tiny

MODELS = {name: tiny.decoder(layers) for name, layers in tiny.LAYERS.items()}
SIZES = jaxkv.CacheConfig(
  num_pages=90, page_size=4, num_slots=5, pages_per_slot=6
)
CHUNK = 6


class Groups(NamedTuple):
  """The groups of completions that `score` takes."""

  prompts: np.ndarray
  prompt_lengths: np.ndarray
  completions: np.ndarray
  lengths: np.ndarray


_RNG = np.random.default_rng(4)
GROUPS = Groups(
  prompts=_RNG.integers(0, tiny.VOCABULARY, (3, 13)).astype(np.int32),
  prompt_lengths=np.asarray([12, 1, 8], np.int32),
  completions=_RNG.integers(0, tiny.VOCABULARY, (3, 3, 7)).astype(np.int32),
  lengths=np.asarray([[7, 3, 5], [2, 0, 7], [0, 0, 0]], np.int32),
)


def weights(name: str = "llama", seed: int = 0):
  params = models.init_params(jax.random.key(seed), MODELS[name])
  # Larger logits, so that a mistake changes them much.
  return params | {"embed": params["embed"] * 3}


def _sizes(name: str, sizes=SIZES) -> jaxkv.CacheConfig:
  """Returns sizes for a model, each of whose pools has `num_pages` pages."""
  return tiny.cache_config(
    MODELS[name],
    num_pages=sizes.num_pages,
    page_size=sizes.page_size,
    num_slots=sizes.num_slots,
    pages_per_slot=sizes.pages_per_slot,
  )


def fresh(name: str = "llama", sizes=SIZES) -> rollout.Memory:
  sizes = _sizes(name, sizes)
  return rollout.Memory(
    cache=jaxkv.init(sizes, jax.random.key(3)),
    kv=by_hand.poisoned(models.init_kv(MODELS[name], sizes)),
  )


@functools.cache
def compiled(name: str = "llama", **options):
  """Returns a jitted `rollout.score` with one of the models."""
  model = functools.partial(models.forward, config=MODELS[name])
  options = {"chunk": CHUNK, **options}
  return jax.jit(functools.partial(rollout.score, model=model, **options))


@functools.cache
def _trainer(name: str):
  def run(params, tokens):
    positions = jnp.broadcast_to(
      jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape
    )
    return models.forward_uncached(
      params, tokens, positions, config=MODELS[name]
    )

  return jax.jit(run)


def distributions(params, groups: Groups, name="llama", temperature=1.0):
  """Returns the log-softmax of the logits of each token, [N, G, R, V]."""
  count, samples, columns = groups.completions.shape
  width = groups.prompts.shape[1] + columns
  tokens = np.zeros((count, samples, width), np.int32)
  for n, length in enumerate(groups.prompt_lengths):
    tokens[n, :, :length] = groups.prompts[n, :length]
    tokens[n, :, length : length + columns] = groups.completions[n]
  logits = _trainer(name)(params, jnp.asarray(tokens.reshape(-1, width)))
  scores = np.asarray(jax.nn.log_softmax(logits / jnp.float32(temperature)))
  scores = scores.reshape(count, samples, width, -1)
  positions = groups.prompt_lengths[:, None] - 1 + np.arange(columns)[None]
  positions = np.broadcast_to(
    positions[:, None, :, None], (count, samples, columns, 1)
  )
  return np.take_along_axis(scores, positions, axis=2)


def arguments_of(groups: rollout.Grouped) -> tuple[jax.Array, ...]:
  """Returns the arguments of `grouped_log_probs` and `score`."""
  prompts = groups.prompts, groups.prompt_lengths
  return *prompts, groups.completions, groups.completion_lengths


def mask_of(groups: Groups) -> np.ndarray:
  columns = groups.completions.shape[2]
  return np.arange(columns) < groups.lengths[..., None]


def check_scored(
  scored, params, groups, name="llama", temperature=1.0, rows=None
):
  """Checks all log-probs; `rows` is True for groups that do not fail."""
  scores = distributions(params, groups, name, temperature)
  expected = np.take_along_axis(scores, groups.completions[..., None], axis=3)
  expected = np.where(mask_of(groups), expected[..., 0], 0)
  if rows is not None:
    failed = np.where(mask_of(groups), np.nan, 0)
    expected = np.where(np.asarray(rows)[:, None, None], expected, failed)
  np.testing.assert_allclose(scored.log_probs, expected, atol=1e-5)


def rows_to_compute(groups: Groups, cached, page_size=SIZES.page_size) -> int:
  """Returns the tokens to compute, if `cached` ones of each prompt are found.

  Each further completion of a prompt finds its full pages.
  """
  num_tokens = 0
  for prompt_length, lengths, num_found in zip(
    groups.prompt_lengths.tolist(), groups.lengths.tolist(), cached, strict=True
  ):
    for length in filter(None, lengths):
      num_tokens += prompt_length - 1 - num_found + length
      num_found = (prompt_length - 1) // page_size * page_size
  return num_tokens


def pages_held(state: rollout.Memory) -> int:
  config = state.cache.config
  num_free = int(state.cache.pool.queue.num_free.sum())
  return config.total_pages - config.num_pools - num_free
