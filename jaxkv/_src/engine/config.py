"""The static options of a rollout."""

import dataclasses
from typing import Any

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.arrays.arguments import check_bool
from jaxkv._src.arrays.arguments import refuse

_LEAST = {
  "stop_token": -1,
  "max_new_tokens": 0,
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
    num_samples: G, the maximum number of samples of a prompt. Samples that are
      admitted together compute the prompt once, and then fork.
    max_new_tokens: the maximum number of tokens that a sequence generates in a
      turn. `Sampling.max_tokens` can lower it, and `extend` can replace it. If
      it is 0, sequences sample nothing, cannot be extended, and end when the
      log-probs of their given tokens are recorded, see
      `Requests.log_probs_from`.
    max_length: W, the maximum length of a sequence, including its prompt and
      all turns; 0 for the number of prompt columns plus `max_new_tokens`.
    stop_token: a token that ends each sequence that samples it; -1 for none.
      `Sampling` can add stop tokens for each sequence.
    prefill_chunk: the maximum number of prompt tokens in a step, in addition to
      one for each slot that does not decode.
    admissions: R, the maximum number of sequences that are admitted in a step.
    window: the number of waiting sequences that a step considers. At equal
      priority, the one with the longest cached prefix is admitted first.
    max_overtaken: the maximum number of later sequences that are admitted
      before a waiting sequence. A later sequence of equal priority overtakes if
      more of its prompt is cached or shared. At any priority, it overtakes
      while another sequence computes the next page of the waiting one, or if
      the free pages suffice only for the later one.
    draft_tokens: K, the maximum number of tokens drafted for a sequence in a
      step; 0 for no speculation. Each draft is verified, so speculation does
      not change the sampled tokens.
    draft_match: n, the length of an n-gram match. The last n tokens of a
      sequence match their rightmost other occurrence in its prompt and all
      samples of the prompt. The tokens that followed there are its drafts.
    draft_columns: the maximum number of draft tokens of all slots in a step.
    raw_log_probs: whether to record the log-prob of each sampled token under
      the model's distribution, before `Sampling` and `process` change it. For
      given tokens, see `Requests.log_probs_from`.
    unfiltered_log_probs: whether to record the log-prob of each sampled token
      at its temperature, after penalties and `process`, before `min_p`, `top_k`
      and `top_p`. The softmax is over all tokens, as `grpo_loss` requires.
    entropy: whether to record the entropy of the model's distribution in nats,
      at temperature 1.
    top_log_probs: the number of most likely tokens of the model's distribution
      to record, with their log-probs at temperature 1.
    record_experts: whether to record the experts of each token, also in prompts
      and cached prefixes, for a trainer to replay. Needs a memory with expert
      ids, as from `jaxkv.models.init_kv(record_experts=True)`.
    timeline: X, the number of recent calls of the model that `timeline` can
      show.
    decode_steps: the maximum number of calls of the model in one iteration of
      the loop, which schedules, reserves pages and commits once. Calls after
      the first only decode. They are skipped while a prompt is incomplete or a
      sequence lacks a page. If a sequence ends early, its slot is idle for the
      rest of the iteration. Sampled tokens do not depend on this option.
    vocab_parts: the number of devices over which the logits are split by
      vocabulary; 1 for no split. Sampling then does not gather the logits. The
      option changes sampled tokens only through the rounding of sums.
      `jaxkv.sharding.generate` sets it to the size of `axes.model`.
    lockstep_axis: the mesh axis along which the model communicates. All shards
      then call the model together, with equal shapes; a shard without work
      makes idle calls. A shard that reaches `Until.prompts` or
      `Until.sequences` continues until all shards can stop. None if shards call
      the model independently. `sharding.generate` sets it to `axes.experts`.

  Raises:
    TypeError: a number, a bool or `lockstep_axis` has the wrong type.
    ValueError: a number is out of range, or `draft_tokens` is positive and
      `decode_steps` is not 1.
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


def check_config(config: Any) -> None:
  """Raises TypeError unless `config` is a RolloutConfig."""
  if not isinstance(config, RolloutConfig):
    hint = "make one with jaxkv.rollout.RolloutConfig(...)"
    refuse(TypeError, "config", "a RolloutConfig", config, hint)
