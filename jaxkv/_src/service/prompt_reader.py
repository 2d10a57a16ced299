"""Reads an engine's prompts: texts, chats and token ids."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.hooks import vocab_size_of
from jaxkv._src.engine.queue.requests import Requests
from jaxkv._src.engine.queue.requests import as_requests
from jaxkv._src.engine.queue.requests import check_tokens
from jaxkv._src.sampling.settings import Sampling
from jaxkv._src.sampling.settings import as_sampling
from jaxkv._src.service import prompts as prompt_arrays
from jaxkv._src.service.served_model import ServedModel


class PromptReader:
  """Converts prompts to requests, with the limits of an engine.

  Attributes:
    config: the options of the engine, with W as `max_length`.
    vocab_size: the number of token ids; None if it is not known.
  """

  def __init__(
    self,
    model: ServedModel,
    config: RolloutConfig,
    *,
    max_new_tokens: int,
    tokenizer: Any,
  ):
    """Creates a reader.

    Args:
      model: the model, with its stop tokens and tokenizer.
      config: the options of the engine.
      max_new_tokens: the default of the calls that generate.
      tokenizer: the tokenizer; None for that of the model.
    """
    self.config = config
    self.vocab_size = vocab_size_of(model.call)
    self._model = model
    self._default_new_tokens = max_new_tokens
    self._tokenizer = tokenizer

  def requests(
    self,
    prompts: Any,
    *,
    sampling: Sampling | None = None,
    num_samples: int | None = None,
    max_new_tokens: int | None = None,
  ) -> Requests:
    """Returns the requests of prompts; see `Engine.generate`."""
    if isinstance(prompts, Requests):
      return self._checked(
        prompts,
        sampling=sampling,
        num_samples=num_samples,
        max_new_tokens=max_new_tokens,
      )
    if num_samples is None:
      num_samples = self.config.num_samples
    num_samples = as_count("num_samples", num_samples, 1)
    budget = self.budget(max_new_tokens)
    rows = self.tokens(prompts, self.config.max_length - budget)
    settings = as_sampling(sampling, len(rows) * num_samples)
    limits = settings.max_tokens
    if limits is None:
      limits = jnp.full((len(rows) * num_samples,), budget, jnp.int32)
    settings = dataclasses.replace(
      settings, max_tokens=jnp.minimum(limits, budget)
    )
    settings = self._with_stop_tokens(settings)
    return prompt_arrays.requests_of(
      rows, self.config, sampling=settings, num_samples=num_samples
    )

  def of_one_call(self, prompts: Any, **options: Any) -> Requests:
    """Returns the requests of prompts that enter together, see `submit`.

    Args:
      prompts: see `Engine.generate`.
      **options: the options of `requests`.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: an argument is out of range.
    """
    num_samples = options.get("num_samples")
    if num_samples is not None and num_samples > self.config.num_samples:
      raise ValueError(
        "`num_samples` must be at most RolloutConfig.num_samples, "
        f"{self.config.num_samples}, got {num_samples}; raise it, or call "
        "`generate`, which splits prompts."
      )
    return self.requests(prompts, **options)

  def to_match(self, prompts: Any) -> Requests:
    """Returns the requests of prompts whose cached tokens are counted."""
    if isinstance(prompts, Requests):
      # Bad tokens match nothing; `submit` names them.
      return as_requests(prompts, self.config)
    return self.requests(prompts, num_samples=1, max_new_tokens=1)

  def new_turn(
    self,
    tokens: Sequence[Any],
    count: int,
    max_new_tokens: int | None,
    priority: Sequence[int] | None,
  ) -> tuple[tuple[np.ndarray, np.ndarray], dict[str, np.ndarray]]:
    """Returns the arguments of `rollout.extend`; see `Engine.extend`.

    Raises ValueError unless there are `count` lists of tokens.
    """
    budget = self.budget(max_new_tokens)
    if len(tokens) != count:
      raise ValueError(
        f"`tokens` must have a list for each of the {count} ids, got "
        f"{len(tokens)}."
      )
    lists = [
      prompt_arrays.as_token_list(f"tokens[{row}]", ids)
      for row, ids in enumerate(tokens)
    ]
    rows, lengths = prompt_arrays.stacked(lists)
    check_tokens("tokens", rows, lengths, vocab_size=self.vocab_size)
    options = {"max_tokens": np.full((count,), budget, np.int32)}
    if priority is not None:
      options["priority"] = np.asarray(as_int32("priority", list(priority)))
    return (rows, lengths), options

  def _checked(self, requests: Requests, **options: Any) -> Requests:
    for name, option in options.items():
      if option is not None:
        raise TypeError(
          f"`{name}` must be None with a Requests, whose fields say the same, "
          f"got {option!r}."
        )
    requests = as_requests(requests, self.config)
    check_tokens(
      "prompts.tokens",
      requests.tokens,
      requests.lengths,
      vocab_size=self.vocab_size,
    )
    sampling = requests.sampling
    assert sampling is not None  # `as_requests` sets it.
    num_rows = len(requests.lengths) * self.config.num_samples
    if sampling.max_tokens is None:
      limits = jnp.full((num_rows,), self.budget(None), jnp.int32)
      sampling = dataclasses.replace(sampling, max_tokens=limits)
    sampling = as_sampling(self._with_stop_tokens(sampling), num_rows)
    return dataclasses.replace(requests, sampling=sampling)

  def _with_stop_tokens(self, sampling: Sampling) -> Sampling:
    """Returns settings with the model's stop tokens, if they have none."""
    if sampling.stop_tokens is not None or not self._model.stop_tokens:
      return sampling
    stop_tokens = list(self._model.stop_tokens)
    return dataclasses.replace(sampling, stop_tokens=stop_tokens)

  def budget(self, max_new_tokens: int | None) -> int:
    """Returns the number of tokens to generate, at most W - 1."""
    longest = self.config.max_new_tokens
    if max_new_tokens is None:
      return min(self._default_new_tokens, longest)
    budget = as_count("max_new_tokens", max_new_tokens, 1)
    if budget > longest:
      raise ValueError(
        f"`max_new_tokens` must be at most {longest}, so that it fits a "
        f"sequence with its prompt, got {budget}; raise "
        "RolloutConfig.max_length or CacheConfig.pages_per_slot."
      )
    return budget

  def tokens(self, prompts: Sequence[Any], max_length: int) -> list[np.ndarray]:
    """Returns the tokens of each prompt, int32[L], 1 .. `max_length` of them.

    Raises:
      TypeError: `prompts` is not a list, or a prompt has a wrong type.
      ValueError: there is no prompt, a prompt is empty or too long, or a token
        id is out of range.
    """
    if isinstance(prompts, str) or not isinstance(
      prompts, Sequence | np.ndarray | jax.Array
    ):
      raise TypeError(
        f"`prompts` must be a list, got {type(prompts).__name__}; write "
        "[prompt] for one prompt."
      )
    if not len(prompts):
      raise ValueError("`prompts` must have at least one prompt, got none.")
    rows = []
    for index, prompt in enumerate(prompts):
      name = f"prompts[{index}]"
      row = self._tokens_of(name, prompt)
      if not 0 < len(row) <= max_length:
        raise ValueError(
          f"`{name}` must have 1 to {max_length} tokens, so that a sequence of "
          f"the longest length has room for the new tokens, got {len(row)}; "
          "shorten it, or lower max_new_tokens."
        )
      self._check_ids(name, row)
      rows.append(row)
    return rows

  def _tokens_of(self, name: str, prompt: Any) -> np.ndarray:
    if isinstance(prompt, str):
      prompt = self.open_tokenizer().encode(prompt)
    elif isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
      prompt = self.open_tokenizer().encode_chat(prompt)
    return prompt_arrays.as_token_list(name, prompt)

  def _check_ids(self, name: str, row: np.ndarray) -> None:
    last_id = 2**31 - 1 if self.vocab_size is None else self.vocab_size - 1
    if row.min() < 0 or row.max() > last_id:
      raise ValueError(
        f"`{name}` must have token ids from 0 to {last_id}, got {row.min()} to "
        f"{row.max()}."
      )

  def texts(self, rows: list[np.ndarray]) -> list[str] | None:
    """Returns the texts of lists of tokens; None without a tokenizer."""
    if self._tokenizer is None and self._model.tokenizer is None:
      return None
    decode = self.open_tokenizer().decode
    return [decode(row) for row in rows]

  def open_tokenizer(self) -> Any:
    """Returns the tokenizer, or raises ValueError if there is none."""
    if self._tokenizer is None:
      if self._model.tokenizer is None:
        raise ValueError(
          "`tokenizer` must be given to the engine for prompts that are texts "
          "or chats, got None; or give token ids."
        )
      self._tokenizer = self._model.tokenizer()
    return self._tokenizer
