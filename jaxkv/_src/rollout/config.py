"""The static options of a rollout."""

import dataclasses
from typing import Literal

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.arrays.arguments import check_bool

_LEAST = {
  "stop_token": -1,
  "max_overtaken": 0,
  "timeline": 0,
  "max_length": 0,
  "top_log_probs": 0,
  "draft_tokens": 0,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
  """Everything about a rollout that is fixed when it is compiled.

  Attributes:
    num_samples: G, sequences generated for each prompt. Samples that are
      admitted together prefill the prompt once and fork.
    max_new_tokens: tokens after which a sequence ends without a stop token.
    max_length: W, the most tokens of a sequence, with its prompt and all its
      turns; 0 for the width of the first prompts plus `max_new_tokens`.
    stop_token: the token that ends a sequence; -1 for none. `Sampling` has
      further ones for each sequence.
    prefill_chunk: the most prompt tokens that a step computes besides those
      that take the places of slots which do not decode.
    admissions: R, the most sequences that enter in one step.
    window: waiting sequences among which those with the longest cached prefix
      enter first.
    max_overtaken: how many later sequences may enter before a waiting one:
      those with a longer cached prefix, of equal priority, and where pages are
      scarce those that need fewer, of any priority. With 0 none does.
    draft_tokens: the most tokens that are guessed for a sequence in a step, and
      computed together with its next one; 0 for none. Guesses that the sequence
      would not have drawn itself are dropped, so drafts change no token.
    draft_match: a guess is what followed the last place of the prompt, or of a
      sample of it, that has the same tokens as the sequence's end; this is the
      number of those tokens.
    draft_columns: the most guessed tokens of all sequences in a step.
    raw_log_probs: whether to keep the log-probability of each drawn token in
      the model's own distribution, before everything that `Sampling` and
      `process` change.
    entropy: whether to keep the entropy of that distribution, in nats: at
      temperature 1, where that of `score` is at its `temperature`.
    top_log_probs: the number of most likely tokens of that distribution to
      keep, with their log-probabilities; at temperature 1, too.
    prompt_log_probs: whether to keep the log-probability of each token of a
      prompt, too. Prompts are then computed whole: no cached prefix is used.
    numerics: "exact" if the model is (`jaxkv.models.Decoder.numerics`): tokens
      and log-probs are then drawn with the same numbers, bit for bit, in every
      slot, and log-probs are those of a trainer and of `score` at the same
      temperature. Those know of no filters, penalties and `process`: with them,
      the log-probs of a rollout are of another distribution.
    experts: whether to keep the experts that each token used, those of prompts
      and of cached prefixes too, for a trainer to use again. Needs a memory
      that has them, such as that of `jaxkv.models.init_kv(experts=True)`.
    timeline: the number of last steps of which the state keeps what each slot
      did, for `timeline`.

  Raises:
    TypeError: a number is not an int, or a switch not a bool.
    ValueError: a number is out of range.
  """

  num_samples: int = 1
  max_new_tokens: int = 128
  max_length: int = 0
  stop_token: int = -1
  prefill_chunk: int = 256
  admissions: int = 16
  window: int = 32
  max_overtaken: int = 32
  draft_tokens: int = 0
  draft_match: int = 3
  draft_columns: int = 64
  raw_log_probs: bool = False
  entropy: bool = False
  top_log_probs: int = 0
  prompt_log_probs: bool = False
  numerics: Literal["fast", "exact"] = "fast"
  experts: bool = False
  timeline: int = 0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name == "numerics":
        if value not in ("fast", "exact"):
          raise ValueError(
            f'`numerics` must be "fast" or "exact", got {value!r}.'
          )
      elif field.type is bool:
        check_bool(f"RolloutConfig.{field.name}", value)
      else:
        least = _LEAST.get(field.name, 1)
        as_count(f"RolloutConfig.{field.name}", value, least)
