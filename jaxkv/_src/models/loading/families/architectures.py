"""The table of supported architectures."""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.families import deepseek
from jaxkv._src.models.loading.families import gemma
from jaxkv._src.models.loading.families import gpt_oss
from jaxkv._src.models.loading.families import llama
from jaxkv._src.models.loading.families import qwen3_next
from jaxkv._src.models.loading.weight_maps import WeightMap


class Family(NamedTuple):
  """A model family.

  Attributes:
    weight_map: returns the weight map for a config.json and a dtype.
    max_length: the value of a missing `max_position_embeddings`, as in
      transformers.
  """

  weight_map: Callable[[ConfigFile, Any], WeightMap]
  max_length: int


_FAMILIES: dict[str, Family] = {
  "DeepseekV2ForCausalLM": Family(deepseek.deepseek_v2, 2048),
  "DeepseekV3ForCausalLM": Family(deepseek.deepseek_v3, 4096),
  "Gemma2ForCausalLM": Family(gemma.gemma2, 8192),
  "Gemma3ForCausalLM": Family(gemma.gemma3, 131_072),
  "Gemma3ForConditionalGeneration": Family(gemma.gemma3, 131_072),
  "GptOssForCausalLM": Family(gpt_oss.gpt_oss, 131_072),
  "LlamaForCausalLM": Family(llama.llama, 2048),
  "MistralForCausalLM": Family(llama.mistral, 131_072),
  "MixtralForCausalLM": Family(llama.mixtral, 131_072),
  "Qwen2ForCausalLM": Family(llama.qwen2, 32_768),
  "Qwen3ForCausalLM": Family(llama.qwen3, 32_768),
  "Qwen3MoeForCausalLM": Family(llama.qwen3_moe, 32_768),
  "Qwen3NextForCausalLM": Family(qwen3_next.qwen3_next, 32_768),
}


def family_of(architectures: Any, file: str) -> Family:
  """Returns the family of the first supported name in `architectures`."""
  names = architectures if isinstance(architectures, list) else []
  for name in names:
    if name in _FAMILIES:
      return _FAMILIES[name]
  raise ValueError(
    f"`architectures` in {file} must name one of {', '.join(_FAMILIES)}, got "
    f"{architectures!r}."
  )
