"""Sampling for SkyRL-tx, a Tinker server, on the paged cache.

  from jaxkv.integrations import skyrl_tx

  skyrl_tx.install()  # before the server begins

`JaxBackendImpl.sample` then runs here; all else of the server stays.

| what                                   | how                                 |
|----------------------------------------|-------------------------------------|
| samples of a prompt                    | computed once, pages shared         |
| later prompts that begin with earlier  | their full pages are found          |
| ones, and with earlier answers         |                                     |
| LoRA                                   | each row has its own adapter; pages |
|                                        | belong to an adapter and to what is |
|                                        | in it, so training one adapter      |
|                                        | loses no page of another            |
| temperature, top_k, top_p, seed, limit,| of each row                         |
| stop tokens                            |                                     |
| seeds                                  | equal ones draw equal tokens; these |
|                                        | are not those of SkyRL's own engine |
| stop strings                           | looked for when a sample is there,  |
|                                        | as in SkyRL's own engine            |
| log-probabilities                      | of the model's own logits, before   |
|                                        | temperature and filters, likewise   |
| prompt log-probabilities               | by the model's own forward          |
| models                                 | Llama 3, Qwen3 and its experts      |
| DeepSeek V3 (MLA), expert parallel     | no                                  |
| meshes, several processes              |                                     |

The first call compiles the whole loop, which takes long on a CPU. SkyRL's own
engine compiles again for each length and limit.

Made for and tested with skyrl-tx 0.3.0, which is imported when something here
is called.
"""

from jaxkv._src.integrations.skyrl_models import paged_module_of
from jaxkv._src.integrations.skyrl_sampling import SamplingOptions
from jaxkv._src.integrations.skyrl_sampling import SkyrlSampler
from jaxkv._src.integrations.skyrl_sampling import install
from jaxkv._src.integrations.skyrl_sampling import sample

__all__ = [
  "SamplingOptions",
  "SkyrlSampler",
  "install",
  "paged_module_of",
  "sample",
]
