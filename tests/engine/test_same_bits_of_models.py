"""Exact numerics of trained models, over many sampled tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv import rollout
from jaxkv._src.commands import characters
from tests import as_users
from tests.engine.by_forward import arguments_of
from tests.models import tiny_decoders as tiny
from tests.tools import named_models

pytestmark = pytest.mark.deep
_TEMPERATURE = 0.8
_DTYPES = pytest.mark.parametrize(
  "dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"]
)


def _converted(config, params, dtype, numerics):
  cast = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
  config = dataclasses.replace(config, dtype=dtype, numerics=numerics)
  return config, cast


def _samples(config, params, prompts, samples, new, slots):
  """Returns the samples of a rollout, in groups."""
  columns = prompts.shape[1]
  sizes = tiny.cache_config(
    config,
    num_pages=1 + (slots + 2) * -(-(columns + new) // 16),
    page_size=16,
    num_slots=slots,
    pages_per_slot=-(-(columns + new) // 16),
  )
  options = rollout.RolloutConfig(
    num_samples=samples, max_new_tokens=new, prefill_chunk=64
  )
  lengths = jnp.full(prompts.shape[:1], columns, jnp.int32)
  state = rollout.init(
    jaxkv.init(sizes),
    models.init_kv(config, sizes),
    rollout.Requests(
      prompts, lengths, sampling=rollout.Sampling(temperature=_TEMPERATURE)
    ),
    jax.random.key(3),
    options,
  )
  forward = functools.partial(models.forward, config=config)
  run = as_users.jit(
    functools.partial(rollout.generate, model=forward), donate_argnums=1
  )
  results = rollout.generated(run(params, state))
  return rollout.grouped(
    results, num_samples=samples, prompt_columns=columns, completion_columns=new
  )


def _by_score(config, params, groups):
  columns = groups.prompts.shape[1] + groups.completions.shape[2]
  pages = -(-columns // 16)
  sizes = tiny.cache_config(
    config,
    num_pages=1 + 10 * pages,
    page_size=16,
    num_slots=9,
    pages_per_slot=pages,
  )
  state = rollout.Memory(
    cache=jaxkv.init(sizes), kv=models.init_kv(config, sizes)
  )
  model = functools.partial(models.forward, config=config)
  score = functools.partial(
    rollout.score, model=model, temperature=_TEMPERATURE
  )
  _, scored = as_users.jit(score)(params, state, *arguments_of(groups))
  assert scored.ok.all()
  return scored.log_probs


def _mismatch(config, params, groups, each):
  """Returns the largest gaps of score and trainer, and the number of tokens."""

  def loss(params, groups):
    new = models.grouped_log_probs(
      params,
      *arguments_of(groups),
      config=config,
      temperature=_TEMPERATURE,
      remat=True,
    )
    return jnp.mean(new), new

  gradient = as_users.jit(jax.value_and_grad(loss, has_aux=True))
  forward = as_users.jit(lambda *inputs: loss(*inputs)[1])
  worst = {"score": 0.0, "forward": 0.0, "gradient": 0.0}
  tokens = 0
  scored = _by_score(config, params, groups)
  for first_row in range(0, groups.prompts.shape[0], each):
    rows = slice(first_row, first_row + each)
    part = jax.tree.map(lambda x, rows=rows: x[rows], groups)
    mask = np.asarray(part.mask)
    log_probs = {
      "score": scored[rows],
      "forward": forward(params, part),
      "gradient": gradient(params, part)[0][1],
    }
    for name, expected in log_probs.items():
      off = np.abs(part.log_probs - expected)[mask].max()
      worst[name] = max(worst[name], float(off))
    tokens += int(mask.sum())
  print(f"\n{config.dtype.name} {config.numerics}: {tokens} tokens, {worst}")
  return worst, tokens


@_DTYPES
def test_character_model_has_the_same_bits(dtype):
  model = characters.character_model()
  text = characters.reference_text()
  starts = np.arange(25) * 3001
  prompts = np.stack([model.tokenizer.encode(text[x : x + 48]) for x in starts])
  prompts = jnp.asarray(prompts, jnp.int32)
  config, params = _converted(model.config, model.params, dtype, "exact")
  groups = _samples(config, params, prompts, 8, 100, slots=64)
  worst, tokens = _mismatch(config, params, groups, each=5)
  assert tokens == 20_000
  assert max(worst.values()) == 0.0
  fast, params = _converted(model.config, model.params, dtype, "fast")
  groups = _samples(fast, params, prompts[:5], 8, 100, slots=64)
  worst, _ = _mismatch(fast, params, groups, each=5)
  assert worst["forward"] > 0


@_DTYPES
def test_smollm2_has_the_same_bits(dtype):
  loaded = models.load(named_models.fetch("smollm2"))
  config, params = _converted(loaded.config, loaded.params, dtype, "exact")
  text = "The paged cache keeps what a model has read, and"
  prompt = np.asarray(loaded.tokenizer.encode(text), np.int32)
  prompts = jnp.asarray(np.stack([prompt, prompt[::-1]]), jnp.int32)
  groups = _samples(config, params, prompts, 8, 63, slots=16)
  worst, tokens = _mismatch(config, params, groups, each=1)
  assert tokens >= 1_000
  assert max(worst.values()) == 0.0
