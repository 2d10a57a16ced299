"""A rollout engine on the paged cache for tunix's GRPO and agent trainers.

  cluster_config = rl_cluster.ClusterConfig(
    rollout_engine=JaxkvRollout, ...  # was "vanilla"
  )

Pass options as `functools.partial(JaxkvRollout, page_size=8)`.

| feature                                | behavior                            |
|----------------------------------------|-------------------------------------|
| samples of a prompt                    | prompt computed once, pages shared  |
| prompts that begin with earlier        | hit the cached full pages           |
| prompts or answers                     |                                     |
| new weights                            | drop all cached pages               |
| weights moved to the host and back     | keep the cached pages; between      |
|                                        | calls, no other copy is kept        |
| other lengths, limits, temperatures    | compile nothing again               |
| another number of prompts              | compiles at most one small program  |
| the first `top_k` or `top_p`, a longer | compile once more                   |
| `kv_cache_size`, more than 8           |                                     |
| `eos_tokens`                           |                                     |
| more prompts than the queue holds      | enter as others end                 |
| calls from several threads             | form one batch                      |
| `return_logprobs`                      | log-probs of logits / temperature,  |
|                                        | before `top_k` and `top_p`, as in   |
|                                        | the trainer                         |
| `seed=None`                            | different samples in each call      |
| `top_p=None`, or a temperature of 0    | greedy                              |
| the pad token                          | never drawn, unless it ends answers |
| LoRA                                   | supported                           |
| logits, beams, images, forbidden tokens| not supported                       |
| models                                 | Llama 3, Qwen2, Qwen3, Gemma 3;     |
|                                        | others with `decoder`               |
| a mesh                                 | state on all devices, pages sharded |
|                                        | by heads over "tp", if divisible    |

The first `generate` compiles the whole loop. On a CPU this takes 4.5 times as
long as the compilation of tunix's vanilla engine for 2 layers, and 8.6 times
for 24 layers. But the vanilla engine compiles again for each new limit.

Tested with google-tunix 0.1.7, which the first access of `JaxkvRollout`
imports.
"""

import functools
from typing import Any

from jaxkv._src.integrations import packages
from jaxkv._src.integrations.tunix_models import paged_module_of
from jaxkv._src.integrations.tunix_rollout import TunixRollout

__all__ = ["TunixRollout", "paged_module_of"]


@functools.cache
def _engine() -> type:
  base = packages.of_tunix("tunix.rl.rollout.base_rollout")
  body = {"__doc__": TunixRollout.__init__.__doc__, "__module__": __name__}
  return type("JaxkvRollout", (TunixRollout, base.BaseRollout), body)


def __getattr__(name: str) -> Any:
  if name == "JaxkvRollout":
    return _engine()
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
