"""The decoder of rollouts on workers, small and with exact numerics."""

import dataclasses

from jaxkv import models

DECODER = dataclasses.replace(
  models.llama(
    vocab_size=11,
    num_layers=1,
    embed_dim=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    mlp_dim=8,
  ),
  numerics="exact",
)
