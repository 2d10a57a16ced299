"""Counts the hits of conversations with one memory and with two.

Clients talk in rounds. A client's first prompt has 1,000 tokens, and each later
one adds 100 tokens to the conversation so far. Each answer has 100 tokens. The
clients of a round come in random order, one after another, so a prefix returns
after all other clients. One conversation grows to 2,900 tokens, so 128 clients
need 23,300 pages of 16 tokens.

| row | pages |
|---|---|
| one memory | 3,000 on the device |
| two memories | 3,000 on the device, 22,000 in offload memory |
| unlimited | as many on the device as all conversations need |

A figure is the share of a round's prompt tokens that were cached. `moves` are
the pages that moved per request, out and back. `us` is the time of a request in
the compiled scan, without the pages themselves.

  python benchmarks/two_memories.py [--quick] [--json FILE]

For a trace: `python benchmarks/replay.py TRACE --pages 3000`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rows
from jax import lax
from rows import Row

import jaxkv


class Work(NamedTuple):
  """The sizes of the workload.

  Attributes:
    clients: the number of conversations.
    rounds: the prompts of each.
    first: tokens of the first prompt.
    more: tokens that each later prompt adds, and tokens of an answer.
    pages: pages on the device.
    offload_pages: offloaded pages.
  """

  clients: int = 128
  rounds: int = 10
  first: int = 1000
  more: int = 100
  pages: int = 3000
  offload_pages: int = 22_000

  @property
  def longest(self) -> int:
    """Tokens of a whole conversation."""
    return self.first + (2 * self.rounds - 1) * self.more

  def prompt_lengths(self) -> np.ndarray:
    """Returns the length of a client's prompt in each round."""
    return self.first + 2 * self.more * np.arange(self.rounds)


PAGE_SIZE = 16


def serve(
  work: Work, pages: int, offload_pages: int, rounds: int
) -> tuple[np.ndarray, jaxkv.CacheState, float]:
  """Serves all requests, and repeats this to time it.

  Returns:
    The hits of each round of requests, the cache, and the least seconds.
  """
  config = jaxkv.CacheConfig(
    num_pages=1 + pages,
    page_size=PAGE_SIZE,
    num_slots=1,
    pages_per_slot=-(-work.longest // PAGE_SIZE),
    offload_pages=offload_pages,
  )
  rng = np.random.default_rng(0)
  clients = [rng.permutation(work.clients) for _ in range(work.rounds)]
  clients = jnp.asarray(np.concatenate(clients))
  lengths = jnp.asarray(np.repeat(work.prompt_lengths(), work.clients))
  rng = np.random.default_rng(1)
  texts = rng.integers(0, 32_000, (work.clients, config.slot_tokens))
  texts = jnp.asarray(texts, jnp.int32)
  slot = jnp.zeros((1,), jnp.int32)

  def one(state, request):
    client, length = request
    tokens, length = texts[client][None], length[None]
    state, out = jaxkv.admit(state, slot, tokens, length)
    cached = out.num_cached_tokens
    # The answer's tokens get pages too, and all of them are committed.
    num_tokens = length + work.more
    state, _ = jaxkv.allocate(state, num_tokens - cached)
    new_tokens = jnp.roll(tokens, -cached[0], axis=1)
    state, _ = jaxkv.commit(state, new_tokens, num_tokens - cached)
    state, _ = jaxkv.free(state, slots=slot)
    return state, cached[0]

  @jax.jit
  def scan(state):
    return lax.scan(one, state, (clients, lengths))

  state = jaxkv.init(config, jnp.zeros(4, jnp.uint32))
  program = scan.lower(state).compile()
  runs = [rows.timed(program, state) for _ in range(rounds)]
  seconds, _, results = zip(*runs, strict=True)
  state, hits = results[0]
  jaxkv.check(state)
  hits = np.asarray(hits).reshape(work.rounds, -1).sum(1)
  return hits, state, min(seconds)


def rows_of(quick: bool, rounds: int) -> Iterator[Row]:
  """Yields all rows."""
  work = Work()
  if quick:
    work = Work(
      clients=8, rounds=3, first=64, more=16, pages=24, offload_pages=60
    )
  count = work.clients * work.rounds
  needed = work.clients * -(-work.longest // PAGE_SIZE)
  memories = {
    "unlimited": (needed, 0),
    "two memories": (work.pages, work.offload_pages),
    "one memory": (work.pages, 0),
  }
  max_hits = 0.0
  for name, (pages, offload_pages) in memories.items():
    hits, state, seconds = serve(work, pages, offload_pages, rounds)
    shares = hits / (work.prompt_lengths() * work.clients)
    max_hits = max_hits or float(hits[-1])
    print(f"\n{name}: hits by round", *(f"{share:.1%}" for share in shares))
    yield Row(name, "hits of the last round", float(shares[-1]))
    row = Row(name, "of the hits of unlimited", float(hits[-1]) / max_hits)
    yield rows.at_least(*row[:3], 0.95) if name == "two memories" else row
    stats = jaxkv.stats(state)
    if stats.saved_pages is not None and stats.restored_pages is not None:
      moves = int(stats.saved_pages) + int(stats.restored_pages)
      yield Row(name, "moves", moves / count)
    yield Row(name, "us", seconds / count * 1e6)


if __name__ == "__main__":
  rows.run(
    __doc__,
    rows_of,
    rounds=2,
    quick_rounds=1,
    not_measured="the model, K/V memory, transfers, accelerators",
  )
