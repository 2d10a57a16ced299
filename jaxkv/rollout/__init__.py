"""The jitted generation loop over the cache, generic over a model function."""

from jaxkv.rollout.dense import run_dense as run_dense
from jaxkv.rollout.loop import Model as Model
from jaxkv.rollout.loop import run as run
from jaxkv.rollout.options import RolloutConfig as RolloutConfig
from jaxkv.rollout.sampling import sample as sample
from jaxkv.rollout.sequences import DONE as DONE
from jaxkv.rollout.sequences import RUNNING as RUNNING
from jaxkv.rollout.sequences import WAITING as WAITING
from jaxkv.rollout.sequences import Sequences as Sequences
from jaxkv.rollout.sequences import from_prompts as from_prompts
from jaxkv.rollout.state import Counters as Counters
from jaxkv.rollout.state import RolloutState as RolloutState
from jaxkv.rollout.state import init as init
from jaxkv.rollout.state import is_done as is_done
