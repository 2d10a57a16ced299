"""The jitted generation loop over the cache, generic over a model function.

Functions of a rollout's state:

| function | purpose |
|---|---|
| `init` | makes the state of a rollout of prompts |
| `generate` | runs the loop until all sequences have ended, or to a limit |
| `is_done` | reports whether all sequences have ended |
| `submit`, `harvest` | add prompts, and remove finished sequences |
| `extend` | appends tokens of a tool or a user and resumes sequences |
| `abort`, `requeue` | end sequences, or put running ones back into the queue |
| `update_weights` | starts a new version of the weights |
| `generated`, `grouped` | return tokens, masks and log-probs for a loss |
| `score` | computes log-probs of given completions |
| `timeline` | returns the work of each slot in recent steps |
| `check`, `check_invariants` | test the state's invariants |

Functions that make an argument:

| function | result |
|---|---|
| `all_logits` | a `Model`, from a function that returns logits of all tokens |
| `regex`, `json_schema` | a `Grammar` |
| `token_bytes` | the bytes of each token, for guides and stop strings |
| `guide` | a `Guide`, which is a `Process` that restricts texts to a grammar |
| `stop_strings` | strings that end a sequence |

Types:

| type | purpose |
|---|---|
| `RolloutConfig` | static options |
| `Sampling`, `LogitBias` | settings of each sequence |
| `Model`, `Process`, `Draft`, `Rows` | your functions, and their arguments |
| `Guide`, `GuideState`, `Grammar` | constrained generation |
| `StopStrings`, `TokenBytes` | arguments of `init` |
| `Until` | a limit for `generate` |
| `RolloutState`, `Sequences`, `Records`, `Counters` | the state and its parts |
| `SequenceStatus`, `Finish` | the status of a sequence; the reason of its end |
| `Submitted`, `Harvested`, `Generated`, `Grouped` | results |
| `Scored`, `ScoreState` | the result of `score`, and a cache for such calls |
| `Timeline`, `Span` | the result of `timeline` |

`submit`, `harvest`, `extend`, `abort` and `requeue` return the new state and an
outcome with a `jaxkv.Status` for each row. A row that fails changes nothing.
`score` returns a status for each prompt. `generate` and `update_weights` return
the state. All functions are pure and can be called inside `jit`.

Call `generate` inside `jit`, with the state donated. Outside of `jit` it
compiles again at every call. The first call compiles for about 15 s. With jax's
persistent compilation cache, `jax.config.update("jax_compilation_cache_dir",
FOLDER)`, it takes about 2 s in a later process.

`help(jaxkv.rollout.devices)` explains rollouts on several devices, and saving.
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
