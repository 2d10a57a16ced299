"""torch's and FlashInfer's decode attention on the problems of `attention.py`.

Each is timed with the events of its own library, replaying a CUDA graph of
many calls where it can be captured, on arrays of the same shapes. Both read
the same pages or slots again in every call, so a case smaller than the cache
flatters them; the row says how large it is.
"""

import statistics
from collections.abc import Callable
from typing import Any

from attention_cases import Case

CALLS, ROUNDS = 48, 7


def add(case: Case, row: dict[str, Any], speed: float) -> None:
  """Puts figures, or why there are none, beside those of the other sides.

  Args:
    case: the problem.
    row: of `attention.rows_of`; changed.
    speed: bytes a second of the run's copy.
  """
  for name, side in (("torch sdpa", sdpa), ("flashinfer", flashinfer)):
    try:
      seconds = side(case)
    except Exception as error:
      # Not installed, not on this device, or not for this case.
      row["not timed"][name] = f"{type(error).__name__}: {error}"[:300]
      continue
    rate = case.bytes_read() / seconds
    row["sides"][name] = {
      "us": seconds * 1e6,
      "GB/s": rate / 1e9,
      "share of copy": rate / speed,
      # Its arrays are others: not compared here.
      "error": float("nan"),
    }


def sdpa(case: Case) -> float:
  """Seconds a call on a dense cache, masked where lengths differ."""
  import torch  # pyright: ignore[reportMissingImports]

  dtype = _dtype(torch, case)
  rows = (case.batch, case.heads, 1, case.head_dim)
  cache = (case.batch, case.kv_heads, case.context, case.head_dim)
  q, k, v = (
    torch.randn(shape, device="cuda", dtype=dtype)
    for shape in (rows, cache, cache)
  )
  mask = None
  if case.ragged:
    lengths = torch.as_tensor(case.lengths(), device="cuda")
    mask = torch.arange(case.context, device="cuda")[None] < lengths[:, None]
    mask = mask[:, None, None]

  def call():
    torch.nn.functional.scaled_dot_product_attention(
      q, k, v, attn_mask=mask, enable_gqa=True
    )

  return _seconds(torch, call)


def flashinfer(case: Case) -> float:
  """Seconds a call of FlashInfer's batch decode, heads before slots."""
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
  pool = torch.randn(shape, device="cuda", dtype=dtype)
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
  return _seconds(torch, lambda: wrapper.run(q, pool))


def _dtype(torch: Any, case: Case) -> Any:
  if case.dtype != "bfloat16":
    raise NotImplementedError("timed with bfloat16 alone")
  return torch.bfloat16


def _seconds(torch: Any, call: Callable[[], object]) -> float:
  """Median seconds a call, from events around a graph of CALLS of them."""
  stream = torch.cuda.Stream()
  with torch.cuda.stream(stream):
    for _ in range(3):
      call()
  torch.cuda.synchronize()
  graph = torch.cuda.CUDAGraph()
  with torch.cuda.graph(graph):
    for _ in range(CALLS):
      call()
  graph.replay()
  samples = []
  for _ in range(ROUNDS):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    samples.append(begin.elapsed_time(end) * 1e-3 / CALLS)
  return statistics.median(samples)
