"""A rollout in plain Python: one sequence after another, without a cache.

The model is a layer of attention over embeddings of tokens and positions.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import kv as kv_memory
from jaxkv import rollout
from tests.sampling import by_definition

VOCABULARY, WIDTH = 11, 4
NO_LIMIT = 10**6
"""Steps, more than any rollout takes."""
WAITS, RUNS, DONE, FAILED, EMPTY = (
  rollout.SequenceStatus.WAITING,
  rollout.SequenceStatus.RUNNING,
  rollout.SequenceStatus.DONE,
  rollout.SequenceStatus.FAILED,
  rollout.SequenceStatus.EMPTY,
)

_RNG = np.random.default_rng(7)
_TOKENS = _RNG.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
_POSITIONS = _RNG.normal(size=(40, WIDTH)).astype(np.float32)

PROMPTS = [
  [1, 2, 3, 4, 5, 6, 7, 5],
  [1, 2, 3, 4, 8, 6],
  [9],
  [1, 2, 3, 4, 5, 6, 2, 0, 3],
]


def all_logits(model):
  """Makes a `Model` from a function that returns the logits of all tokens."""

  def select_columns(params, batch, kv):
    logits, kv = model(params, batch, kv)
    return logits[0].at[batch.columns].get(mode="clip"), kv

  return select_columns


def model(params, batch, kv):
  """A model for `all_logits`."""
  del params
  x = jnp.asarray(_TOKENS)[batch.tokens]
  # Columns of padding may have positions beyond the table.
  x = x + jnp.asarray(_POSITIONS)[batch.positions]
  x = x[:, :, None]
  kv = kv_memory.write(kv, batch.views[0], 0, x, x)
  output = kv_memory.attend(kv, batch.views[0], 0, x)
  return jnp.einsum("bthd,vd->btv", output, jnp.asarray(_TOKENS)), kv


def last_token_model(params, batch, kv):
  """Returns logits of the last token alone, without K/V."""
  del kv
  last_tokens = batch.tokens[0].at[batch.columns].get(mode="clip")
  return params[last_tokens], None


def logits_of(tokens: list[int]) -> np.ndarray:
  """Returns the logits of the last token, float32[V], computed in float64."""
  x = (_TOKENS[tokens] + _POSITIONS[: len(tokens)]).astype(np.float64)
  scores = x @ x[-1] / WIDTH**0.5
  weights = np.exp(scores - scores.max())
  return (_TOKENS @ (weights @ x / weights.sum())).astype(np.float32)


def key() -> jax.Array:
  """Returns the key of all rollouts."""
  # A function, because a process that joins others may not call jax before.
  return jax.random.key(5)


@dataclasses.dataclass(frozen=True)
class Expected:
  """The expected result of one sequence.

  Attributes:
    tokens: the prompt and the drawn tokens.
    log_probs: the log-probs of the drawn tokens.
  """

  tokens: list[int]
  log_probs: list[float]


def expected(
  seq_id: int,
  prompt: list[int],
  temperature: float,
  config,
) -> Expected:
  """Computes sequence `seq_id`, which begins with `prompt`."""
  seq_key = jax.random.fold_in(key(), seq_id)
  tokens = [*prompt]
  log_probs = []
  for count in range(config.max_new_tokens):
    logits = logits_of(tokens)
    if temperature:
      logits = logits / np.float32(temperature)
      weights = np.exp(logits.astype(np.float64))
      draw = by_definition.drawn(weights, seq_key, count)
    else:
      draw = np.argmax(logits)
    tokens.append(int(draw))
    log_probs.append(float(jax.nn.log_softmax(logits)[tokens[-1]]))
    if tokens[-1] == config.stop_token:
      break
  return Expected(tokens, log_probs)


def sizes(pages: int, slots: int) -> jaxkv.CacheConfig:
  """Returns a cache of pages of two tokens, eight for each slot."""
  return jaxkv.CacheConfig(
    num_pages=pages, page_size=2, num_slots=slots, pages_per_slot=8
  )


def requests_of(
  prompts, width: int | None = None, fill: int = 0, **fields
) -> rollout.Requests:
  """Makes requests of prompts of different lengths, with `fill` behind them."""
  lengths = [len(prompt) for prompt in prompts]
  rows = np.full((len(prompts), width or max(lengths)), fill, np.int32)
  for row, prompt in zip(rows, prompts, strict=True):
    row[: len(prompt)] = prompt
  return rollout.Requests(rows, np.asarray(lengths, np.int32), **fields)


def begun(
  sizes: jaxkv.CacheConfig, config, prompts=PROMPTS, **options
) -> rollout.RolloutState:
  """Makes a rollout of the prompts in a memory of NaN.

  `options` are those of `init` and of its `Requests`; `kv` is the memory of
  another model, which is left as it is if there is a `cache` of its pages.
  Offloaded pages are made if `sizes` has some.
  """
  kv = options.pop("kv", None) or pages(sizes)
  cache = options.pop("cache", None)
  if cache is None:
    kv = poisoned(kv)
    cache = jaxkv.init(sizes)
  if sizes.offload_pages:
    options["offload"] = kv_memory.init_offload(kv, sizes)
  fields = {field.name for field in dataclasses.fields(rollout.Requests)}
  settings = {name: options.pop(name) for name in fields & options.keys()}
  requests = requests_of(prompts, fill=10, **settings)
  return rollout.init(cache, kv, requests, key(), config, **options)


def pages(sizes: jaxkv.CacheConfig) -> kv_memory.KVPages:
  """Makes the pages of this file's model."""
  return kv_memory.init(
    sizes, num_layers=1, num_kv_heads=1, head_dim=WIDTH, dtype=jnp.float32
  )


def poisoned(kv: Any) -> Any:
  """Fills pages with NaN; integers, as bits of other formats, stay."""

  def nan(leaf: jax.Array) -> jax.Array:
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return jnp.full_like(leaf, jnp.nan) if is_float else leaf

  return jax.tree.map(nan, kv)


def with_queue(state: rollout.RolloutState, **changes) -> rollout.RolloutState:
  """Changes fields of the queue."""
  queue = dataclasses.replace(state.queue, **changes)
  return dataclasses.replace(state, queue=queue)


def with_cache(
  state: rollout.RolloutState, cache: jaxkv.CacheState
) -> rollout.RolloutState:
  memory = dataclasses.replace(state.memory, cache=cache)
  return dataclasses.replace(state, memory=memory)


def begun_at(state: rollout.RolloutState, temperature) -> rollout.RolloutState:
  """Sets one temperature for all sequences."""
  temperatures = jnp.full(state.queue.ids.shape, temperature, jnp.float32)
  sampling = dataclasses.replace(state.queue.sampling, temperature=temperatures)
  return with_queue(state, sampling=sampling)


class Runner:
  """A jitted `rollout.generate` of state, temperature and steps."""

  def __init__(self, model, params=None):
    def run(params, state, until):
      return rollout.generate(params, state, until, model=model)

    self._params = params
    self._compiled = jax.jit(run)

  def __call__(self, state, temperature, steps=NO_LIMIT):
    # Every call has the same types, so a state that comes out of a call and
    # goes in again compiles nothing.
    state = begun_at(state, temperature)
    until = rollout.Until(steps=jnp.int32(steps))
    return self._compiled(self._params, state, until)

  def num_compiled(self) -> int:
    return self._compiled._cache_size()


def program() -> Runner:
  """Returns a new `Runner` of this file's model."""
  return Runner(all_logits(model))


def ended(
  sizes: jaxkv.CacheConfig, config, prompts, temperature: float
) -> rollout.RolloutState:
  """Runs a rollout to its end, which takes at most 50 steps."""
  state = program()(begun(sizes, config, prompts), temperature, 50)
  assert bool(rollout.is_done(state)), "not done after 50 steps"
  return state


def check_sequences(state, config, temperature: float) -> None:
  """Checks a finished rollout of all samples of `PROMPTS`."""
  assert bool(rollout.is_done(state))
  rollout.check(state)
  for seq_id in range(len(PROMPTS) * config.num_samples):
    prompt = PROMPTS[seq_id // config.num_samples]
    expected_seq = expected(seq_id, prompt, temperature, config)
    check_sequence(state.queue, seq_id, expected_seq)


def check_sequence(sequences, row: int, expected: Expected) -> None:
  """Checks the tokens, log-probs and versions of a finished sequence."""
  length = int(sequences.length[row])
  assert sequences.tokens[row, :length].tolist() == expected.tokens
  assert not np.any(sequences.tokens[row, length:])
  prompt_length = int(sequences.prompt_length[row])
  scores = np.asarray(sequences.log_probs[row])
  # float32, summed in another order.
  np.testing.assert_allclose(
    scores[prompt_length:length], expected.log_probs, atol=1e-5
  )
  assert not np.any(scores[:prompt_length]) and not np.any(scores[length:])
  columns = np.arange(len(scores))
  is_sampled = (columns >= prompt_length) & (columns < length)
  versions = np.where(is_sampled, 0, -1)
  assert sequences.versions[row].tolist() == versions.tolist()
