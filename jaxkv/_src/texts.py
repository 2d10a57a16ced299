"""generate_texts: continues texts with a pretrained model, in one call."""

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.cache.state import init as init_cache
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.generate import Until
from jaxkv._src.engine.generate import generate
from jaxkv._src.engine.queue import has_ended
from jaxkv._src.engine.requests import Requests
from jaxkv._src.engine.results.generated import Generated
from jaxkv._src.engine.results.generated import generated
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import init
from jaxkv._src.engine.state import is_done
from jaxkv._src.sampling.settings import Sampling
from jaxkv._src.sampling.settings import as_sampling


class Texts(NamedTuple):
  """Result of `generate_texts`.

  Attributes:
    texts: for each prompt, the texts of its samples, without the prompt.
    results: tokens, masks and log-probs of all samples, for a loss; sample g of
      prompt p has row p * G + g.
    state: the final state of the rollout, for example for `extend`.
    seconds: the duration of the loop.
    compile_seconds: the duration of the loop's compilation.
  """

  texts: list[list[str]]
  results: Generated
  state: RolloutState
  seconds: float
  compile_seconds: float


def generate_texts(
  model: Any,
  prompts: Sequence[Any],
  *,
  num_samples: int = 1,
  max_new_tokens: int = 128,
  sampling: Sampling | None = None,
  key: jax.Array | None = None,
  num_slots: int = 8,
  page_size: int = 16,
  num_pages: int | None = None,
  first_sequence: int = 0,
  progress: bool = False,
  **options: Any,
) -> Texts:
  """Generates samples of each prompt with a pretrained model.

  Each call compiles the loop, which takes about 10 s, or less with JAX's
  persistent compilation cache. For more control, call `init` and `generate`.

  Args:
    model: a `jaxkv.models.Pretrained`.
    prompts: a list of prompts. Each is a text, token ids int32[L], or a chat: a
      list of messages `{"role": ..., "content": ...}`.
    num_samples: G, the number of samples of each prompt.
    max_new_tokens: the maximum number of tokens of a sample.
    sampling: settings of the P * G samples; None for temperature 1. The stop
      tokens of the model apply unless `stop_tokens` is set.
    key: key[]; None for `jax.random.key(0)`, so that calls give equal samples.
    num_slots: the maximum number of sequences that run at the same time.
    page_size: tokens per page.
    num_pages: pages of all pools of the cache, see `jaxkv.models.cache_config`;
      None for enough to fill all slots.
    first_sequence: the id of the first sample, see `init`.
    progress: True to show a progress bar on stderr.
    **options: further fields of `RolloutConfig`. The default of `prefill_chunk`
      is 64 here.

  Raises:
    TypeError: an argument has the wrong type.
    ImportError: a package that reads the model's tokenizer is not installed.
    ValueError: there is no prompt, a prompt is empty or too long, a token id or
      an argument is out of range, or the tokenizer cannot be read.

  Examples:
    >>> from jaxkv import models, rollout
    >>> model = models.load("HuggingFaceTB/SmolLM2-135M")  # doctest: +SKIP
    >>> out = rollout.generate_texts(model, ["Hello", "The"])  # doctest: +SKIP
    >>> len(out.texts), out.results.mask.shape[0]  # doctest: +SKIP
    (2, 2)
  """
  if not hasattr(model, "open_tokenizer"):
    raise TypeError(
      "`model` must be a jaxkv.models.Pretrained, got "
      f"{type(model).__name__}; make one with jaxkv.models.load."
    )
  rollout_config = RolloutConfig(
    num_samples=num_samples,
    max_new_tokens=max_new_tokens,
    **{"prefill_chunk": 64, **options},
  )
  # Token ids need it only at the end, where its error would lose the samples.
  tokenizer = model.tokenizer
  tokens, lengths = _encode(model, prompts, max_new_tokens)
  sampling = as_sampling(sampling, len(tokens) * num_samples)
  if sampling.stop_tokens is None and model.stop_tokens:
    stop_tokens = list(model.stop_tokens)
    sampling = dataclasses.replace(sampling, stop_tokens=stop_tokens)
  longest = int(lengths.max()) + max_new_tokens
  longest = max(longest, rollout_config.max_length)
  # Slots beyond the number of sequences would only cost time in each step.
  num_slots = min(
    as_count("num_slots", num_slots, 1), len(tokens) * num_samples
  )
  page_size = min(as_count("page_size", page_size, 1), longest)
  config = model.cache_config(
    num_slots=num_slots,
    max_length=longest,
    page_size=page_size,
    num_pages=num_pages,
    prefill_chunk=rollout_config.prefill_chunk,
    decode_tokens=max(
      rollout_config.decode_steps, 1 + rollout_config.draft_tokens
    ),
  )
  state = init(
    # Processes need no common secret, because they do not share the cache.
    init_cache(config, jnp.asarray(np.frombuffer(os.urandom(16), np.uint32))),
    model.init_kv(config, record_experts=rollout_config.record_experts),
    Requests(tokens, lengths, sampling=sampling),
    jax.random.key(0) if key is None else key,
    rollout_config,
    first_sequence=first_sequence,
  )
  state, seconds, compile_seconds = _run(model, state, progress)
  results = generated(state)
  rows = zip(np.asarray(results.tokens), np.asarray(results.mask), strict=True)
  texts = [tokenizer.decode(row[mask]) for row, mask in rows]
  groups = [
    texts[first_row : first_row + num_samples]
    for first_row in range(0, len(texts), num_samples)
  ]
  return Texts(groups, results, state, seconds, compile_seconds)


def _encode(
  model: Any, prompts: Sequence[Any], max_new_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the prompts' tokens, int32[P, L], and lengths, int32[P]."""
  if isinstance(prompts, str) or not isinstance(prompts, Sequence):
    raise TypeError(
      f"`prompts` must be a list, got {type(prompts).__name__}; write "
      "[prompt] for one prompt."
    )
  if not prompts:
    raise ValueError("`prompts` must have at least one prompt, got none.")
  room, rows = model.max_length - max_new_tokens, []
  for index, prompt in enumerate(prompts):
    row = _encode_one(model, f"prompts[{index}]", prompt)
    if not 0 < len(row) <= room:
      raise ValueError(
        f"`prompts[{index}]` must have 1 to {room} tokens, so that it and "
        f"max_new_tokens fit the model's maximum of {model.max_length}, got "
        f"{len(row)}; shorten it or lower max_new_tokens."
      )
    if row.min() < 0 or row.max() >= model.config.vocab_size:
      raise ValueError(
        f"`prompts[{index}]` must have token ids from 0 to "
        f"{model.config.vocab_size - 1}, got {row.min()} to {row.max()}."
      )
    rows.append(row)
  lengths = np.asarray([len(row) for row in rows], np.int32)
  tokens = np.zeros((len(rows), int(lengths.max())), np.int32)
  for padded, row in zip(tokens, rows, strict=True):
    padded[: len(row)] = row
  return tokens, lengths


def _encode_one(model: Any, name: str, prompt: Any) -> np.ndarray:
  if isinstance(prompt, str):
    return model.tokenizer.encode(prompt)
  if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
    return model.tokenizer.encode_chat(prompt)
  ids = np.asarray(as_int32(name, prompt))
  if ids.ndim != 1:
    raise ValueError(
      f"`{name}` must be a list of token ids, got an array of shape "
      f"{list(ids.shape)}; write [ids] for one prompt."
    )
  return ids


def _run(
  model: Any, state: RolloutState, progress: bool
) -> tuple[RolloutState, float, float]:
  """Runs a rollout to its end, in spans of steps.

  Returns:
    The state, and the seconds of the loop and of its compilation.
  """
  steps, seconds = 8, 0.0
  if progress:
    print("compiling the loop ...", file=sys.stderr, flush=True)
  start_time = time.perf_counter()
  program = functools.partial(generate, model=model.forward)
  compiled = (
    jax.jit(program, donate_argnums=1)
    .lower(model.params, state, Until(steps=jnp.int32(steps)))
    .compile()
  )
  compile_seconds = time.perf_counter() - start_time
  max_tokens = state.queue.size * state.config.max_new_tokens
  with tqdm.tqdm(
    total=max_tokens,
    desc="rollout",
    bar_format="{l_bar}{bar}| {elapsed}",
    disable=not progress,
  ) as bar:
    while not bool(is_done(state)):
      start_time = time.perf_counter()
      span = Until(steps=jnp.int32(steps))
      state = jax.block_until_ready(compiled(model.params, state, span))
      elapsed = time.perf_counter() - start_time
      seconds += elapsed
      # Spans of about half a second keep the bar moving. A change of `steps`
      # does not compile again, because `steps` is traced.
      steps = max(1, min(2 * steps, round(0.5 * steps / elapsed)))
      bar.update(_num_sampled(state) - bar.n)
  return state, seconds, compile_seconds


def _num_sampled(state: RolloutState) -> int:
  """Counts sampled tokens; an ended sequence counts as `max_new_tokens`."""
  queue = state.queue
  sampled = queue.length - queue.prompt_length
  limit = state.config.max_new_tokens
  return int(jnp.sum(jnp.where(has_ended(queue.status), limit, sampled)))
