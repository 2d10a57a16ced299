"""`python -m jaxkv replay`: a real request trace through the cache's verbs.

Requests are served one at a time, in file order: admit (with the cached
prefix), commit the rest, free. A compiled scan runs over the requests. The host
only cuts the trace into equal spans, to update a progress bar.

A page holds one "token": the hash id of a block of 512 tokens. The two rules:

| rule | blocks that are cached     | blocks that can be hit              |
|------|----------------------------|-------------------------------------|
| full | `input_length // 512`      | `(input_length - 1) // 512` of them |
| all  | every block, also partial  | all of them                         |

With `full`, the last token must be computed for its logits, so its block may
not be hit if that block is full. The block takes a new page and is cached once
more.

Every request also holds one page that is never cached, for the tokens after its
last cached block. `admit` never finds a whole sequence; thanks to this page it
can find all blocks. The page has no key, so it returns to the front of the free
queue and the next request takes it first. The pool has this page in addition to
`--pages`. Outputs are not cached.
"""

import argparse
import contextlib
import os
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
from jaxkv._src.commands import json_file
from jaxkv._src.commands import results
from jaxkv._src.commands import trace
from jaxkv._src.commands.errors import CommandError
from jaxkv._src.commands.trace import BLOCK_TOKENS
from jaxkv._src.commands.trace import TraceRequest
from jaxkv._src.cpu_options import CPU_COMPILER_OPTIONS

_SPAN = 512
"""Requests in one call of the compiled scan."""


class _Work(NamedTuple):
  """Requests as arrays, on the host at first; scalars inside the scan.

  Attributes:
    begin: int32[X], the first block of a request among all blocks.
    blocks: int32[X], its blocks that are cached.
    length: int32[X], tokens admitted; at most `length - 1` blocks are hit. 0
      for a row that only pads a span.
  """

  begin: Array | np.ndarray
  blocks: Array | np.ndarray
  length: Array | np.ndarray


class _Served(NamedTuple):
  """Outcomes of requests.

  Attributes:
    ok: bool[X].
    hits: int32[X], blocks found.
  """

  ok: Array
  hits: Array


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the command's arguments to its parser."""
  parser.add_argument(
    "trace",
    metavar="TRACE",
    help="JSON lines with timestamp, input_length, output_length, hash_ids",
  )
  parser.add_argument(
    "--pages",
    metavar="N",
    type=int,
    required=True,
    help="blocks that the cache has room for; 0 for no limit",
  )
  parser.add_argument(
    "--rule",
    choices=("full", "all"),
    default="full",
    help="cache full blocks only (default), or every block id",
  )
  parser.add_argument(
    "--json", metavar="FILE", help="also write the result here"
  )


def run(args: argparse.Namespace) -> int:
  """Replays a trace, prints a table and writes JSON if asked to.

  Args:
    args: what `add_arguments` describes.

  Returns:
    The exit code, 0.

  Raises:
    CommandError: the trace cannot be replayed, FILE cannot be written, or the
      result cannot be printed.
  """
  if args.pages < 0:
    raise CommandError(f"--pages must be at least 0, not {args.pages}")
  requests = trace.read(args.trace)
  if args.pages > 0:
    _check_fits(args.trace, requests, args.rule, args.pages)
  if args.json is not None and os.path.exists(args.json):
    if os.path.samefile(args.json, args.trace):
      raise CommandError(f"--json {args.json} would overwrite the trace")
  with contextlib.ExitStack() as stack:
    write = None
    if args.json is not None:
      write = stack.enter_context(json_file.opened(args.json))
    result = _replay(requests, args.rule, args.pages)
    if write is not None:
      write(result)
  _print_table(args, result)
  return 0


def _check_fits(
  path: str, requests: list[TraceRequest], rule: str, pages: int
) -> None:
  for request in requests:
    blocks = _num_blocks(request, rule)
    if blocks > pages:
      raise CommandError(
        f"{path}, line {request.line}: the request needs {blocks} pages, "
        f"--pages is {pages}"
      )


def _num_blocks(request: TraceRequest, rule: str) -> int:
  """How many of a request's blocks are cached."""
  if rule == "all":
    return len(request.hash_ids)
  return request.input_length // BLOCK_TOKENS


def _replay(
  requests: list[TraceRequest], rule: str, pages: int
) -> dict[str, Any]:
  """Replays requests and returns the figures to print and write."""
  ids = [request.hash_ids[: _num_blocks(request, rule)] for request in requests]
  # Requests whose last full block may not be hit, and may be cached twice.
  capped = np.asarray(
    [
      rule == "full" and request.input_length % BLOCK_TOKENS == 0
      for request in requests
    ]
  )
  # Pages beyond the number of cacheable blocks would change nothing.
  most = max(1, _num_distinct(ids) + int(capped.sum()))
  config = jaxkv.CacheConfig(
    num_pages=2 + (min(pages, most) if pages else most),
    page_size=1,
    num_slots=1,
    pages_per_slot=1 + max(len(row) for row in ids),
  )
  blocks = np.asarray([len(row) for row in ids])
  work = _Work(
    begin=np.cumsum(blocks) - blocks,
    blocks=blocks,
    length=np.where(capped & (blocks > 0), blocks, blocks + 1),
  )
  state, served, seconds = _timed_spans(config, _tokens(ids, config), work)
  failed = np.flatnonzero(~served.ok)
  if failed.size or int(state.error):
    raise RuntimeError(
      f"requests {failed.tolist()[:9]} were not served, the cache's error is "
      f"{jaxkv.Status(int(state.error)).name}: a bug in the replay."
    )
  hits, total = int(np.sum(served.hits)), int(np.sum(blocks))
  return {
    "requests": len(requests),
    "blocks": total,
    "hit_blocks": hits,
    "hit_rate": hits / max(total, 1),
    "evicted": int(state.stats.evicted_pages),
    "seconds": seconds,
    "us_per_request": seconds / len(requests) * 1e6,
  }


def _num_distinct(ids: list[tuple[int, ...]]) -> int:
  """How many blocks there are; equal ids after different blocks count twice."""
  nodes: dict[tuple[int, int], int] = {}
  for row in ids:
    node = 0
    for name in row:
      node = nodes.setdefault((node, name), len(nodes) + 1)
  return len(nodes)


def _tokens(ids: list[tuple[int, ...]], config: jaxkv.CacheConfig) -> Array:
  """int32[X]: all blocks in order, then one slot's width of zeros.

  Ids may not fit int32, so they are numbered by first occurrence.
  """
  numbers: dict[int, int] = {}
  flat = [numbers.setdefault(name, len(numbers)) for row in ids for name in row]
  return jnp.asarray(flat + [0] * config.slot_tokens, jnp.int32)


def _timed_spans(
  config: jaxkv.CacheConfig, tokens: Array, work: _Work
) -> tuple[jaxkv.CacheState, _Served, float]:
  """Runs all requests; the seconds exclude compilation."""
  count = work.begin.shape[0]
  padded = [np.pad(column, (0, -count % _SPAN)) for column in work]
  spans = [
    _Work(*(jnp.asarray(c[first : first + _SPAN], jnp.int32) for c in padded))
    for first in range(0, count, _SPAN)
  ]
  state = jaxkv.init(config)
  program = jax.jit(
    _span, donate_argnums=0, compiler_options=CPU_COMPILER_OPTIONS
  )
  program = program.lower(state, tokens, spans[0]).compile()
  parts, seconds = [], 0.0
  with tqdm.tqdm(total=count, desc="replay", unit="request") as bar:
    for number, span in enumerate(spans):
      begin = time.perf_counter()
      state, out = jax.block_until_ready(program(state, tokens, span))
      seconds += time.perf_counter() - begin
      parts.append(out)
      bar.update(min(_SPAN, count - number * _SPAN))
  served = jax.tree.map(lambda *some: np.concatenate(some)[:count], *parts)
  return state, served, seconds


def _span(
  state: jaxkv.CacheState, tokens: Array, work: _Work
) -> tuple[jaxkv.CacheState, _Served]:
  """Serves requests, one after the other."""
  return lax.scan(
    lambda state, request: _serve(state, tokens, request), state, work
  )


def _serve(
  state: jaxkv.CacheState, tokens: Array, request: _Work
) -> tuple[jaxkv.CacheState, _Served]:
  """Serves one request: admit, commit, free."""
  width = state.config.slot_tokens
  slot = jnp.zeros((1,), jnp.int32)
  length = jnp.asarray(request.length)[None]
  real = length > 0
  state, admitted = jaxkv.admit(
    state,
    slot,
    lax.dynamic_slice(tokens, (request.begin,), (width,))[None],
    length,
    mask=real,
  )
  # The page that is never cached, if `admit` has not taken it.
  state, allocated = jaxkv.allocate(
    state,
    jnp.where(real, request.blocks + 1 - admitted.num_cached_tokens, 0),
  )
  first = request.begin + admitted.num_cached_tokens[0]
  state, committed = jaxkv.commit(
    state,
    lax.dynamic_slice(tokens, (first,), (width,))[None],
    jnp.where(real, request.blocks - admitted.num_cached_tokens, 0),
  )
  state, freed = jaxkv.free(state, mask=real)
  ok = admitted.ok & allocated.ok & committed.ok & freed.ok
  return state, _Served((ok | ~real)[0], admitted.num_cached_tokens[0])


def _print_table(args: argparse.Namespace, result: dict[str, Any]) -> None:
  pages = f"{args.pages:,}" if args.pages else "unlimited"
  rows = (
    ("requests", f"{result['requests']:,}"),
    (f"blocks (rule {args.rule})", f"{result['blocks']:,}"),
    ("pages", pages),
    ("hits", f"{result['hit_blocks']:,}"),
    ("hit rate", f"{result['hit_rate']:.2%}"),
    ("evictions", f"{result['evicted']:,}"),
    ("time a request", f"{result['us_per_request']:.1f} us"),
  )
  with results.printed():
    for name, value in rows:
      print(f"{name:18} {value:>12}")
