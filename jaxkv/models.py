"""Decoders in plain JAX that read and write through the cache.

Windows. With `LlamaConfig.windows`, layers differ in their window and rotary
base. `forward` then takes a view for each layer group of the cache. A decoder
with five local layers for each global one:

  config = LlamaConfig(
    num_layers=12, windows=(512,) * 5 + (None,),
    rope_base=(1e4,) * 5 + (1e6,), ...
  )
  cache = jaxkv.init(jaxkv.CacheConfig(groups=config.groups, ...))
  kv = jaxkv.kv.init(
    cache.config, num_layers=config.num_memory_layers, ...
  )

A step, of a prompt's chunk or of decoding:

  cache, _ = jaxkv.recycle(cache)  # gives back what windows left behind
  cache, out = jaxkv.allocate(cache, counts)
  views = tuple(
    jaxkv.view(cache, group=group, counts=counts)
    for group in range(len(config.groups))
  )
  logits, kv = forward(params, tokens, positions, kv, views, config=config)
  cache, _ = jaxkv.commit(cache, tokens, counts)
"""

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
