"""Decoders in plain JAX that read and write through the cache."""

from jaxkv.models import dense as dense
from jaxkv.models.characters import CharacterModel as CharacterModel
from jaxkv.models.characters import character_model as character_model
from jaxkv.models.config import LlamaConfig as LlamaConfig
from jaxkv.models.dense import DenseCache as DenseCache
from jaxkv.models.llama import forward as forward
from jaxkv.models.llama import forward_dense as forward_dense
from jaxkv.models.llama import forward_uncached as forward_uncached
from jaxkv.models.llama import init_params as init_params
from jaxkv.models.vocabulary import Vocabulary as Vocabulary
from jaxkv.models.vocabulary import reference_text as reference_text

__all__ = [
  "CharacterModel",
  "DenseCache",
  "LlamaConfig",
  "Vocabulary",
  "character_model",
  "dense",
  "forward",
  "forward_dense",
  "forward_uncached",
  "init_params",
  "reference_text",
]
