"""The table of supported architectures."""

from collections.abc import Callable
from typing import Any

from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.families import deepseek
from jaxkv._src.models.loading.families import gemma
from jaxkv._src.models.loading.families import gpt_oss
from jaxkv._src.models.loading.families import llama
from jaxkv._src.models.loading.families import qwen3_next
from jaxkv._src.models.loading.weight_maps import WeightMap

Family = Callable[[ConfigFile, Any], WeightMap]

_FAMILIES: dict[str, Family] = {
  "DeepseekV2ForCausalLM": deepseek.deepseek_v2,
  "DeepseekV3ForCausalLM": deepseek.deepseek_v3,
  "Gemma2ForCausalLM": gemma.gemma2,
  "Gemma3ForCausalLM": gemma.gemma3,
  "Gemma3ForConditionalGeneration": gemma.gemma3,
  "GptOssForCausalLM": gpt_oss.gpt_oss,
  "LlamaForCausalLM": llama.llama,
  "MistralForCausalLM": llama.mistral,
  "MixtralForCausalLM": llama.mixtral,
  "Qwen2ForCausalLM": llama.qwen2,
  "Qwen3ForCausalLM": llama.qwen3,
  "Qwen3MoeForCausalLM": llama.qwen3_moe,
  "Qwen3NextForCausalLM": qwen3_next.qwen3_next,
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
