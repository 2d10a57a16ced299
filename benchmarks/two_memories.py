"""Counts the hits of conversations with one memory and with two.

Clients talk in rounds. A client's first prompt has 1,000 tokens, and each later
one adds 100 tokens to the conversation so far. Each answer has 100 tokens. The
clients of a round come in random order, one after another, so a prefix returns
after all other clients. One conversation grows to 2,900 tokens, so 128 clients
need 23,300 pages of 16 tokens.

| row | pages |
|---|---|
| one memory | 3,000 on the device |
| two memories | 3,000 on the device, 22,000 in host memory |
| unlimited | as many on the device as all conversations need |

A figure is the share of a round's prompt tokens that were cached. `moves` are
the pages that moved per request, out and back. `us` is the time of a request in
the compiled scan, without the pages themselves.

  python benchmarks/two_memories.py [--quick] [--json FILE]

For a trace: `python -m jaxkv replay TRACE --pages 3000 --host-pages 30000`.
"""

import time
from typing import Any
from typing import NamedTuple

import command
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rows import Row
from rows import at_least
from rows import report

import jaxkv


class Work(NamedTuple):
  """The sizes of the workload.

  Attributes:
    clients: the number of conversations.
    rounds: the prompts of each.
    first: tokens of the first prompt.
    more: tokens that each later prompt adds, and tokens of an answer.
    pages: pages on the device.
    host_pages: pages in host memory.
  """

  clients: int = 128
  rounds: int = 10
  first: int = 1000
  more: int = 100
  pages: int = 3000
  host_pages: int = 22_000

  @property
  def longest(self) -> int:
    """Tokens of a whole conversation."""
    return self.first + (2 * self.rounds - 1) * self.more


PAGE_SIZE = 16


def config_of(work: Work, pages: int, host_pages: int) -> jaxkv.CacheConfig:
  return jaxkv.CacheConfig(
    num_pages=1 + pages,
    page_size=PAGE_SIZE,
    num_slots=1,
    pages_per_slot=-(-work.longest // PAGE_SIZE),
    host_pages=host_pages,
  )


def requests(work: Work) -> tuple[np.ndarray, np.ndarray]:
  """Returns the client and the prompt's length of each request, in order."""
  rng = np.random.default_rng(0)
  clients = [rng.permutation(work.clients) for _ in range(work.rounds)]
  lengths = work.first + 2 * work.more * np.arange(work.rounds)
  return np.concatenate(clients), np.repeat(lengths, work.clients)


def serve(
  work: Work, config: jaxkv.CacheConfig
) -> tuple[np.ndarray, jaxkv.CacheState, float]:
  """Serves all requests; returns hits [rounds], the cache, and seconds."""
  rng = np.random.default_rng(1)
  width = config.slot_tokens
  texts = jnp.asarray(rng.integers(0, 32_000, (work.clients, width)), jnp.int32)
  clients, lengths = requests(work)
  slot = jnp.zeros((1,), jnp.int32)

  def one(state, request):
    client, length = request
    tokens, length = texts[client][None], length[None]
    state, out = jaxkv.admit(state, slot, tokens, length)
    cached = out.num_cached_tokens
    # The answer's tokens get pages too, and all of them are committed.
    total = length + work.more
    state, _ = jaxkv.allocate(state, total - cached)
    rest = jnp.roll(tokens, -cached[0], axis=1)
    state, _ = jaxkv.commit(state, rest, total - cached)
    state, _ = jaxkv.free(state, slots=slot)
    return state, cached[0]

  @jax.jit
  def scan(state):
    return lax.scan(one, state, (jnp.asarray(clients), jnp.asarray(lengths)))

  state = jaxkv.init(config, jnp.zeros(4, jnp.uint32))
  program = scan.lower(state).compile()
  begin = time.perf_counter()
  state, hits = jax.block_until_ready(program(state))
  seconds = time.perf_counter() - begin
  jaxkv.check(state)
  return np.asarray(hits).reshape(work.rounds, -1).sum(1), state, seconds


def measured(quick: bool, rounds: int) -> dict[str, Any]:
  """Measures and prints all rows."""
  work = Work()
  if quick:
    work = Work(clients=8, rounds=3, first=64, more=16, pages=24, host_pages=60)
  needed = work.clients * -(-work.longest // PAGE_SIZE)
  sizes = {
    "unlimited": (needed, 0),
    "two memories": (work.pages, work.host_pages),
    "one memory": (work.pages, 0),
  }
  lengths = work.first + 2 * work.more * np.arange(work.rounds)
  rows, most = [], None
  for name, (pages, host_pages) in sizes.items():
    config = config_of(work, pages, host_pages)
    served = [serve(work, config) for _ in range(rounds)]
    hits, state, _ = served[0]
    shares = hits / (lengths * work.clients)
    last = float(hits[-1])
    most = last if most is None else most
    print(f"\n{name}: hits by round", *(f"{share:.1%}" for share in shares))
    rows.append(Row(name, "hits of the last round", float(shares[-1])))
    share = last / most
    if name == "two memories":
      rows.append(at_least(name, "of the hits of unlimited", share, 0.95))
    else:
      rows.append(Row(name, "of the hits of unlimited", share))
    count = len(lengths) * work.clients
    stats = jaxkv.stats(state)
    if stats.saved_pages is not None and stats.restored_pages is not None:
      moves = int(stats.saved_pages) + int(stats.restored_pages)
      rows.append(Row(name, "moves", moves / count))
    rows.append(
      Row(name, "us", min(seconds for *_, seconds in served) / count * 1e6)
    )
  return report(rows)


if __name__ == "__main__":
  command.run(
    __doc__,
    measured,
    rounds=2,
    quick_rounds=1,
    not_measured="the model, K/V memory, transfers, accelerators",
  )
