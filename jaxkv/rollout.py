"""The jitted generation loop over the cache, generic over a model function.

| to                        | use                                              |
|---------------------------|--------------------------------------------------|
| begin, run, read          | `init`, `generate`, `Until`, `generated`         |
| draw in another way       | `Sampling`, `stop_strings`                       |
| constrain what is drawn   | `guide` of a `regex` or `json_schema`; `Process`|
| add prompts, take answers | `submit`, `harvest`                              |
| go on after a tool        | `extend`                                         |
| stop or interrupt         | `abort`, `requeue`                               |
| train in between          | `grouped`, `update_weights`; `init(version=)`    |
| replay experts            | `RolloutConfig.experts`, `Generated.experts`     |
| guess tokens              | `RolloutConfig.draft_tokens`, `Draft`            |
| have a trainer's numbers  | `RolloutConfig.numerics`                         |
| look                      | `timeline`, `Counters`, `check`                  |
| score given answers       | `score`, `ScoreState`                            |
| use many devices, or save | `help(jaxkv.rollout.devices)`                    |

`submit`, `harvest`, `extend`, `abort` and `requeue` return the new state and an
outcome, which has a `jaxkv.Status` for each row; a row that fails changes
nothing. So does `score`, with one for each prompt. `generate` and
`update_weights` return the state. All are pure, and can be part of a jitted
program.
"""

from jaxkv._src.guides.grammars import Grammar
from jaxkv._src.guides.guide import Guide
from jaxkv._src.guides.guide import GuideState
from jaxkv._src.guides.guide import guide
from jaxkv._src.guides.regex import regex
from jaxkv._src.guides.schema import json_schema
from jaxkv._src.guides.stop_strings import StopStrings
from jaxkv._src.guides.stop_strings import stop_strings
from jaxkv._src.guides.token_bytes import TokenBytes
from jaxkv._src.guides.token_bytes import token_bytes
from jaxkv._src.rollout import devices
from jaxkv._src.rollout.config import RolloutConfig
from jaxkv._src.rollout.drafts import Draft
from jaxkv._src.rollout.grouped import Grouped
from jaxkv._src.rollout.grouped import grouped
from jaxkv._src.rollout.invariants import check
from jaxkv._src.rollout.invariants import check_invariants
from jaxkv._src.rollout.loop import generate
from jaxkv._src.rollout.model import Model
from jaxkv._src.rollout.model import all_logits
from jaxkv._src.rollout.rows import Process
from jaxkv._src.rollout.rows import Rows
from jaxkv._src.rollout.scoring.score import score
from jaxkv._src.rollout.scoring.scored import Scored
from jaxkv._src.rollout.scoring.scored import ScoreState
from jaxkv._src.rollout.sequences import Finish
from jaxkv._src.rollout.sequences import Records
from jaxkv._src.rollout.sequences import Sequences
from jaxkv._src.rollout.sequences import SequenceStatus
from jaxkv._src.rollout.state import Counters
from jaxkv._src.rollout.state import RolloutState
from jaxkv._src.rollout.state import init
from jaxkv._src.rollout.state import is_done
from jaxkv._src.rollout.timeline import Span
from jaxkv._src.rollout.timeline import Timeline
from jaxkv._src.rollout.timeline import timeline
from jaxkv._src.rollout.until import Until
from jaxkv._src.rollout.verbs.abort import abort
from jaxkv._src.rollout.verbs.abort import requeue
from jaxkv._src.rollout.verbs.extend import extend
from jaxkv._src.rollout.verbs.harvest import Generated
from jaxkv._src.rollout.verbs.harvest import Harvested
from jaxkv._src.rollout.verbs.harvest import generated
from jaxkv._src.rollout.verbs.harvest import harvest
from jaxkv._src.rollout.verbs.submit import Submitted
from jaxkv._src.rollout.verbs.submit import submit
from jaxkv._src.rollout.verbs.update_weights import update_weights
from jaxkv._src.sampling.settings import LogitBias
from jaxkv._src.sampling.settings import Sampling

__all__ = [
  "Counters",
  "Draft",
  "Finish",
  "Generated",
  "Grammar",
  "Grouped",
  "Guide",
  "GuideState",
  "Harvested",
  "LogitBias",
  "Model",
  "Process",
  "Records",
  "RolloutConfig",
  "RolloutState",
  "Rows",
  "Sampling",
  "ScoreState",
  "Scored",
  "SequenceStatus",
  "Sequences",
  "Span",
  "StopStrings",
  "Submitted",
  "Timeline",
  "TokenBytes",
  "Until",
  "abort",
  "all_logits",
  "check",
  "check_invariants",
  "devices",
  "extend",
  "generate",
  "generated",
  "grouped",
  "guide",
  "harvest",
  "init",
  "is_done",
  "json_schema",
  "regex",
  "requeue",
  "score",
  "stop_strings",
  "submit",
  "timeline",
  "token_bytes",
  "update_weights",
]
