"""torch's and FlashInfer's decode attention on the problems of `attention.py`.

Each is timed with CUDA events, replaying a CUDA graph of many calls if it can
be captured. Arrays have the same shapes but are drawn anew, so results are not
compared. As in `attention.py`, calls read different caches in turn. The call of
FlexAttention has been compared with a plain softmax on a CPU (torch 2.13), and
not run on a GPU.
"""

import importlib
import math
import statistics
from collections.abc import Callable
from typing import Any

from attention_cases import COLD_BYTES
from attention_cases import Case

CALLS, ROUNDS = 16, 7


def sdpa(case: Case) -> tuple[float, int]:
  """A dense cache, masked where lengths differ.

  Returns:
    (seconds a call, number of caches in turn), as all functions in SIDES.
  """
  import torch  # pyright: ignore[reportMissingImports]

  dtype = _dtype(torch, case)
  rows = (case.batch, case.heads, 1, case.head_dim)
  cache = (case.batch, case.kv_heads, case.context, case.head_dim)
  q = torch.randn(rows, device="cuda", dtype=dtype)
  caches = [
    [torch.randn(cache, device="cuda", dtype=dtype) for _ in range(2)]
    for _ in range(_rotations(case))
  ]
  mask = None
  if case.ragged:
    lengths = torch.as_tensor(case.lengths(), device="cuda")
    mask = torch.arange(case.context, device="cuda")[None] < lengths[:, None]
    mask = mask[:, None, None]

  def call(k, v):
    torch.nn.functional.scaled_dot_product_attention(
      q, k, v, attn_mask=mask, enable_gqa=True
    )

  return _seconds(torch, call, caches)


def flex_paged(case: Case) -> tuple[float, int]:
  """FlexAttention; the blocks of its mask are pages."""
  import torch  # pyright: ignore[reportMissingImports]

  call, (_, k, v, *_) = flex_call(torch, case, "cuda")
  more = range(_rotations(case) - 1)
  pools = [(k, v), *[(torch.randn_like(k), torch.randn_like(v)) for _ in more]]
  return _seconds(torch, call, pools)


def flex_call(
  torch: Any, case: Case, device: str
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """A compiled call over shuffled pages, and its arrays.

  All pages together are the keys of a single sequence. The mask says which row
  owns which pages, as in torch's own, private, PagedAttention.

  Args:
    torch: the module.
    case: the problem.
    device: where its arrays are.

  Returns:
    The call of (k, v), which gives [B, H, 1, D], and q [B, H, 1, D], k and v
    [1, K, P * S, D], int32[B, M] page ids, int64[B] lengths.
  """
  flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
  dtype, size = _dtype(torch, case), case.page_size
  lengths = torch.as_tensor(case.lengths(), device=device).long()
  needed = (lengths + size - 1) // size
  pages, most = int(needed.sum()), int(needed.max())
  column = torch.arange(most, device=device)[None]
  used = column < needed[:, None]
  table = torch.zeros(used.shape, dtype=torch.int32, device=device)
  table[used] = torch.randperm(pages, device=device).to(torch.int32)
  # Index of each page in the row's sequence; -1 if another row owns it.
  place = torch.full((case.batch, pages), -1, device=device)
  row = torch.arange(case.batch, device=device)[:, None].expand_as(used)
  place[row[used], table[used].long()] = column.expand_as(used)[used]

  def visible(b, h, q, key):
    logical = place[b, key // size]
    return (logical >= 0) & (logical * size + key % size < lengths[b])

  # Full pages need no mask; only the last page of a row does.
  full = lengths // size
  partial = table.gather(1, (needed - 1)[:, None])
  mask = flex.BlockMask.from_kv_blocks(
    (needed - full).to(torch.int32)[:, None, None],
    torch.nn.functional.pad(partial, (0, pages - 1))[:, None, None],
    full.to(torch.int32)[:, None, None],
    torch.nn.functional.pad(table, (0, pages - most))[:, None, None],
    BLOCK_SIZE=(128, size),
    mask_mod=visible,
    seq_lengths=(1, pages * size),
    compute_q_blocks=False,
  )
  q = torch.randn(
    (case.batch, case.heads, 1, case.head_dim), device=device, dtype=dtype
  )
  shape = (1, case.kv_heads, pages * size, case.head_dim)
  k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
  # Otherwise torch compiles for varying sizes, and after some cases not at all.
  torch.compiler.reset()
  compiled = torch.compile(flex.flex_attention, dynamic=False)

  def call(k, v):
    return compiled(q, k, v, block_mask=mask, enable_gqa=True)

  return call, (q, k, v, table, lengths)


def flashinfer(case: Case) -> tuple[float, int]:
  """FlashInfer's batch decode, in its layout with heads before tokens."""
  import flashinfer  # pyright: ignore[reportMissingImports]
  import torch  # pyright: ignore[reportMissingImports]

  dtype = _dtype(torch, case)
  lengths = torch.as_tensor(case.lengths(), device="cuda")
  needed = (lengths + case.page_size - 1) // case.page_size
  ends = torch.zeros(case.batch + 1, dtype=torch.int32, device="cuda")
  ends[1:] = torch.cumsum(needed, 0)
  pages = int(ends[-1])
  order = torch.randperm(pages, device="cuda").to(torch.int32)
  last = (lengths - (needed - 1) * case.page_size).to(torch.int32)
  shape = (pages, 2, case.kv_heads, case.page_size, case.head_dim)
  pools = [
    [torch.randn(shape, device="cuda", dtype=dtype)]
    for _ in range(_rotations(case))
  ]
  q = torch.randn(
    (case.batch, case.heads, case.head_dim), device="cuda", dtype=dtype
  )
  scratch = torch.empty(2**27, dtype=torch.uint8, device="cuda")
  wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
    scratch, "HND", use_tensor_cores=case.heads // case.kv_heads >= 4
  )
  wrapper.plan(
    ends,
    order,
    last,
    case.heads,
    case.kv_heads,
    case.head_dim,
    case.page_size,
    q_data_type=dtype,
    kv_data_type=dtype,
  )
  return _seconds(torch, lambda pool: wrapper.run(q, pool), pools)


SIDES = {
  "torch sdpa": sdpa,
  "torch flex paged": flex_paged,
  "flashinfer": flashinfer,
}


def _rotations(case: Case) -> int:
  return math.ceil(COLD_BYTES / case.bytes_read())


def _dtype(torch: Any, case: Case) -> Any:
  if case.dtype != "bfloat16":
    raise NotImplementedError("timed with bfloat16 alone")
  return torch.bfloat16


def _seconds(
  torch: Any, call: Callable[..., object], caches: list[Any]
) -> tuple[float, int]:
  """Median seconds a call, from events around a graph of many of them."""
  # Memory that the previous side has left.
  torch.cuda.empty_cache()
  calls = max(CALLS, len(caches))
  stream = torch.cuda.Stream()
  with torch.cuda.stream(stream):
    for _ in range(3):
      call(*caches[0])
  torch.cuda.synchronize()
  graph = torch.cuda.CUDAGraph()
  with torch.cuda.graph(graph):
    for index in range(calls):
      call(*caches[index % len(caches)])
  graph.replay()
  samples = []
  for _ in range(ROUNDS):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    samples.append(begin.elapsed_time(end) * 1e-3 / calls)
  return statistics.median(samples), len(caches)
