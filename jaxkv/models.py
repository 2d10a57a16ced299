"""Decoder models in plain JAX, with keys and values in the paged cache.

A `Decoder` describes a model layer by layer. Each `Layer` has a token mixer
(`Attention`, `LatentAttention`, `DeltaNet`) and an MLP (`Mlp`, `Experts`).
`forward` runs any `Decoder`. `llama` describes the simplest family.

| feature                                         | class                    |
|-------------------------------------------------|--------------------------|
| windows, soft caps, sinks, biases, gates, norms | `Attention`              |
| rotary positions and their scaling              | `Rope`                   |
| latents in place of keys and values             | `LatentAttention`        |
| routed and shared experts, groups of experts    | `Experts`                |
| norms after attention and MLP                   | `Layer`                  |
| norm offsets, scaled embeddings, logit caps     | `Decoder`                |

Windows need fewer pages than full attention, and a recurrent layer needs only
its last states. So `cache_groups` makes a group for each window and each size
of cached data, and `forward` takes one view per group. `cache_config` sizes the
pools of pages from bytes. Five windowed layers per full layer make two groups,
each with a pool:

  config = llama(
    num_layers=12, windows=(512,) * 5 + (None,),
    rope_base=(1e4,) * 5 + (1e6,), ...
  )
  sizes = cache_config(
    config, num_slots=64, max_length=8192, memory=8 * 2**30
  )
  cache = jaxkv.init(sizes)
  kv = init_kv(config, sizes)

One step, which prefills a chunk of a prompt or decodes:

  cache, _ = jaxkv.recycle(cache)  # frees pages behind the windows
  cache, out = jaxkv.allocate(cache, num_tokens)
  views = tuple(
    jaxkv.view(cache, group=group, num_tokens=num_tokens)
    for group in range(len(cache.config.groups))
  )
  batch = jaxkv.kv.Batch(tokens=tokens, positions=positions, views=views)
  logits, kv = forward(params, batch, kv, config=config)
  cache, _ = jaxkv.commit(cache, tokens, num_tokens)

Exact numerics: with `dataclasses.replace(config, numerics="exact")`, logits and
log-probs of a token have the same bits in a rollout and in a trainer. So
importance ratios are exactly 1 before the first update. See `Decoder`.

Routing replay: with `init_kv(record_experts=True)` the pages also record which
experts each token used, including tokens of cached prefixes. A trainer passes
the records to `forward_uncached(experts=)` to use the same experts.

For training on samples, `grouped_log_probs` computes the log-probs of all
samples. Each prompt is computed only once, forward and backward:

  log_probs = grouped_log_probs(
    params, prompts, prompt_lengths, completions, lengths, config=config
  )
"""

from jaxkv._src.models.decoder.cache_config import cache_config
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
  "cache_config",
  "cache_groups",
  "forward",
  "forward_uncached",
  "grouped_log_probs",
  "init_kv",
  "init_params",
  "llama",
  "load",
]
