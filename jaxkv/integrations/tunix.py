"""An engine for tunix's trainers: GRPO and agents on the paged cache.

  cluster_config = rl_cluster.ClusterConfig(
    rollout_engine=JaxkvRollout, ...  # was "vanilla"
  )

Options go in with `functools.partial(JaxkvRollout, page_size=8)`.

| what                                   | how                                 |
|----------------------------------------|-------------------------------------|
| samples of a prompt                    | computed once, pages shared         |
| later prompts that begin with earlier  | their full pages are found          |
| ones, and with earlier answers         |                                     |
| new weights                            | no page of the old ones is found    |
| weights moved to the host and back     | pages are still found               |
| other lengths, limits, temperatures    | nothing is compiled again           |
| the first `top_k` or `top_p`, the first| compiled once more                  |
| `return_logprobs`, a longer            |                                     |
| `kv_cache_size`                        |                                     |
| more prompts than in the first call    | served in turns                     |
| calls from several threads             | gathered to a batch                 |
| `return_logprobs`                      | of logits / temperature, before     |
|                                        | `top_k` and `top_p`, as the trainer |
|                                        | computes them                       |
| `seed=None`                            | other draws in each call            |
| `top_p=None`, or a temperature of 0    | greedy                              |
| the pad token                          | never drawn, unless it ends answers |
| LoRA                                   | yes                                 |
| logits, beams, images, forbidden tokens| no                                  |
| models                                 | Llama 3, Qwen2, Qwen3, Gemma 3;     |
|                                        | others with `decoder`               |
| a mesh                                 | state on all of its devices, pages  |
|                                        | split by heads over its axis "tp"   |

The first `generate` compiles the whole loop, and takes longer than that of the
vanilla engine: on a CPU 4.5 times as long for two layers, 8.6 times for 24. The
vanilla engine compiles again for each new limit.

Made for and tested with google-tunix 0.1.7, which is imported when
`JaxkvRollout` is first looked up here.
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
