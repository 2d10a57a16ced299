"""Samples for SkyRL-tx, a Tinker server, on the paged cache.

  from jaxkv.integrations import skyrl_tx

  skyrl_tx.install()  # before the server starts

After this, `JaxBackendImpl.sample` samples with jaxkv. The rest of the server
does not change.

| feature                                | behavior                            |
|----------------------------------------|-------------------------------------|
| samples of a prompt                    | prompt computed once, pages shared  |
| prompts that begin with earlier        | hit the cached full pages           |
| prompts or answers                     |                                     |
| LoRA                                   | an adapter for each row; pages are  |
|                                        | keyed by adapter and its weights,   |
|                                        | so training one adapter keeps the   |
|                                        | pages of the others                 |
| temperature, top_k, top_p, seed, limit,| set for each row                    |
| stop tokens                            |                                     |
| seeds                                  | equal seeds draw equal tokens, but  |
|                                        | not those of SkyRL's engine         |
| stop strings                           | cut when a sample is complete, as   |
|                                        | in SkyRL's engine                   |
| log-probs                              | of the model's logits before        |
|                                        | temperature and filters, as in SkyRL|
| prompt log-probs                       | from the model's own forward pass   |
| models                                 | Llama 3; Qwen3, also with experts   |
| DeepSeek V3 (MLA), expert parallel     | not supported                       |
| meshes, several processes              |                                     |

The first call compiles the whole loop, which takes long on a CPU. But SkyRL's
own engine compiles again for each length and limit.

Tested with skyrl-tx 0.3.0, which the first call imports.
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
