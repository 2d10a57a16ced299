"""The kernels' public names; see `jaxkv_kernels`."""

from jaxkv_kernels import BACKENDS
from jaxkv_kernels import AttentionOptions
from jaxkv_kernels import DecodePlan
from jaxkv_kernels import SharedPrefix
from jaxkv_kernels import append_kv
from jaxkv_kernels import append_pages
from jaxkv_kernels import append_quantized
from jaxkv_kernels import cascade_decode
from jaxkv_kernels import copy_pages
from jaxkv_kernels import decode_workers
from jaxkv_kernels import gather_pages
from jaxkv_kernels import load
from jaxkv_kernels import logical_dtype
from jaxkv_kernels import merge_states
from jaxkv_kernels import mla_decode
from jaxkv_kernels import paged_attention
from jaxkv_kernels import paged_attention_padded
from jaxkv_kernels import paged_decode
from jaxkv_kernels import plan_decode
from jaxkv_kernels import plan_shared_prefix
from jaxkv_kernels import quantize
from jaxkv_kernels import store

__all__ = [
  "BACKENDS",
  "AttentionOptions",
  "DecodePlan",
  "SharedPrefix",
  "append_kv",
  "append_pages",
  "append_quantized",
  "cascade_decode",
  "copy_pages",
  "decode_workers",
  "gather_pages",
  "load",
  "logical_dtype",
  "merge_states",
  "mla_decode",
  "paged_attention",
  "paged_attention_padded",
  "paged_decode",
  "plan_decode",
  "plan_shared_prefix",
  "quantize",
  "store",
]
