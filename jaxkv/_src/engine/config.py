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
  """Static options of a rollout; a change compiles `generate` again.

  Attributes:
    num_samples: G, sequences generated for each prompt. Samples admitted in one
      step prefill the prompt once and fork.
    max_new_tokens: the maximum number of tokens that a sequence generates in a
      turn, unless `extend` sets another.
    max_length: W, the maximum length of a sequence, including its prompt and
      all turns; 0 for the width of the first prompts plus `max_new_tokens`.
    stop_token: the token that ends every sequence; -1 for none. `Sampling` can
      add stop tokens for each sequence.
    prefill_chunk: the maximum number of prompt tokens in a step, not counting
      those in the columns of slots that do not decode.
    admissions: R, the maximum number of sequences that are admitted in a step.
    window: the number of waiting sequences that are compared; those with the
      longest cached prefix are admitted first.
    max_overtaken: how many later sequences may be admitted before a waiting
      one. A later sequence overtakes if its cached prefix is longer, at equal
      priority; or, at any priority, if the next page of the waiting one is
      being computed, or if pages are scarce and the later one needs fewer.
    draft_tokens: K, the maximum number of tokens guessed for a sequence in a
      step; 0 for no speculation. Rejected guesses are dropped, so speculation
      changes no token.
    draft_match: the length of an n-gram match. The guess is the text after the
      last place in the prompt, or in one of its samples, with the same n-gram
      as the end of the sequence.
    draft_columns: the maximum number of guessed tokens in a step.
    raw_log_probs: whether to record the log-prob of each sampled token under
      the model's distribution, before `Sampling` and `process` change it.
    unfiltered_log_probs: True to record the log-prob of each sampled token at
      its temperature, after penalties and `process`, before `min_p`, `top_k`
      and `top_p`. Unlike the log-prob as drawn, it is one of a softmax over all
      tokens, which `grpo_loss` needs.
    entropy: whether to record the entropy of the model's distribution in nats,
      at temperature 1. (In `score`, at the temperature of the call.)
    top_log_probs: the number of most likely tokens of the model's distribution
      to record, with their log-probs at temperature 1.
    prompt_log_probs: whether to record `raw_log_probs`, also of the tokens of
      prompts and of `extend`, except a sequence's first token. Prompts are then
      computed in full, without cached prefixes. After a change of weights, the
      values of a prompt that is computed again may be of either version.
    numerics: "exact" for a model with exact numerics
      (`jaxkv.models.Decoder.numerics`). Tokens and log-probs are then
      bit-identical in every slot, and equal to those of a trainer and of
      `score` at the same temperature, unless other fields of `Sampling` or
      `process` change the distribution.
    record_experts: whether to record the experts of each token, also in prompts
      and cached prefixes, for a trainer to replay. Needs a memory with expert
      ids, as from `jaxkv.models.init_kv(record_experts=True)`.
    timeline: X, the number of recent calls of the model that `timeline` can
      show.
    decode_steps: k, the maximum number of calls of the model for which tokens
      are scheduled, pages reserved and tokens committed together. Calls after
      the first only decode, so there are none while a prompt is incomplete. A
      sequence that ends is idle, and a waiting one is not admitted, until the
      last of them. Sampled tokens do not depend on it.

  Raises:
    TypeError: a number is not an int, or an option not a bool.
    ValueError: a number is out of range, `numerics` is neither "fast" nor
      "exact", or `draft_tokens` is set with several `decode_steps`.
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
  unfiltered_log_probs: bool = False
  entropy: bool = False
  top_log_probs: int = 0
  prompt_log_probs: bool = False
  numerics: Literal["fast", "exact"] = "fast"
  record_experts: bool = False
  timeline: int = 0
  decode_steps: int = 1

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
        minimum = _LEAST.get(field.name, 1)
        count = as_count(f"RolloutConfig.{field.name}", value, minimum)
        object.__setattr__(self, field.name, count)
    if self.draft_tokens and self.decode_steps > 1:
      raise ValueError(
        "`RolloutConfig.decode_steps` must be 1 with `draft_tokens`, got "
        f"{self.decode_steps}: drafts are proposed before each call of the "
        "model."
      )
