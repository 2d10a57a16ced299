"""Rollouts on several workers, which may be added, removed, or fail.

| name | purpose |
|---|---|
| `Pool` | runs a stream of prompts on workers |
| `Worker`, `Room` | the interface of a worker, and its room for prompts |
| `PromptSamples` | the result of a prompt: all of its samples |

A `jaxkv.rollout.Engine` is a worker in this process, and
`jaxkv.integrations.ray` has engines on other machines. A pool starts threads,
but no processes, and calls no model itself.
"""

from jaxkv._src.service.samples import PromptSamples
from jaxkv._src.service.samples import Room
from jaxkv._src.workers.pool import Pool
from jaxkv._src.workers.worker import Worker

__all__ = ["Pool", "PromptSamples", "Room", "Worker"]
