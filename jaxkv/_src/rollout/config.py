"""The static options of a rollout."""

import dataclasses

from jaxkv._src.rollout.arguments import check_count

_LEAST = {"stop_token": -1, "max_overtaken": 0, "timeline": 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
  """Everything about a rollout that is fixed when it is compiled.

  Attributes:
    num_samples: sequences generated for each prompt. Samples that are admitted
      together prefill the prompt once and fork.
    max_new_tokens: tokens after which a sequence ends without a stop token.
    stop_token: the token that ends a sequence; -1 for none.
    prefill_chunk: the most prompt tokens that a step computes besides those
      that take the places of slots which do not decode.
    admissions: R, the most sequences that enter in one step.
    window: waiting sequences among which those with the longest cached prefix
      enter first.
    max_overtaken: how many later sequences may enter before a waiting one.
    timeline: the number of last steps of which the state keeps what each slot
      did, for `timeline`.

  Raises:
    TypeError: a field is not an int.
    ValueError: a number is out of range.
  """

  num_samples: int = 1
  max_new_tokens: int = 128
  stop_token: int = -1
  prefill_chunk: int = 256
  admissions: int = 16
  window: int = 32
  max_overtaken: int = 32
  timeline: int = 0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      least = _LEAST.get(field.name, 1)
      check_count(field.name, getattr(self, field.name), least)
