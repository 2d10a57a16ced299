"""The jitted generation loop over the cache, generic over a model function.

An `Engine` holds a model, a cache and compiled programs, and takes prompts:

  engine = rollout.Engine(params, model, cache)
  out = engine.generate(prompts, max_new_tokens=64)

It is made of functions of a rollout's state, which can be called inside `jit`.
A first loop needs six names:

| name | purpose |
|---|---|
| `RolloutConfig` | static options |
| `Sampling` | settings of each sequence |
| `Requests` | prompts and their settings, for `init` and `submit` |
| `init` | makes the state of a rollout of prompts |
| `generate` | runs the loop until all sequences have ended, or to a limit |
| `generated` | returns tokens, masks and log-probs |

Engines and texts:

| name | purpose |
|---|---|
| `Engine` | a rollout with its weights and programs |
| `generate_texts` | continues a list of texts in one call |
| `Samples` | the result of `Engine.generate` and `generate_texts` |
| `PromptSamples`, `NewTokens` | the results of `Engine.stream` |
| `Room` | the result of `Engine.room` |

Prompts that come and go, and agents:

| name | purpose |
|---|---|
| `submit`, `harvest` | add prompts, and remove finished sequences |
| `Until`, `is_done` | a limit for `generate`; reports whether all have ended |
| `extend` | appends tokens of a tool or a user, and resumes sequences |
| `branch` | copies sequences, which continue independently |
| `abort`, `requeue` | end sequences, or put running ones back into the queue |
| `export`, `import_sequences` | move sequences to another rollout |
| `Exported` | sequences between `export` and `import_sequences` |

Training:

| name | purpose |
|---|---|
| `grouped` | returns samples in groups of equal prompts for a loss |
| `score` | computes log-probs of given completions |
| `Requests.log_probs_from` | records log-probs of prompts and `extend` |
| `update_weights` | starts a new version of the weights |
| `Generated`, `Harvested`, `Grouped`, `Scored` | results |

Settings and functions of yours:

| name | purpose |
|---|---|
| `stop_strings`, `StopStrings` | strings that end a sequence |
| `LogitBias` | biases of tokens, a field of `Sampling` |
| `jaxkv.guides.guide` | a `Process` that restricts texts to a grammar |
| `Model`, `Process`, `Draft`, `Rows` | your functions, and their arguments |
| `check_model` | compares a model of yours with its pass without a cache |

The state, and how to look at it:

| name | purpose |
|---|---|
| `RolloutState` | the state: a queue, slots and memory |
| `Slots`, `Memory`, `Records`, `Counters` | parts of `RolloutState` |
| `SequenceStatus`, `Finish` | a sequence's status, and why it ended |
| `timeline` | returns the work of each slot in recent steps |
| `Timeline`, `Span` | the result of `timeline` |
| `check`, `check_invariants` | test the state's invariants |

`submit`, `harvest`, `extend`, `branch`, `abort`, `requeue`, `export` and
`import_sequences` return the new state and an outcome with a `jaxkv.Status` for
each row. A row that fails changes nothing. `score` returns a status for each
prompt. `generate` and `update_weights` return the state. All of these functions
are pure and can be called inside `jit`. Unless a function says otherwise, an
argument raises TypeError if its type or dtype is wrong, and ValueError if its
shape is wrong.

`generate` compiles its loop for about 15 s, once for equal shapes, options and
functions. A function made anew for each call, such as a lambda, is another one;
a `functools.partial` with equal arguments is not. Call `generate` inside `jit`
with the state donated, so that the K/V memory is updated in place.

A cache can have several pools of pages, see `jaxkv.models.cache_config`. A
sequence is admitted, and continues, only while all pools have pages for it.

`help(jaxkv.sharding)` explains rollouts on several devices, and saving.
"""

from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.counters import Counters
from jaxkv._src.engine.generate import Until
from jaxkv._src.engine.generate import generate
from jaxkv._src.engine.hooks import Draft
from jaxkv._src.engine.hooks import Model
from jaxkv._src.engine.hooks import Process
from jaxkv._src.engine.hooks import Rows
from jaxkv._src.engine.invariants import check
from jaxkv._src.engine.invariants import check_invariants
from jaxkv._src.engine.memory import Memory
from jaxkv._src.engine.queue.queue import Finish
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.requests import Requests
from jaxkv._src.engine.results.generated import Generated
from jaxkv._src.engine.results.generated import Harvested
from jaxkv._src.engine.results.generated import generated
from jaxkv._src.engine.results.generated import harvest
from jaxkv._src.engine.results.grouped import Grouped
from jaxkv._src.engine.results.grouped import grouped
from jaxkv._src.engine.results.timeline import Span
from jaxkv._src.engine.results.timeline import Timeline
from jaxkv._src.engine.results.timeline import timeline
from jaxkv._src.engine.score import Scored
from jaxkv._src.engine.score import score
from jaxkv._src.engine.slots import Slots
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import init
from jaxkv._src.engine.state import is_done
from jaxkv._src.engine.verbs.abort import abort
from jaxkv._src.engine.verbs.abort import requeue
from jaxkv._src.engine.verbs.branch import branch
from jaxkv._src.engine.verbs.extend import extend
from jaxkv._src.engine.verbs.submit import submit
from jaxkv._src.engine.verbs.update_weights import update_weights
from jaxkv._src.guides.stop_strings import StopStrings
from jaxkv._src.guides.stop_strings import stop_strings
from jaxkv._src.sampling.settings import LogitBias
from jaxkv._src.sampling.settings import Sampling
from jaxkv._src.sampling.statistics import Records
from jaxkv._src.service.engine import Engine
from jaxkv._src.service.model_check import check_model
from jaxkv._src.service.samples import NewTokens
from jaxkv._src.service.samples import PromptSamples
from jaxkv._src.service.samples import Room
from jaxkv._src.service.samples import Samples
from jaxkv._src.service.texts import generate_texts
from jaxkv._src.transfer.export import export
from jaxkv._src.transfer.exported import Exported
from jaxkv._src.transfer.import_sequences import import_sequences

__all__ = [
  "Counters",
  "Draft",
  "Engine",
  "Exported",
  "Finish",
  "Generated",
  "Grouped",
  "Harvested",
  "LogitBias",
  "Memory",
  "Model",
  "NewTokens",
  "Process",
  "PromptSamples",
  "Records",
  "Requests",
  "RolloutConfig",
  "RolloutState",
  "Room",
  "Rows",
  "Samples",
  "Sampling",
  "Scored",
  "SequenceStatus",
  "Slots",
  "Span",
  "StopStrings",
  "Timeline",
  "Until",
  "abort",
  "branch",
  "check",
  "check_invariants",
  "check_model",
  "export",
  "extend",
  "generate",
  "generate_texts",
  "generated",
  "grouped",
  "harvest",
  "import_sequences",
  "init",
  "is_done",
  "requeue",
  "score",
  "stop_strings",
  "submit",
  "timeline",
  "update_weights",
]
