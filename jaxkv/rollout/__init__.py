"""The jitted generation loop over the cache, generic over a model function."""

from jaxkv.rollout.dense import run_dense
from jaxkv.rollout.loop import Model
from jaxkv.rollout.loop import run
from jaxkv.rollout.options import RolloutConfig
from jaxkv.rollout.sampling import sample
from jaxkv.rollout.sequences import DONE
from jaxkv.rollout.sequences import FAILED
from jaxkv.rollout.sequences import RUNNING
from jaxkv.rollout.sequences import WAITING
from jaxkv.rollout.sequences import Sequences
from jaxkv.rollout.sequences import from_prompts
from jaxkv.rollout.state import Counters
from jaxkv.rollout.state import RolloutState
from jaxkv.rollout.state import init
from jaxkv.rollout.state import is_done

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
  "from_prompts",
  "init",
  "is_done",
  "run",
  "run_dense",
  "sample",
]
