"""The reference for paged attention, in float64 NumPy.

It is slow but easy to verify, because it computes one sequence, one head and
one query at a time. It does not check arguments. Tests compare every backend
with it. The docstring of `jaxkv_kernels._src.attention` defines the letters.

A query at absolute position p sees the keys at positions 0..p, or with
`window=w` at positions p-w+1..p. `soft_cap=c` turns a logit x into
`c * tanh(x / c)`. Then `alibi_slopes` adds slope * (j - p) to the logit of the
key at position j. `sinks` adds one logit per head to the denominator of the
softmax. For a query that sees no key, the output is 0, and the log-sum-exp is
the sink, or -inf without sinks. A sequence has no keys past position M * S - 1,
but windows and ALiBi count from the query's position.
"""

import ml_dtypes
import numpy as np

_BITS = {
  np.dtype(np.uint16): ml_dtypes.bfloat16,
  np.dtype(np.uint8): ml_dtypes.float8_e4m3fn,
}


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
  alibi_slopes=None,
  k_scale=None,
  v_scale=None,
  tree_mask=None,
):
  """Computes attention of a rectangle of queries.

  Takes the arguments of `api.paged_attention_padded`. Pages of uint16 have the
  bits of bfloat16, those of uint8 have the bits of float8_e4m3fn. For j < X,
  query t of row b sees the key at position `starts[b] + j` only if
  `tree_mask[b, t, j]`.

  Returns:
    (float64[B, T, H, Dv], float64[B, T, H] natural log-sum-exps). Padding gives
    0 and -inf.
  """
  q = np.asarray(q).astype(np.float64)
  batch, columns, heads, dim = q.shape
  per_kv_head = heads // k_pages.shape[1]
  scale = dim**-0.5 if scale is None else scale
  out = np.zeros((batch, columns, heads, v_pages.shape[-1]))
  lse = np.full((batch, columns, heads), -np.inf)
  capacity = np.shape(page_table)[1] * k_pages.shape[2]
  for b in range(batch):
    start = int(starts[b])
    count = int(counts[b])
    num_tokens = min(start + count, capacity)
    keys = sequence(k_pages, page_table[b], num_tokens, page_offset, k_scale)
    values = sequence(v_pages, page_table[b], num_tokens, page_offset, v_scale)
    for t in range(count):
      mask = None if tree_mask is None else tree_mask[b, t]
      visible = _visible(start + t, start, window, mask)
      visible = visible[visible < capacity]
      for h in range(heads):
        logits = keys[visible, h // per_kv_head] @ (q[b, t, h] * scale)
        if soft_cap is not None:
          logits = soft_cap * np.tanh(logits / soft_cap)
        if alibi_slopes is not None:
          logits = logits + float(alibi_slopes[h]) * (visible - (start + t))
        sink = None if sinks is None else float(sinks[h])
        out[b, t, h], lse[b, t, h] = _softmax(
          logits, values[visible, h // per_kv_head], sink
        )
  return out, lse


def paged_decode(q, k_pages, v_pages, page_table, lengths, **options):
  """Computes attention of each sequence's last token.

  Takes the arrays of `api.paged_decode`, and the keyword arguments of
  `paged_attention_padded`. Returns (float64[B, H, Dv], float64[B, H]).
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
  q,
  k_pages,
  v_pages,
  page_table,
  kv_lens,
  cu_q_lens,
  *,
  tree_mask=None,
  **options,
):
  """Computes attention of queries packed one sequence after another.

  Takes the arrays of `api.paged_attention`, and the keyword arguments of
  `paged_attention_padded`; `tree_mask` is bool[T, X]. Returns (float64[T, H,
  Dv], float64[T, H]); rows after the last query are zeros and -inf.
  """
  q = np.asarray(q)
  out = np.zeros((*q.shape[:2], v_pages.shape[-1]))
  lse = np.full(q.shape[:2], -np.inf)
  for b in range(len(kv_lens)):
    first_row = int(cu_q_lens[b])
    end_row = int(cu_q_lens[b + 1])
    count = end_row - first_row
    if count <= 0:
      continue
    rows, row_lse = paged_attention_padded(
      q[None, first_row:end_row],
      k_pages,
      v_pages,
      np.asarray(page_table)[b : b + 1],
      [int(kv_lens[b]) - count],
      [count],
      tree_mask=None
      if tree_mask is None
      else tree_mask[None, first_row:end_row],
      **options,
    )
    out[first_row:end_row] = rows[0]
    lse[first_row:end_row] = row_lse[0]
  return out, lse


def mla_decode(q, pages, page_table, lengths, *, value_dim, **options):
  """Computes attention of each sequence's last token over latent vectors.

  Takes the arrays of `paged_decode` without values, `value_dim`, and keyword
  arguments of `paged_attention_padded`. Returns (float64[B, H, Dv],
  float64[B, H]).
  """
  values = pages[..., :value_dim]
  options["v_scale"] = options.get("k_scale")
  return paged_decode(q, pages, values, page_table, lengths, **options)


def merge_states(out, lse):
  """Merges attention over X sets of keys, [X, ..., H, Dv] and [X, ..., H]."""
  out, lse = (np.asarray(x).astype(np.float64) for x in (out, lse))
  m = lse.max(axis=0)
  m = np.where(np.isfinite(m), m, 0)
  weights = np.exp(lse - m)
  l = weights.sum(axis=0)
  merged = (weights[..., None] * out).sum(axis=0)
  merged /= np.where(l == 0, 1, l)[..., None]
  with np.errstate(divide="ignore"):
    return merged, m + np.log(l)


def sequence(pages, table_row, length, page_offset=0, scale=None):
  """Returns one sequence's keys or values as float64[length, K, D]."""
  pages = np.asarray(pages)
  pages = pages.view(_BITS.get(pages.dtype, pages.dtype))
  factors = np.ones(pages.shape[1]) if scale is None else np.asarray(scale)
  page_size = pages.shape[2]
  tokens = np.zeros((max(length, 0), pages.shape[1], pages.shape[3]))
  for position in range(length):
    page = int(table_row[position // page_size]) + int(page_offset)
    factor = factors
    if factors.ndim == 3:
      factor = factors[page, :, position % page_size]
    token = pages[page, :, position % page_size].astype(np.float64)
    tokens[position] = token * factor[:, None]
  return tokens


def _visible(position, start, window, mask):
  """Returns the positions of the keys that a query at `position` sees."""
  first_key = 0 if window is None else max(0, position - int(window) + 1)
  visible = np.arange(first_key, position + 1)
  if mask is None:
    return visible
  node = visible - start
  inside = (node >= 0) & (node < len(mask))
  return visible[~inside | mask[np.where(inside, node, 0)]]


def _softmax(logits, values, sink):
  """Returns the softmax-weighted sum of values, and the log-sum-exp."""
  all_logits = logits if sink is None else np.append(logits, sink)
  if all_logits.size == 0:
    return np.zeros(values.shape[-1]), -np.inf
  m = all_logits.max()
  lse = m + np.log(np.exp(all_logits - m).sum())
  return np.exp(logits - lse) @ values, lse
