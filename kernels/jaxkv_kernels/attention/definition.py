"""The definition of paged attention, in float64 NumPy.

Slow and obvious on purpose: one sequence, one head and one query at a time.
Every backend is tested against this file. It validates nothing.

A query at absolute position p sees the keys at positions 0..p, or with
`window=w` at positions p-w+1..p. `sinks` adds, for each head, one logit that
takes part in the softmax's denominator and has no value. `soft_cap=c` turns a
logit x into `c * tanh(x / c)`. A query that sees no key gives zeros, and a
log-sum-exp of -inf (or of its sink).
"""

import ml_dtypes
import numpy as np


def paged_attention_padded(
  q,
  k_pages,
  v_pages,
  page_table,
  starts,
  counts,
  *,
  page_offset=0,
  scale=None,
  soft_cap=None,
  window=None,
  sinks=None,
):
  """Queries in a rectangle: row b holds `counts[b]` of them.

  Args:
    q: [B, T, H, D].
    k_pages: [P, K, S, D]; uint16 means bfloat16 bits.
    v_pages: [P, K, S, Dv].
    page_table: int[B, M].
    starts: int[B], absolute position of row b's first query.
    counts: int[B], queries in row b; the columns after them are padding.
    page_offset: int, added to every page id.
    scale: float, 1 / sqrt(D) if None.
    soft_cap: float or None.
    window: int or None.
    sinks: float[H] or None.

  Returns:
    (float64[B, T, H, Dv], float64[B, T, H] natural-log log-sum-exp).
  """
  q = np.asarray(q).astype(np.float64)
  batch, columns, heads, dim = q.shape
  group = heads // k_pages.shape[1]
  scale = dim**-0.5 if scale is None else scale
  out = np.zeros((batch, columns, heads, v_pages.shape[-1]))
  lse = np.full((batch, columns, heads), -np.inf)
  for b in range(batch):
    length = int(starts[b]) + int(counts[b])
    keys = sequence(k_pages, page_table[b], length, page_offset)
    values = sequence(v_pages, page_table[b], length, page_offset)
    for t in range(int(counts[b])):
      position = int(starts[b]) + t
      first = 0 if window is None else max(0, position - int(window) + 1)
      for h in range(heads):
        out[b, t, h], lse[b, t, h] = _one_query(
          q[b, t, h] * scale,
          keys[first : position + 1, h // group],
          values[first : position + 1, h // group],
          soft_cap,
          None if sinks is None else float(sinks[h]),
        )
  return out, lse


def paged_decode(q, k_pages, v_pages, page_table, lengths, **options):
  """One query per sequence, the last of its `lengths[b]` tokens.

  Args:
    q: [B, H, D].
    k_pages: [P, K, S, D].
    v_pages: [P, K, S, Dv].
    page_table: int[B, M].
    lengths: int[B].
    **options: as for `paged_attention_padded`.

  Returns:
    (float64[B, H, Dv], float64[B, H]).
  """
  lengths = np.asarray(lengths)
  out, lse = paged_attention_padded(
    np.asarray(q)[:, None],
    k_pages,
    v_pages,
    page_table,
    lengths - 1,
    np.ones_like(lengths),
    **options,
  )
  return out[:, 0], lse[:, 0]


def paged_attention(
  q, k_pages, v_pages, page_table, kv_lens, cu_q_lens, **options
):
  """Queries of all sequences packed one after another.

  Args:
    q: [T, H, D]; rows `cu_q_lens[b]:cu_q_lens[b + 1]` are the last tokens of
      sequence b's `kv_lens[b]`.
    k_pages: [P, K, S, D].
    v_pages: [P, K, S, Dv].
    page_table: int[B, M].
    kv_lens: int[B].
    cu_q_lens: int[B + 1].
    **options: as for `paged_attention_padded`.

  Returns:
    (float64[T, H, Dv], float64[T, H]); zeros and -inf after the last query.
  """
  q = np.asarray(q)
  out = np.zeros((*q.shape[:2], v_pages.shape[-1]))
  lse = np.full(q.shape[:2], -np.inf)
  for b in range(len(kv_lens)):
    first, last = int(cu_q_lens[b]), int(cu_q_lens[b + 1])
    count = last - first
    if count <= 0:
      continue
    rows, row_lse = paged_attention_padded(
      q[None, first:last],
      k_pages,
      v_pages,
      np.asarray(page_table)[b : b + 1],
      [int(kv_lens[b]) - count],
      [count],
      **options,
    )
    out[first:last], lse[first:last] = rows[0], row_lse[0]
  return out, lse


def sequence(pages, table_row, length, page_offset=0):
  """One sequence's K or V, token by token, as float64[length, K, D]."""
  pages = np.asarray(pages)
  if pages.dtype == np.uint16:
    pages = pages.view(ml_dtypes.bfloat16)
  size = pages.shape[2]
  tokens = np.zeros((max(length, 0), pages.shape[1], pages.shape[3]))
  for position in range(length):
    page = int(table_row[position // size]) + int(page_offset)
    tokens[position] = pages[page, :, position % size]
  return tokens


def _one_query(scaled_query, keys, values, soft_cap, sink):
  """Attention of one head's query; (float64[Dv], its log-sum-exp)."""
  logits = keys @ scaled_query
  if soft_cap is not None:
    logits = soft_cap * np.tanh(logits / soft_cap)
  all_logits = logits if sink is None else np.append(logits, sink)
  if all_logits.size == 0:
    return np.zeros(values.shape[-1]), -np.inf
  top = all_logits.max()
  lse = top + np.log(np.exp(all_logits - top).sum())
  return np.exp(logits - lse) @ values, lse
