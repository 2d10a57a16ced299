"""A rollout in plain Python: one sequence after another, without any cache.

The model is one layer of attention over embeddings of tokens and positions.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import kv as kv_memory
from jaxkv import rollout

VOCABULARY, WIDTH = 11, 4
_RNG = np.random.default_rng(7)
_TOKENS = _RNG.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
_POSITIONS = _RNG.normal(size=(40, WIDTH)).astype(np.float32)

PROMPTS = [
  [1, 2, 3, 4, 5, 6, 7, 5],
  [1, 2, 3, 4, 8, 6],
  [9],
  [1, 2, 3, 4, 5, 6, 2, 0, 3],
]


def model(params, tokens, positions, kv, views):
  """As `rollout.all_logits` takes it."""
  del params
  (view,) = views
  # Positions of columns that are no tokens may be beyond the last one.
  x = jnp.asarray(_TOKENS)[tokens] + jnp.asarray(_POSITIONS)[positions]
  x = x[:, :, None]
  kv = kv_memory.write(kv, view, 0, x, x)
  out = kv_memory.attend(kv, view, 0, x)
  return jnp.einsum("bthd,vd->btv", out, jnp.asarray(_TOKENS)), kv


def _logits(tokens: list[int]) -> np.ndarray:
  """Those of the last token, float32[V], in float64 until then."""
  x = (_TOKENS[tokens] + _POSITIONS[: len(tokens)]).astype(np.float64)
  scores = x @ x[-1] / WIDTH**0.5
  weights = np.exp(scores - scores.max())
  return (_TOKENS @ (weights @ x / weights.sum())).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Expected:
  """What one sequence must become.

  Attributes:
    tokens: the prompt and what follows it.
    log_probs: of the tokens that follow.
  """

  tokens: list[int]
  log_probs: list[float]


def expected(
  number: int, prompt: list[int], key, temperature: float, config
) -> Expected:
  """Sequence `number`, which begins with `prompt`."""
  key, tokens, log_probs = jax.random.fold_in(key, number), [*prompt], []
  for count in range(config.max_new_tokens):
    logits = _logits(tokens)
    if temperature:
      logits = logits / np.float32(temperature)
      draw = jax.random.categorical(jax.random.fold_in(key, count), logits)
    else:
      draw = np.argmax(logits)
    tokens.append(int(draw))
    log_probs.append(float(jax.nn.log_softmax(logits)[tokens[-1]]))
    if tokens[-1] == config.stop_token:
      break
  return Expected(tokens, log_probs)


def begun(
  key, sizes: jaxkv.CacheConfig, config, prompts=PROMPTS
) -> rollout.RolloutState:
  """A rollout of the prompts, in a memory of NaN."""
  kv = kv_memory.init(
    sizes, num_layers=1, num_kv_heads=1, head_dim=WIDTH, dtype=jnp.float32
  )
  kv = dataclasses.replace(kv, k=kv.k * jnp.nan, v=kv.v * jnp.nan)
  width = max(map(len, prompts))
  rows = [[*prompt, *[10] * (width - len(prompt))] for prompt in prompts]
  lengths = [len(prompt) for prompt in prompts]
  return rollout.init(jaxkv.init(sizes), kv, rows, lengths, key, config)


def program():
  """`rollout.generate` as a function of state, temperature and steps.

  A new one, so that it is traced with what the library now is.
  """
  return jax.jit(
    functools.partial(rollout.generate, None, model=rollout.all_logits(model))
  )
