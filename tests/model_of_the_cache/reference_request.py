"""What the reference model is asked about, and what it answers with."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class Request:
  """A sequence as its scheduler sees it.

  Attributes:
    request_id: its name.
    token_ids: prompt and output.
    num_prompt_tokens: how many of them are the prompt.
    num_computed_tokens: how many of them have their keys and values.
    num_in_flight_tokens: those of them that a step still computes.
    status: waiting, running or preempted.
    cache_salt, lora_name: requests that differ in one share no page.
    mm: not used.
    prompt_logprobs: the whole prompt is computed, so that nothing can hit.
    shared_prefix_boundary: junction of the last lookup.
  """

  request_id: str
  token_ids: list[int]
  num_prompt_tokens: int
  num_computed_tokens: int = 0
  num_in_flight_tokens: int = 0
  status: str = "waiting"
  cache_salt: str | None = None
  lora_name: str | None = None
  mm: Any = None
  prompt_logprobs: bool = False
  shared_prefix_boundary: int = 0

  @property
  def num_tokens(self) -> int:
    """Tokens known so far."""
    return len(self.token_ids)


@dataclasses.dataclass
class CachePages:
  """Pages by group; 0 is no page."""

  pages: tuple[list[int], ...]

  def get_page_ids(self) -> tuple[list[int], ...]:
    """Page ids by group."""
    return self.pages


def page_keys(request: Request, size: int) -> list[tuple]:
  """A key for each full run of `size` tokens: (key before, tokens, extra)."""
  keys: list[tuple] = []
  tokens = request.token_ids
  for start in range(0, len(tokens) // size * size, size):
    extra = [("lora", request.lora_name)] if request.lora_name else []
    if start == 0 and request.cache_salt:
      extra.append(("cache_salt", request.cache_salt))
    before = keys[-1] if keys else None
    keys.append((before, tuple(tokens[start : start + size]), tuple(extra)))
  return keys
