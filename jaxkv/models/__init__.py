"""Decoders in plain JAX that read and write through the cache."""

from jaxkv.models import dense
from jaxkv.models.characters import CharacterModel
from jaxkv.models.characters import character_model
from jaxkv.models.config import LlamaConfig
from jaxkv.models.dense import DenseCache
from jaxkv.models.llama import forward
from jaxkv.models.llama import forward_dense
from jaxkv.models.llama import forward_uncached
from jaxkv.models.llama import init_params
from jaxkv.models.vocabulary import Vocabulary
from jaxkv.models.vocabulary import reference_text

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
