"""Replays a request trace with the cache's verbs, and counts the hits.

Requests run one at a time, in file order. Each request calls `admit`, which
attaches the cached prefix, then `allocate`, `commit` for the blocks that were
not hit, and `free`.

A trace has JSON lines in the format of the Mooncake traces (Qin et al.,
"Mooncake: Trading More Storage for Less Computation", FAST 2025). In each
request, `input_length` is the length of the prompt, and `hash_ids` has one id
for each block of 512 tokens. The last block can be partial. An id identifies a
block together with all blocks before it. A page of the replay holds one
"token", the id of a block. `--rule` selects the cached blocks:

| rule | blocks that are cached       | cached blocks that can be hit       |
|------|------------------------------|-------------------------------------|
| full | `input_length // 512`        | `(input_length - 1) // 512`         |
| all  | every block, even if partial | every block                         |

With `full`, the last token of a prompt is always computed, because its logits
are needed. So a prompt that ends with a full block never hits this block. The
block takes a new page and is cached again.

Every request also holds one page that is never cached, for the tokens after its
last cached block. Without this page `admit` could not hit the last block,
because `admit` never hits a whole sequence. When the request ends, this page
goes to the front of the free queue, because it has no key. So the next request
takes it without an eviction. `--pages` does not count it. Answers are not
cached.

  python benchmarks/replay.py TRACE [--pages N] [--offload-pages N]
    [--rule full|all] [--quick] [--json FILE]
"""

import functools
import json
import pathlib
from typing import Any

import command
import jax
import jax.numpy as jnp
import numpy as np
import rows
from jax import lax
from rows import Row

import jaxkv

BLOCK_TOKENS = 512
"""Tokens of a block, fixed by the trace format."""

_SPAN = 512
"""Requests in one call of the compiled scan."""

Request = tuple[int, list[int]]
"""`input_length` and `hash_ids` of a request."""


def read_trace(path: str) -> list[Request]:
  """Reads the requests of a trace.

  Raises:
    ValueError: a request does not have one id for each block.
  """
  requests = []
  lines = pathlib.Path(path).read_text("utf-8").splitlines()
  for line_number, line in enumerate(lines, start=1):
    record = json.loads(line)
    length = record["input_length"]
    ids = record["hash_ids"]
    if len(ids) != -(-length // BLOCK_TOKENS):
      raise ValueError(
        f"{path} line {line_number}: `hash_ids` must have one id for every "
        f"{BLOCK_TOKENS} tokens of `input_length`, {length}, got {len(ids)}."
      )
    requests.append((length, ids))
  return requests


def replay(
  requests: list[Request], rule: str, pages: int, offload_pages: int = 0
) -> dict[str, float]:
  """Replays requests and returns counts and the time of a request.

  `pages` and `offload_pages` are the blocks that the cache and offload memory
  have room for. The cache has room for all blocks if `pages` is 0.
  """
  lengths = np.asarray([length for length, _ in requests])
  full = lengths // BLOCK_TOKENS
  counts = full if rule == "full" else -(-lengths // BLOCK_TOKENS)
  ids = [row[:count] for (_, row), count in zip(requests, counts, strict=True)]
  num_blocks = int(counts.sum())
  # The cache never uses more pages than all requests have blocks. The 2 extra
  # pages are the null page and the page that is never cached.
  upper_bound = max(1, num_blocks)
  config = jaxkv.CacheConfig(
    num_pages=2 + min(pages or upper_bound, upper_bound),
    page_size=1,
    num_slots=1,
    pages_per_slot=1 + int(counts.max()),
    offload_pages=offload_pages,
  )
  # With rule `full`, a prompt that ends with a full block must not hit it.
  capped = (rule == "full") & (lengths % BLOCK_TOKENS == 0) & (counts > 0)
  # A row of `work` has the index of a request's first block among all blocks,
  # the number of its blocks, and the number of tokens to admit. `admit` never
  # hits the last of these tokens.
  columns = [np.cumsum(counts) - counts, counts, counts + 1 - capped]
  work = np.stack(columns, axis=1)
  # Ids can exceed int32, so each is replaced by its rank in order of first use.
  # The padding lets `_serve` slice `slot_tokens` tokens at any block.
  ranks: dict[int, int] = {}
  flat = [ranks.setdefault(key, len(ranks)) for row in ids for key in row]
  tokens = jnp.asarray(flat + [0] * config.slot_tokens, jnp.int32)
  state, hits, seconds = _timed_spans(config, tokens, work)
  jaxkv.check(state)
  assert int(state.error) == jaxkv.Status.OK, "a request was not served"
  return {
    "requests": len(requests),
    "blocks": num_blocks,
    "hits": int(hits.sum()),
    "hit rate": int(hits.sum()) / max(num_blocks, 1),
    "evictions": int(state.stats.evicted_pages),
    "us a request": seconds / len(requests) * 1e6,
  }


def _timed_spans(
  config: jaxkv.CacheConfig, tokens: jax.Array, work: np.ndarray
) -> tuple[jaxkv.CacheState, np.ndarray, float]:
  """Serves all requests; returns the state, hits per request, and seconds."""
  count = len(work)
  # Spans have equal length, so that one program runs them all. Rows that pad
  # the last span have length 0, so `_serve` skips them.
  padded = np.pad(work, ((0, -count % _SPAN), (0, 0)))
  spans = jnp.asarray(padded.reshape(-1, _SPAN, 3), jnp.int32)
  state = jaxkv.init(config)

  def serve_all(state: Any, tokens: jax.Array, work: jax.Array) -> Any:
    return lax.scan(functools.partial(_serve, tokens=tokens), state, work)

  program = jax.jit(
    serve_all, donate_argnums=0, compiler_options=jaxkv.CPU_COMPILER_OPTIONS
  )
  program = program.lower(state, tokens, spans[0]).compile()
  parts = []
  total_seconds = 0.0
  for span in spans:
    seconds, _, (state, hits) = rows.timed(program, state, tokens, span)
    total_seconds += seconds
    parts.append(hits)
  return state, np.concatenate(parts)[:count], total_seconds


def _serve(
  state: jaxkv.CacheState, request: jax.Array, *, tokens: jax.Array
) -> tuple[jaxkv.CacheState, jax.Array]:
  """Serves one request, a row of `work`; returns the number of hit blocks."""
  width = state.config.slot_tokens
  slot = jnp.zeros((1,), jnp.int32)
  first_block, blocks = request[:2]
  length = request[2:]
  is_real = length > 0
  state, admitted = jaxkv.admit(
    state,
    slot,
    lax.dynamic_slice(tokens, (first_block,), (width,))[None],
    length,
    mask=is_real,
  )
  # Takes the page that is never cached, unless `admit` has taken it.
  state, _ = jaxkv.allocate(
    state, jnp.where(is_real, blocks + 1 - admitted.num_cached_tokens, 0)
  )
  first_miss = first_block + admitted.num_cached_tokens[0]
  state, _ = jaxkv.commit(
    state,
    lax.dynamic_slice(tokens, (first_miss,), (width,))[None],
    jnp.where(is_real, blocks - admitted.num_cached_tokens, 0),
  )
  state, _ = jaxkv.free(state, mask=is_real)
  return state, admitted.num_cached_tokens[0]


def measured(
  quick: bool, rounds: int, *, trace: str, rule: str, **pages: int
) -> dict[str, Any]:
  """Prints and returns the rows of a trace; of its first span if `quick`."""
  del rounds
  requests = read_trace(trace)
  figures = replay(requests[:_SPAN] if quick else requests, rule, **pages)
  return rows.report(Row(rule, *figure) for figure in figures.items())


if __name__ == "__main__":
  command.run(
    __doc__,
    measured,
    rounds=1,
    quick_rounds=1,
    not_measured="the model, K/V memory, transfers, accelerators",
    arguments={
      "trace": {"help": "JSON lines with input_length and hash_ids"},
      "--pages": {"type": int, "default": 0, "help": "0 for no limit"},
      "--offload-pages": {"type": int, "default": 0},
      "--rule": {"choices": ("full", "all"), "default": "full"},
    },
  )
