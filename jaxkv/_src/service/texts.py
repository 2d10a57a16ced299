"""generate_texts: continues texts with a pretrained model, in one call."""

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any

import jax

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.sampling.settings import Sampling
from jaxkv._src.service import served_model
from jaxkv._src.service.engine import Engine
from jaxkv._src.service.prompt_reader import PromptReader
from jaxkv._src.service.prompts import power_of_two
from jaxkv._src.service.samples import Samples

_ARGUMENTS = ("num_samples", "max_new_tokens", "sampling", "key", "num_slots")


def generate_texts(
  model: Any,
  prompts: Sequence[Any],
  *,
  num_samples: int = 1,
  max_new_tokens: int = 128,
  sampling: Sampling | None = None,
  key: jax.Array | None = None,
  num_slots: int = 8,
  **options: Any,
) -> Samples:
  """Generates samples of each prompt with a pretrained model.

  Makes an `Engine` for this call, with a cache for `num_slots` sequences. Calls
  whose longest sequence has the same number of tokens, rounded up to a power of
  two, compile once. An `Engine` of your own also keeps its cached pages.

  Args:
    model: a `jaxkv.models.Pretrained`.
    prompts: a list of prompts, see `Engine.generate`.
    num_samples: the number of samples of each prompt.
    max_new_tokens: the maximum number of tokens of a sample.
    sampling: see `Engine.generate`.
    key: key[]; None for `jax.random.key(0)`, so that calls give equal samples.
    num_slots: the maximum number of sequences that run at the same time.
    **options: further fields of `RolloutConfig`. The default of `prefill_chunk`
      is 64 here.

  Raises:
    TypeError: an argument has the wrong type, or no such name.
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
  _check_names(options)
  config = RolloutConfig(
    num_samples=num_samples,
    max_new_tokens=max_new_tokens,
    **{"prefill_chunk": 64, **options},
  )
  reader = PromptReader(
    served_model.served(model, config, None),
    config,
    max_new_tokens=max_new_tokens,
    tokenizer=None,
  )
  rows = reader.tokens(prompts, model.max_length - config.max_new_tokens)
  longest = max(map(len, rows)) + config.max_new_tokens
  longest = min(power_of_two(longest), model.max_length)
  longest = max(longest, config.max_length)
  cache = model.cache_config(
    num_slots=as_count("num_slots", num_slots, 1),
    max_length=longest,
    page_size=min(16, longest),
    prefill_chunk=config.prefill_chunk,
    decode_tokens=max(config.decode_steps, 1 + config.draft_tokens),
    record_experts=config.record_experts,
  )
  config = dataclasses.replace(config, max_length=longest)
  with Engine(model.params, model, cache, config, key=key) as engine:
    return engine.generate(rows, sampling=sampling)


def _check_names(options: dict[str, Any]) -> None:
  """Raises TypeError for names that no option has."""
  fields = [field.name for field in dataclasses.fields(RolloutConfig)]
  of_sampling = {field.name for field in dataclasses.fields(Sampling)}
  for name in options:
    if name in fields:
      continue
    hint = "see help(jaxkv.rollout.generate_texts)"
    close_names = difflib.get_close_matches(name, [*_ARGUMENTS, *fields], n=1)
    if name in of_sampling - {"max_tokens"}:
      hint = f"write sampling=rollout.Sampling({name}=...)"
    elif close_names:
      hint = f"write `{close_names[0]}`"
    raise TypeError(f"`{name}` is not an argument of generate_texts; {hint}.")
