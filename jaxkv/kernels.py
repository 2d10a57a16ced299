"""Paged attention and page operations on plain arrays.

These functions take pools of pages, page tables and lengths, and return arrays;
they do not need a cache. `jaxkv_kernels` has the same names without `jaxkv`.

- `paged_decode`: attention of one query for each sequence
- `paged_attention`, `paged_attention_padded`: attention of several queries for
  each sequence (prompts, chunks, trees of drafts), packed or in a rectangle
- the same with `value_dim=`: multi-head latent attention over one pool, only
  with `xla` and `triton`
- `plan_shared_prefix`, `cascade_decode`: decoding of samples of one prompt,
  which reads their shared pages once
- `tile_queries`: cuts packed queries into tiles of one sequence each
- `merge_states`: merges attention over disjoint parts of the keys
- `append_pages`: writes new tokens into their pages, in place if the pages are
  donated or carried by a loop; `quantize`, for 8-bit pages
- `copy_pages`: copies pages within a pool

Options: grouped and multi-query heads, soft cap, sliding window, sinks, ALiBi,
tree masks, keys and values of different size. Pools hold float32, bfloat16,
float16, float8_e4m3fn, float8_e5m2 or int8. The last three have a scale for
each head, or for each token and head. Unused pages can have any contents, even
NaN. Attention has no gradient rule, so it cannot be used in a training loss.

An argument whose type or dtype is not supported raises TypeError, one whose
shape, value or device is not supported ValueError, and a backend that is
unknown or does not support the call NotImplementedError.

The same tests compare four backends with one float64 reference.
`backend="auto"` chooses by platform, shapes and number formats. The logger
`jaxkv_kernels` reports each choice once, at level INFO, with the reasons why
other backends were not chosen. No backend has run on a TPU. An H200 with jax
0.11.2 has run the others; its times are of one layer of Llama-3.1-8B, 64
sequences of 4,096 tokens in bfloat16, where a device copy moves 3.9 TB/s.

- `xla`, a loop over blocks of tokens. For: CPUs, and calls that no other
  backend serves. Numerics checked: on CPUs and an H200 (3.5 ms).
- `triton`, Pallas-Triton. For: NVIDIA GPUs from sm_80. Numerics checked: in an
  interpreter and on an H200 (0.249 ms, 4.3 TB/s).
- `mosaic_gpu`, Pallas Mosaic GPU, which "auto" never chooses. For: Hopper, with
  16-bit pools, and 8-bit pools with head sizes of 64 and 128. Numerics checked:
  in an interpreter, except tensor core products, and on an H200 (0.277 ms).
- `mosaic_tpu`, Pallas Mosaic TPU. For: TPUs, head sizes that are multiples of
  128. Numerics checked: in an interpreter with race detection.

Tests also compile them for their devices: A100, L40, H200, TPU v5e, v6e, v7x.

`pip install "jaxkv[aot]"` adds the compilers to a machine without GPU and TPU.
`benchmarks/gpu_suite.py` checks every backend on the GPU at hand and times it
beside a plain copy and other libraries.
"""

import jaxkv_kernels
from jaxkv_kernels import *  # noqa: F403

__all__ = []
__all__ += jaxkv_kernels.__all__
