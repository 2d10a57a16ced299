"""Attention over shared prefixes on a CPU, beside attention over each row.

Clusters of rows begin with the same pages, as forks of one prompt do. Both
sides attend with one new query a row in all layers of a loop; the shared side
also finds the clusters, once a call. Sides alternate within each round. A ratio
above 1 means that sharing is faster. In the last rows sharing does not pay, and
the gate should cost nothing.

Not measured: writes, prefill, projections, sampling, accelerators.

  python benchmarks/attention_cpu.py [--quick] [--json FILE]
"""

import dataclasses
import statistics
import time
from typing import Any

import command
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxkv
from jaxkv import kv as memory

LAYERS = 8


@dataclasses.dataclass(frozen=True)
class Prompts:
  """One row: a model's attention layer, and the prompts of its sequences."""

  model: str
  heads: int
  kv_heads: int
  head_dim: int
  prompts: int
  samples: int
  prefix: int
  suffix: int
  page_size: int = 16


SHAPES = (
  Prompts("Llama-3.2-1B", 32, 8, 64, 4, 8, 1024, 128),
  Prompts("Qwen2.5-0.5B", 14, 2, 64, 4, 8, 1024, 128),
  Prompts("Llama-3.1-8B", 32, 8, 128, 4, 8, 1024, 128),
  Prompts("Llama-3.2-1B", 32, 8, 64, 2, 16, 2048, 256),
  Prompts("Llama-3.2-1B", 32, 8, 64, 16, 2, 512, 512),
  Prompts("Llama-3.2-1B", 32, 8, 64, 8, 2, 64, 512),
  Prompts("Llama-3.2-1B", 32, 8, 64, 8, 1, 512, 128),
  Prompts("Qwen2.5-0.5B", 14, 2, 64, 4, 2, 32, 96),
)
QUICK = (0, 1, 6)


def problem(shape: Prompts, dtype) -> tuple[memory.KVPages, tuple]:
  """Pages of noise; and the queries, page table and positions of the rows."""
  rng = np.random.default_rng(0)
  batch = shape.prompts * shape.samples
  shared = shape.prefix // shape.page_size
  own = -(-shape.suffix // shape.page_size)
  total = shape.prompts * shared + batch * own
  ids = jnp.asarray(1 + rng.permutation(total), jnp.int32)
  first, rest = jnp.split(ids, [shape.prompts * shared])
  first = jnp.repeat(first.reshape(shape.prompts, -1), shape.samples, axis=0)
  table = jnp.concatenate([first, rest.reshape(batch, -1)], axis=1)
  config = jaxkv.CacheConfig(
    num_pages=total + 1,
    page_size=shape.page_size,
    num_slots=batch,
    pages_per_slot=table.shape[1],
  )
  kv = memory.init(
    config,
    num_layers=LAYERS,
    num_kv_heads=shape.kv_heads,
    head_dim=shape.head_dim,
    dtype=dtype,
  )
  # Small numbers of either format's bits.
  noise = rng.standard_normal(2**16, np.float32).astype(dtype)
  noise = jnp.resize(noise.view(kv.k.dtype), kv.k.shape)
  kv = dataclasses.replace(kv, k=noise, v=noise + 0)
  q = rng.standard_normal((batch, 1, shape.heads, shape.head_dim), np.float32)
  starts = jnp.full((batch,), shape.prefix + shape.suffix - 1, jnp.int32)
  return kv, (jnp.asarray(q, dtype), table, starts)


def side(shape: Prompts, share: bool):
  """A jitted call: all layers of one decode step."""

  def run(kv, q, table, starts):
    view = memory.View(
      page_table=table, starts=starts, counts=jnp.ones_like(starts)
    )
    if share:
      view = memory.share(
        kv, view, num_clusters=shape.prompts, cluster_size=shape.samples
      )
    fresh = memory.refresh_shared(kv, view)

    def layer(index, q):
      out = memory.attend(kv, fresh, index, q)
      return (q + out * 0.001).astype(q.dtype)

    return kv, lax.fori_loop(0, LAYERS, layer, q)

  return jax.jit(run, donate_argnums=0)


def timed_rounds(sides: dict, rounds: int) -> dict[str, list[float]]:
  """Seconds per call of each side, one warm-up round, sides alternating.

  Args:
    sides: name -> [function, cache, other arguments]; the cache is donated
      and replaced.
    rounds: timed rounds.

  Returns:
    Seconds by side.
  """
  seconds = {name: [] for name in sides}
  for index in range(rounds + 1):
    for name, side in sides.items():
      run, cache, others = side
      begin = time.perf_counter()
      result = jax.block_until_ready(run(cache, *others))
      elapsed = time.perf_counter() - begin
      side[1] = result[0]
      if index > 0:
        seconds[name].append(elapsed)
  return seconds


def rows(shapes, rounds: int):
  """One dictionary per shape and format.

  Args:
    shapes: of `SHAPES`.
    rounds: timed rounds.
  """
  for dtype in (jnp.float32, jnp.bfloat16):
    for shape in shapes:
      sides = {}
      for name in ("plain", "shared"):
        kv, arguments = problem(shape, dtype)
        sides[name] = [side(shape, name == "shared"), kv, arguments]
      seconds = timed_rounds(sides, rounds)
      row: dict[str, Any] = dataclasses.asdict(shape)
      row["dtype"] = np.dtype(dtype).name
      for name, values in seconds.items():
        row[f"{name}_min_ms"] = min(values) / LAYERS * 1e3
        row[f"{name}_median_ms"] = statistics.median(values) / LAYERS * 1e3
      row["ratio_min"] = row["plain_min_ms"] / row["shared_min_ms"]
      row["ratio_median"] = row["plain_median_ms"] / row["shared_median_ms"]
      yield row


def print_rows(rows) -> list[dict]:
  """Prints rows as they come, and returns them."""
  print(
    "\nms per layer of a decode step, min (median); shared prefixes\n"
    f"{'model':13} {'dtype':8} {'prompts':>7} {'prefix':>6} {'suffix':>6}"
    f" {'plain':>16} {'shared':>16} {'ratio':>6} {'median':>6}"
  )
  done = []
  for row in rows:
    cells = [
      f"{row[name + '_min_ms']:7.2f} ({row[name + '_median_ms']:6.2f})"
      for name in ("plain", "shared")
    ]
    prompts = f"{row['prompts']}x{row['samples']}"
    print(
      f"{row['model']:13} {row['dtype']:8} {prompts:>7} {row['prefix']:6}"
      f" {row['suffix']:6} {cells[0]:>16} {cells[1]:>16}"
      f" {row['ratio_min']:6.2f} {row['ratio_median']:6.2f}",
      flush=True,
    )
    done.append(row)
  return done


def main(quick: bool, rounds: int) -> dict[str, Any]:
  """Prints the table and returns its rows."""
  shapes = [SHAPES[i] for i in QUICK] if quick else SHAPES
  return {"shared_prefix": print_rows(rows(shapes, rounds))}


if __name__ == "__main__":
  command.run(
    __doc__,
    main,
    rounds=9,
    quick_rounds=3,
    not_measured="writes, prefill, projections, sampling, accelerators",
  )
