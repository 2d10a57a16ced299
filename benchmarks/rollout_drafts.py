"""Drafts: tokens a step, and what they cost where nothing repeats."""

import functools
import statistics
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rollout_rows import Row
from rollout_rows import at_least
from rollout_rows import at_most

import jaxkv
from jaxkv import models
from jaxkv import rollout
from jaxkv._src.commands import characters

# Tokens that a sequence draws in a step in which it decodes.
TOKENS_A_STEP = 1.3
# Seconds with drafts, against those without, where nothing repeats.
COST = 1.05

_SLOTS, _PAGE, _NEW = 8, 16, 160

_WORDS = (
  "assert break class continue def del elif else except finally for from "
  "global if import lambda nonlocal not pass raise return try while with"
).split()


def _lists(count: int) -> list[str]:
  """A list of names, some three times over; the answer goes on with it."""
  rng = np.random.default_rng(0)
  texts = []
  for _ in range(count):
    words = rng.permutation(_WORDS)[:8].tolist()
    block = "".join(f'   "{word}",\n' for word in words)
    texts.append(f"names = [\n{block}]\n\n" * 3 + "names = [\n")
  return texts


def _code(count: int) -> list[str]:
  """The beginnings of grammars and functions in the reference text."""
  text = characters.reference_text()
  rng = np.random.default_rng(1)
  places = [
    n for n in range(len(text) - 400) if text.startswith("\n   def ", n)
  ]
  chosen = rng.permutation(places)[:count].tolist()
  return [text[place : place + 240] for place in chosen]


def _begun(
  prompts: list[np.ndarray],
  memory: Callable[[jaxkv.CacheConfig], jaxkv.kv.KVPages],
  temperature: float,
  **options: Any,
) -> rollout.RolloutState:
  lengths = np.asarray([len(prompt) for prompt in prompts])
  rows = np.zeros((len(prompts), lengths.max()), np.int32)
  for row, prompt in zip(rows, prompts, strict=True):
    row[: len(prompt)] = prompt
  config = rollout.RolloutConfig(
    **{"max_new_tokens": _NEW, "prefill_chunk": 64, **options}
  )
  columns = -(-(rows.shape[1] + config.max_new_tokens) // _PAGE)
  cache = jaxkv.CacheConfig(
    num_pages=1 + len(prompts) * columns,
    page_size=_PAGE,
    num_slots=_SLOTS,
    pages_per_slot=columns,
  )
  return rollout.init(
    jaxkv.init(cache, jax.random.key(1)),
    memory(cache),
    jnp.asarray(rows),
    jnp.asarray(lengths, jnp.int32),
    jax.random.key(0),
    config,
    sampling=rollout.Sampling(temperature=temperature),
  )


def _compared(
  name: str,
  model: Callable[..., Any],
  params: Any,
  begun: Callable[..., rollout.RolloutState],
  rounds: int,
) -> Iterator[Row]:
  """Rows of a rollout with drafts beside the same without."""
  program = jax.jit(
    functools.partial(rollout.generate, model=model),
    compiler_options=jaxkv.CPU_COMPILER_OPTIONS,
  )
  states = {"without": begun(), "with": begun(draft_tokens=4, draft_columns=16)}
  ends, seconds = {}, {key: [] for key in states}
  for number in range(rounds + 1):
    for key, state in states.items():
      jax.block_until_ready(state)
      begin = time.perf_counter()
      ends[key] = jax.block_until_ready(program(params, state))
      if number:
        seconds[key].append(time.perf_counter() - begin)
  one, other = ends["without"], ends["with"]
  same = np.array_equal(one.sequences.tokens, other.sequences.tokens)
  drawn, accepted = int(other.counters.generated), int(other.counters.accepted)
  yield at_most(name, "answers that differ", 0 if same else 1, 0)
  tokens = drawn / (drawn - accepted)
  if "random" in name:
    yield Row(name, "tokens a step", tokens)
  else:
    yield at_least(name, "tokens a step", tokens, TOKENS_A_STEP)
  yield Row(
    name,
    "of the drafts accepted",
    accepted / max(int(other.counters.drafted), 1),
  )
  yield Row(
    name, "steps against those without",
    int(other.counters.steps) / int(one.counters.steps),
  )  # fmt: skip
  ratio = statistics.median(seconds["with"]) / statistics.median(
    seconds["without"]
  )
  least = min(seconds["with"]) / min(seconds["without"])
  for metric, value in (("median", ratio), ("minimum", least)):
    metric = f"seconds against those without, {metric}"
    if "random" in name:
      yield at_most(name, metric, value, COST)
    else:
      yield Row(name, metric, value)


def _random_model(
  params: jax.Array,
  tokens: Any,
  positions: Any,
  kv: Any,
  views: Any,
  at: Any,
  rows: Any,
) -> tuple[jax.Array, Any]:
  """Logits that a compiler cannot know before the step."""
  del tokens, views, rows
  position = positions[0].at[at].get(mode="clip").astype(jnp.float32)
  place = jnp.arange(position.shape[0], dtype=jnp.int32) % params.shape[0]
  return params[place] + position[:, None] * 1e-3, kv


def all_rows(quick: bool, rounds: int) -> Iterator[Row]:
  """Tokens at random, texts that repeat themselves, and text at random."""
  params = jax.random.normal(jax.random.key(1), (_SLOTS, 513))
  rng = np.random.default_rng(0)
  memory = functools.partial(
    jaxkv.kv.init, num_layers=1, num_kv_heads=1, head_dim=1
  )
  prompts = [rng.integers(0, 513, 40) for _ in range(_SLOTS)]
  yield from _compared(
    "drafts, random tokens",
    _random_model,
    params,
    lambda **options: _begun(
      prompts, memory, 1.0, max_new_tokens=64 if quick else 1024, **options
    ),
    rounds,
  )
  if quick:
    return
  model = characters.character_model()
  memory = functools.partial(models.init_kv, model.config)
  forward = functools.partial(models.forward, config=model.config)
  texts = {"lists": _lists(16), "code": _code(16), "random text": _code(16)}
  for name, some in texts.items():
    encoded = [model.tokenizer.encode(text) for text in some]
    # So hot that nothing repeats.
    for heat in (3.0,) if "random" in name else (0.0, 0.8):
      yield from _compared(
        f"drafts, {name}, {heat}",
        forward,
        model.params,
        lambda encoded=encoded, heat=heat, **options: _begun(
          encoded, memory, heat, **options
        ),
        rounds,
      )
