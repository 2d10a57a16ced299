"""Decoders in plain JAX that read and write through the cache."""

from jaxkv._src.models import dense
from jaxkv._src.models.characters import CharacterModel
from jaxkv._src.models.characters import NotKeptWarning
from jaxkv._src.models.characters import character_model
from jaxkv._src.models.config import LlamaConfig
from jaxkv._src.models.dense import DenseCache
from jaxkv._src.models.llama import forward
from jaxkv._src.models.llama import forward_dense
from jaxkv._src.models.llama import forward_uncached
from jaxkv._src.models.llama import init_params
from jaxkv._src.models.vocabulary import Vocabulary
from jaxkv._src.models.vocabulary import reference_text

__all__ = [
  "CharacterModel",
  "DenseCache",
  "LlamaConfig",
  "NotKeptWarning",
  "Vocabulary",
  "character_model",
  "dense",
  "forward",
  "forward_dense",
  "forward_uncached",
  "init_params",
  "reference_text",
]
