"""`python -m jaxkv replay`: replays a request trace with the cache's verbs.

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
"""

import argparse
import functools
import json
import time
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax import Array
from jax import lax

import jaxkv
from jaxkv._src.commands import output
from jaxkv._src.commands.output import CommandError

BLOCK_TOKENS = 512
"""Tokens of a block, fixed by the trace format."""

_SPAN = 512
"""Requests in one call of the compiled scan."""


class TraceRequest(NamedTuple):
  """One line of a trace.

  Attributes:
    line: the line's number, from 1.
    input_length: tokens of the prompt.
    output_length: tokens of the answer.
    hash_ids: the ids of the prompt's blocks.
  """

  line: int
  input_length: int
  output_length: int
  hash_ids: tuple[int, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the command's arguments to its parser."""
  add = parser.add_argument
  pages = output.whole_number(0, 2**63 - 1)
  add(
    "trace",
    metavar="TRACE",
    help="JSON lines with input_length, output_length and hash_ids",
  )
  add(
    "--pages",
    metavar="N",
    type=pages,
    required=True,
    help="blocks that the cache has room for; 0 for no limit",
  )
  add(
    "--offload-pages",
    metavar="N",
    type=output.whole_number(0, 2**28),
    default=0,
    help="blocks that offload memory has room for (default 0)",
  )
  add(
    "--rule",
    choices=("full", "all"),
    default="full",
    help="cache full blocks only (default), or every block",
  )
  add("--json", metavar="FILE", help="also write the result here")


def run(args: argparse.Namespace) -> int:
  """Replays a trace and prints a table, and returns the exit status, 0.

  Raises:
    CommandError: the trace cannot be replayed, or the result cannot be written.
  """
  output.check_writable(args.json, args.trace)
  requests = read_trace(args.trace)
  for request in requests:
    if args.pages and (blocks := _num_blocks(request, args.rule)) > args.pages:
      raise CommandError(
        f"{args.trace} line {request.line}: the request needs {blocks} pages, "
        f"--pages is {args.pages}"
      )
  result = _replay(requests, args.rule, args.pages, args.offload_pages)
  output.write_json(args.json, result)
  pages = f"{args.pages:,}" if args.pages else "unlimited"
  output.print_table(
    ("requests", f"{result['requests']:,}"),
    (f"blocks (rule {args.rule})", f"{result['blocks']:,}"),
    ("pages", pages),
    *[("offload pages", f"{args.offload_pages:,}")] * (args.offload_pages > 0),
    ("hits", f"{result['hit_blocks']:,}"),
    ("hit rate", f"{result['hit_rate']:.2%}"),
    ("evictions", f"{result['evicted']:,}"),
    ("time a request", f"{result['us_per_request']:.1f} us"),
  )
  return 0


def read_trace(path: str) -> list[TraceRequest]:
  """Reads and checks a trace, and skips its blank lines.

  Raises:
    CommandError: the file cannot be read, a line is not a valid request, or
      there is no request.
  """
  requests = [
    _request(f"{path} line {line_number}", line_number, line)
    for line_number, line in enumerate(output.read_lines(path), start=1)
    if line.strip()
  ]
  if not requests:
    raise CommandError(f"{path} has no request")
  return requests


def _request(label: str, line_number: int, line: str) -> TraceRequest:
  try:
    record = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise CommandError(f"{label}: not JSON ({error})") from error
  if not isinstance(record, dict):
    raise CommandError(f"{label}: must be a JSON object")
  for key in ("input_length", "output_length"):
    if not _is_count(record.get(key)):
      raise CommandError(f"{label}: {key} must be a whole number of at least 0")
  ids = record.get("hash_ids")
  num_blocks = -(-record["input_length"] // BLOCK_TOKENS)
  if not isinstance(ids, list) or not all(map(_is_count, ids)):
    raise CommandError(
      f"{label}: hash_ids must be a list of whole numbers of at least 0"
    )
  if len(ids) != num_blocks:
    raise CommandError(
      f"{label}: hash_ids must have {num_blocks} ids, one for {BLOCK_TOKENS} "
      f"tokens of input_length {record['input_length']}, not {len(ids)}"
    )
  return TraceRequest(
    line_number, record["input_length"], record["output_length"], tuple(ids)
  )


def _is_count(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _num_blocks(request: TraceRequest, rule: str) -> int:
  """Returns the number of blocks of a request that the rule caches."""
  full = request.input_length // BLOCK_TOKENS
  return len(request.hash_ids) if rule == "all" else full


def _replay(
  requests: list[TraceRequest], rule: str, pages: int, offload_pages: int
) -> dict[str, Any]:
  """Replays requests and returns the metrics to print and write."""
  ids = [request.hash_ids[: _num_blocks(request, rule)] for request in requests]
  blocks = np.asarray([len(row) for row in ids])
  num_blocks = int(blocks.sum())
  # The cache never uses more pages than all requests have blocks. The 2 extra
  # pages are the null page and the page that is never cached.
  upper_bound = max(1, num_blocks)
  config = jaxkv.CacheConfig(
    num_pages=2 + (min(pages, upper_bound) if pages else upper_bound),
    page_size=1,
    num_slots=1,
    pages_per_slot=1 + int(blocks.max()),
    offload_pages=offload_pages,
  )
  # With rule `full`, a prompt that ends with a full block must not hit it.
  lengths = np.asarray([request.input_length for request in requests])
  capped = (rule == "full") & (lengths % BLOCK_TOKENS == 0) & (blocks > 0)
  # A row of `work` has the index of a request's first block among all blocks,
  # the number of its blocks, and the number of tokens to admit. `admit` never
  # hits the last of these tokens.
  columns = [np.cumsum(blocks) - blocks, blocks, blocks + 1 - capped]
  work = np.stack(columns, axis=1)
  state, hits, seconds = _timed_spans(config, _tokens(ids, config), work)
  jaxkv.check(state)
  assert int(state.error) == jaxkv.Status.OK, "a request was not served"
  return {
    "requests": len(requests),
    "blocks": num_blocks,
    "hit_blocks": int(hits.sum()),
    "hit_rate": int(hits.sum()) / max(num_blocks, 1),
    "evicted": int(state.stats.evicted_pages),
    "seconds": seconds,
    "us_per_request": seconds / len(requests) * 1e6,
  }


def _tokens(ids: list[tuple[int, ...]], config: jaxkv.CacheConfig) -> Array:
  """Returns the block ids of all requests as one padded vector of tokens.

  Ids can exceed int32, so each is replaced by its rank in order of first use.
  The padding lets `_serve` slice `config.slot_tokens` tokens at any block.
  """
  ranks: dict[int, int] = {}
  flat = [ranks.setdefault(key, len(ranks)) for row in ids for key in row]
  return jnp.asarray(flat + [0] * config.slot_tokens, jnp.int32)


def _timed_spans(
  config: jaxkv.CacheConfig, tokens: Array, work: np.ndarray
) -> tuple[jaxkv.CacheState, np.ndarray, float]:
  """Serves all requests; returns the state, hits per request, and seconds."""
  count = len(work)
  # Spans have equal length, so that one program runs them all. Rows that pad
  # the last span have length 0, so `_serve` skips them.
  padded = np.pad(work, ((0, -count % _SPAN), (0, 0)))
  spans = jnp.asarray(padded.reshape(-1, _SPAN, 3), jnp.int32)
  state = jaxkv.init(config)

  def serve_all(state: jaxkv.CacheState, tokens: Array, work: Array) -> Any:
    return lax.scan(functools.partial(_serve, tokens=tokens), state, work)

  program = jax.jit(
    serve_all, donate_argnums=0, compiler_options=jaxkv.CPU_COMPILER_OPTIONS
  )
  program = program.lower(state, tokens, spans[0]).compile()
  parts = []
  seconds = 0.0
  with tqdm.tqdm(total=count, desc="replay", unit="request") as bar:
    for index, span in enumerate(spans):
      start_time = time.perf_counter()
      state, out = jax.block_until_ready(program(state, tokens, span))
      seconds += time.perf_counter() - start_time
      parts.append(out)
      bar.update(min(_SPAN, count - index * _SPAN))
  return state, np.concatenate(parts)[:count], seconds


def _serve(
  state: jaxkv.CacheState, request: Array, *, tokens: Array
) -> tuple[jaxkv.CacheState, Array]:
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
