"""Decoders in plain JAX that read and write through the cache.

A `Decoder` is data: its layers, from first to last. Each `Layer` has attention
(`Attention`, `LatentAttention`, `DeltaNet`) and an MLP (`Mlp`, `Experts`). One
function runs all of them. `llama` describes the plainest.

| what it may have                                | where                    |
|-------------------------------------------------|--------------------------|
| windows, soft caps, sinks, biases, gates, norms | `Attention`              |
| rotary positions, and how they are stretched    | `Rope`, `YarnScaling` .. |
| latents in place of keys and values             | `LatentAttention`        |
| experts, chosen in groups, and shared ones      | `Experts`                |
| norms after attention and MLP                   | `Layer`                  |
| offsets of norms, scaled embeddings             | `Decoder`                |

Layers differ in what a cache keeps for them: a window, or everything. Their
pattern gives the groups of the cache; `forward` takes a view for each. A
decoder with five local layers for each global one:

  config = llama(
    num_layers=12, windows=(512,) * 5 + (None,),
    rope_base=(1e4,) * 5 + (1e6,), ...
  )
  cache = jaxkv.init(jaxkv.CacheConfig(groups=cache_groups(config), ...))
  kv = init_kv(config, cache.config)

A step, of a prompt's chunk or of decoding:

  cache, _ = jaxkv.recycle(cache)  # gives back what windows left behind
  cache, out = jaxkv.allocate(cache, counts)
  views = tuple(
    jaxkv.view(cache, group=group, counts=counts)
    for group in range(len(cache.config.groups))
  )
  logits, kv = forward(params, tokens, positions, kv, views, config=config)
  cache, _ = jaxkv.commit(cache, tokens, counts)

Exact numerics. With `dataclasses.replace(config, numerics="exact")` a token has
the same logits and log-probs, bit for bit, in `forward` and in a trainer, so a
policy's ratio is exactly 1 where nothing has changed. See `Decoder`.

Which experts tokens used. With `init_kv(experts=True)` pages keep them beside
keys and values, so those of a cached prefix are known, too. A trainer then uses
the same ones: `forward_uncached(experts=)`.

To train on samples of prompts, `grouped_log_probs` gives the log-probs of all
of them, and computes each prompt once, forward and backward:

  log_probs = grouped_log_probs(
    params, prompts, prompt_lengths, completions, lengths, config=config
  )
"""

from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import DeltaNet
from jaxkv._src.models.decoder.description import Experts
from jaxkv._src.models.decoder.description import LatentAttention
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.decoder.description import Mlp
from jaxkv._src.models.decoder.forward import forward
from jaxkv._src.models.decoder.forward import forward_uncached
from jaxkv._src.models.decoder.grouped_log_probs import grouped_log_probs
from jaxkv._src.models.decoder.init_kv import cache_groups
from jaxkv._src.models.decoder.init_kv import init_kv
from jaxkv._src.models.decoder.llama import llama
from jaxkv._src.models.decoder.params import init_params
from jaxkv._src.models.decoder.rope import LinearScaling
from jaxkv._src.models.decoder.rope import Llama3Scaling
from jaxkv._src.models.decoder.rope import Rope
from jaxkv._src.models.decoder.rope import YarnScaling
from jaxkv._src.models.loading.load import Pretrained
from jaxkv._src.models.loading.load import load
from jaxkv._src.models.loading.tokenizer import Tokenizer

__all__ = [
  "Attention",
  "Decoder",
  "DeltaNet",
  "Experts",
  "LatentAttention",
  "Layer",
  "LinearScaling",
  "Llama3Scaling",
  "Mlp",
  "Pretrained",
  "Rope",
  "Tokenizer",
  "YarnScaling",
  "cache_groups",
  "forward",
  "forward_uncached",
  "grouped_log_probs",
  "init_kv",
  "init_params",
  "llama",
  "load",
]
