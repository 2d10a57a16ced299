"""Paged attention and page operations on plain arrays.

Nothing here knows about caches, requests or slots: pools of pages, tables of
page ids and lengths go in, arrays come out. `jaxkv` builds on it; it never
imports `jaxkv`.
"""

from jaxkv_kernels.append import append_kv
from jaxkv_kernels.append import append_pages
from jaxkv_kernels.append import append_quantized
from jaxkv_kernels.attention.api import paged_attention
from jaxkv_kernels.attention.api import paged_attention_padded
from jaxkv_kernels.attention.api import paged_decode
from jaxkv_kernels.attention.backends import BACKENDS
from jaxkv_kernels.attention.backends import decode_workers
from jaxkv_kernels.attention.latent import latent_decode
from jaxkv_kernels.attention.merge import merge_states
from jaxkv_kernels.attention.plan import Plan
from jaxkv_kernels.attention.plan import plan_decode
from jaxkv_kernels.attention.prefix import SharedPrefix
from jaxkv_kernels.attention.prefix import plan_shared_prefix
from jaxkv_kernels.attention.prefix_decode import shared_prefix_decode
from jaxkv_kernels.pages import copy_pages
from jaxkv_kernels.pages import gather_pages
from jaxkv_kernels.storage import load
from jaxkv_kernels.storage import logical_dtype
from jaxkv_kernels.storage import quantize
from jaxkv_kernels.storage import store

__all__ = [
  "BACKENDS",
  "Plan",
  "SharedPrefix",
  "append_kv",
  "append_pages",
  "append_quantized",
  "copy_pages",
  "decode_workers",
  "gather_pages",
  "latent_decode",
  "load",
  "logical_dtype",
  "merge_states",
  "paged_attention",
  "paged_attention_padded",
  "paged_decode",
  "plan_decode",
  "plan_shared_prefix",
  "quantize",
  "shared_prefix_decode",
  "store",
]
