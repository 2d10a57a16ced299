"""Scores completions with an engine."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxkv._src.engine.hooks import StaticFunction
from jaxkv._src.engine.queue.requests import check_tokens
from jaxkv._src.engine.score import Scored
from jaxkv._src.sampling.temperature import as_temperature
from jaxkv._src.service import programs
from jaxkv._src.service import prompts as prompt_arrays
from jaxkv._src.service.held_rollout import HeldRollout


def score(
  held: HeldRollout,
  params: Any,
  function: StaticFunction,
  prompts: list[np.ndarray],
  completions: Sequence[Sequence[Any]],
  *,
  vocab_size: int | None,
  **options: Any,
) -> Scored:
  """Computes log-probs of completions, see `Engine.score`.

  `prompts` are the N prompts, int32[L] each, and `function` is the model.
  """
  num_prompts = len(prompts)
  tokens, lengths = prompt_arrays.stacked(prompts)
  answer_tokens, answer_lengths = stacked_groups(completions, num_prompts)
  check_tokens(
    "completions", answer_tokens, answer_lengths, vocab_size=vocab_size
  )
  if "temperature" in options:
    options["temperature"] = as_temperature(options["temperature"])
  # Empty groups up to a power of two, so that all calls together compile few
  # programs.
  padding = prompt_arrays.power_of_two(num_prompts) - num_prompts

  def padded(array: Any) -> Any:
    widths = [(0, padding)] + [(0, 0)] * (np.ndim(array) - 1)
    return np.pad(np.asarray(array), widths)

  groups = map(padded, (tokens, lengths, answer_tokens, answer_lengths))
  for name in ("salts", "extra"):
    if options.get(name) is not None:
      options[name] = jax.tree.map(padded, options[name])
  scored = held.update(
    programs.score, params, *groups, function=function, **options
  )
  longest = max(1, int(answer_lengths.max()))

  def own(array: np.ndarray) -> np.ndarray:
    # The number of computed tokens is no array of prompts.
    array = array[:num_prompts] if array.ndim else array
    return array[:, :, :longest] if array.ndim > 2 else array

  return jax.tree.map(own, scored)


def stacked_groups(
  groups: Sequence[Sequence[Any]], num_prompts: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns completions as int32[N, G, R], and their lengths, int32[N, G].

  Raises ValueError unless each of N prompts has G lists of token ids.
  """
  num_samples = {len(group) for group in groups}
  if len(groups) != num_prompts or len(num_samples) != 1 or 0 in num_samples:
    raise ValueError(
      f"`completions` must have equally many lists for each of {num_prompts} "
      f"prompts, at least one, got {[len(group) for group in groups]}."
    )
  rows = [
    prompt_arrays.as_token_list(f"completions[{index}]", completion)
    for index, group in enumerate(groups)
    for completion in group
  ]
  tokens, lengths = prompt_arrays.stacked(rows)
  shape = num_prompts, num_samples.pop()
  return tokens.reshape(*shape, -1), lengths.reshape(shape)
