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
    num_samples: G, the number of sequences generated for each prompt. Samples
      admitted in one step prefill the prompt once, and then fork.
    max_new_tokens: the maximum number of tokens that a sequence generates in a
      turn. `Sampling` can lower it, and `extend` can set another limit.
    max_length: W, the maximum length of a sequence, including its prompt and
      all turns; 0 for the prompt columns in `init` plus `max_new_tokens`.
    stop_token: the token that ends every sequence; -1 for none. `Sampling` can
      add stop tokens for each sequence.
    prefill_chunk: the maximum number of columns for prompt tokens in a step. A
      slot that does not decode can take one prompt token more.
    admissions: R, the maximum number of sequences that are admitted in a step.
    window: the number of waiting sequences that are compared. At equal
      priority, the one with the longest cached prefix is admitted first.
    max_overtaken: the maximum number of later sequences that overtake a waiting
      one. A sequence of equal priority overtakes with a longer cached prefix.
      One of any priority overtakes while the next page of the waiting one is
      being computed, or while free pages suffice only for the later one.
    draft_tokens: K, the maximum number of tokens drafted for a sequence in a
      step; 0 for no speculation. Rejected drafts are dropped, so speculation
      does not change which tokens are sampled.
    draft_match: n, the length of an n-gram match. The draft is the text after
      the last place, in the prompt or its samples, at which the last n tokens
      of the sequence occurred.
    draft_columns: the maximum number of draft tokens in a step.
    raw_log_probs: whether to record the log-prob of each sampled token under
      the model's distribution, before `Sampling` and `process` change it.
    unfiltered_log_probs: whether to record the log-prob of each sampled token
      at its temperature, after penalties and `process`, before `min_p`, `top_k`
      and `top_p`. Its softmax is over all tokens, as `grpo_loss` requires.
    entropy: whether to record the entropy of the model's distribution in nats,
      at temperature 1. (In `score`, at the temperature of the call.)
    top_log_probs: the number of most likely tokens of the model's distribution
      to record, with their log-probs at temperature 1.
    prompt_log_probs: whether to record `raw_log_probs`, also of the tokens of
      prompts and of `extend`, except a sequence's first token. Prompts are then
      computed in full, without cached prefixes. If a prompt is computed again
      after a change of weights, its values may be of either version.
    numerics: "exact" for a model with exact numerics
      (`jaxkv.models.Decoder.numerics`). Tokens and log-probs are then
      bit-identical in every slot. Log-probs equal those of a trainer and of
      `score` at the same temperature, unless other fields of `Sampling` or
      `process` change the distribution.
    record_experts: whether to record the experts of each token, also in prompts
      and cached prefixes, for a trainer to replay. Needs a memory with expert
      ids, as from `jaxkv.models.init_kv(record_experts=True)`.
    timeline: X, the number of recent calls of the model that `timeline` can
      show.
    decode_steps: k, the maximum number of calls of the model in one iteration
      of the loop, which schedules, reserves pages and commits once. Calls after
      the first only decode, so there are none while a prompt is incomplete. If
      a sequence ends before the last call, its slot stays idle until then.
      Sampled tokens do not depend on this option.
    vocab_parts: the number of devices that split the logits by vocabulary; 1 if
      they are not split. The sampler then gathers no logits. Sampled tokens
      depend on this option only by the rounding of sums.
      `jaxkv.sharding.generate` sets it with `axes.model`.
    lockstep_axis: the axis of a mesh along which the model communicates, so
      that all shards must call it together, and in the same width; None if
      each shard can call it alone. A shard without work then makes idle calls.
      `jaxkv.sharding.generate` sets it with `axes.experts`.

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
  vocab_parts: int = 1
  lockstep_axis: str | None = None

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name == "lockstep_axis":
        if not isinstance(value, str | None):
          raise TypeError(
            "`RolloutConfig.lockstep_axis` must be the name of an axis or "
            f"None, got {value!r}."
          )
      elif field.name == "numerics":
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
