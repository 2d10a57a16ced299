"""The static options of a rollout."""

import dataclasses

from jaxkv._src.rollout.arguments import check_count


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
  """Everything about a rollout that is fixed when it is compiled.

  Attributes:
    num_samples: sequences generated for each prompt. Samples that are admitted
      together prefill the prompt once and fork.
    max_new_tokens: tokens after which a sequence ends without a stop token.
    stop_token: the token that ends a sequence; -1 for none.
    prefill_chunk: C, prompt tokens of a row that one model call takes.
    admissions: R, the most sequences admitted in one step.

  Raises:
    TypeError: a field is not an int.
    ValueError: a number is out of range.
  """

  num_samples: int = 1
  max_new_tokens: int = 128
  stop_token: int = -1
  prefill_chunk: int = 64
  admissions: int = 16

  def __post_init__(self):
    for field in dataclasses.fields(self):
      least = -1 if field.name == "stop_token" else 1
      check_count(field.name, getattr(self, field.name), least)
