"""The jitted generation loop over the cache, generic over a model function."""

from jaxkv._src.rollout.config import RolloutConfig
from jaxkv._src.rollout.dense import generate_dense
from jaxkv._src.rollout.loop import Model
from jaxkv._src.rollout.loop import all_logits
from jaxkv._src.rollout.loop import generate
from jaxkv._src.rollout.sampling import sample
from jaxkv._src.rollout.sequences import DONE
from jaxkv._src.rollout.sequences import FAILED
from jaxkv._src.rollout.sequences import RUNNING
from jaxkv._src.rollout.sequences import WAITING
from jaxkv._src.rollout.sequences import Sequences
from jaxkv._src.rollout.sequences import from_prompts
from jaxkv._src.rollout.state import Counters
from jaxkv._src.rollout.state import RolloutState
from jaxkv._src.rollout.state import init
from jaxkv._src.rollout.state import is_done
from jaxkv._src.rollout.timeline import Span
from jaxkv._src.rollout.timeline import Timeline
from jaxkv._src.rollout.timeline import timeline

__all__ = [
  "DONE",
  "FAILED",
  "RUNNING",
  "WAITING",
  "Counters",
  "Model",
  "RolloutConfig",
  "RolloutState",
  "Sequences",
  "Span",
  "Timeline",
  "all_logits",
  "from_prompts",
  "generate",
  "generate_dense",
  "init",
  "is_done",
  "sample",
  "timeline",
]
