"""Rollouts on several workers, which may be added, removed, or fail.

| name | purpose |
|---|---|
| `Pool` | runs a stream of prompts on workers |
| `Worker`, `Room` | the interface of a worker, and its room for prompts |
| `PromptSamples` | the result of a prompt: all of its samples |
| `LocalWorker` | a worker in this process |

`jaxkv.integrations.ray` has workers on other machines. A pool starts threads,
but no processes, and calls no model itself.
"""

from jaxkv._src.workers.local_worker import LocalWorker
from jaxkv._src.workers.pool import Pool
from jaxkv._src.workers.worker import PromptSamples
from jaxkv._src.workers.worker import Room
from jaxkv._src.workers.worker import Worker

__all__ = ["LocalWorker", "Pool", "PromptSamples", "Room", "Worker"]
