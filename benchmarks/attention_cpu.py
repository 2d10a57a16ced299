"""Paged decode attention against a dense cache, and the cost of a page write.

Both sides run the same loop: write one token per sequence into the carried
cache, attend over everything so far, feed the result into the next step. The
dense side is `jax.nn.dot_product_attention` on a [B, length, K, D] cache. Its
bfloat16 cache is also timed as uint16 bits ("dense bits"): XLA for a CPU
rewrites a whole bfloat16 array to update it, which is not a cost of attention.
Sides alternate within each round. A ratio below 1 means that paged is faster.

Shared prefixes: see `shared_prefix_cpu`.

Writes: one page per row, reused, so that all pool sizes touch the same amount
of memory.

Not measured: writes to memory outside of the processor's caches, prefill,
projections, sampling, allocation of pages, any accelerator.

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
import shared_prefix_cpu
from jax import lax

import jaxkv
from jaxkv import kv as memory

STEPS = 4  # decode steps in one timed call
WRITES = 256  # tokens per row in one timed call of the write benchmark


@dataclasses.dataclass(frozen=True)
class Shape:
  """One row: a model's attention layer, a batch and a context."""

  model: str
  heads: int
  kv_heads: int
  head_dim: int
  batch: int
  context: int
  page_size: int = 16
  ragged: bool = False


SHAPES = (
  Shape("Qwen2.5-0.5B", 14, 2, 64, 8, 512),
  Shape("Qwen2.5-0.5B", 14, 2, 64, 64, 1024),
  Shape("Llama-3.2-1B", 32, 8, 64, 8, 512),
  Shape("Llama-3.2-1B", 32, 8, 64, 16, 2048),
  Shape("Gemma-3-1B", 4, 1, 256, 8, 512),
  Shape("Gemma-3-1B", 4, 1, 256, 32, 2048),
  Shape("GPT-2", 12, 12, 64, 8, 1024),
  Shape("Llama-3.1-8B", 32, 8, 128, 8, 512),
  Shape("Llama-3.1-8B", 32, 8, 128, 8, 2048),
  Shape("Llama-3.1-8B", 32, 8, 128, 8, 2048, page_size=64),
  Shape("Llama-3.1-8B", 32, 8, 128, 16, 1024, ragged=True),
)
QUICK = (0, 2, 4, 7)
POOL_MEGABYTES = (8, 32, 128, 512)


def inputs(shape: Shape, dtype):
  """Query, key and value of the first step, and tokens held before it."""
  rng = np.random.default_rng(0)
  q, k, v = (
    jnp.asarray(rng.standard_normal((shape.batch, 1, n, shape.head_dim)), dtype)
    for n in (shape.heads, shape.kv_heads, shape.kv_heads)
  )
  most = shape.context - STEPS
  held = np.full((shape.batch,), most, np.int32)
  if shape.ragged:
    held = np.linspace(most // 8, most, shape.batch).astype(np.int32)
  return q, k, v, jnp.asarray(held)


def decode_loop(write_and_attend):
  """STEPS decode steps over a donated cache, as one jitted call."""

  def run(cache, q, k, v, held):
    def step(carry, _):
      cache, q, held = carry
      # The new key depends on the last output, as in a model.
      new = (k + q[:, :, : k.shape[2]] * 0.001).astype(k.dtype)
      cache, out = write_and_attend(cache, q, new, v, held)
      return (cache, (q + out * 0.001).astype(q.dtype), held + 1), None

    return lax.scan(step, (cache, q, held), None, length=STEPS)[0]

  return jax.jit(run, donate_argnums=0)


def paged_side(shape: Shape, dtype):
  """The jitted loop and its first cache."""
  rng = np.random.default_rng(1)
  columns = -(-shape.context // shape.page_size)
  total = shape.batch * columns
  table = jnp.asarray(
    1 + rng.permutation(total).reshape(shape.batch, columns), jnp.int32
  )
  config = jaxkv.CacheConfig(
    num_pages=total + 1,
    page_size=shape.page_size,
    num_slots=shape.batch,
    pages_per_slot=columns,
  )
  cache = memory.init(
    config,
    num_layers=1,
    num_kv_heads=shape.kv_heads,
    head_dim=shape.head_dim,
    dtype=dtype,
  )

  def write_and_attend(cache, q, k, v, held):
    view = memory.View(
      page_table=table, starts=held, counts=jnp.ones_like(held)
    )
    cache = memory.write(cache, view, 0, k, v)
    return cache, memory.attend(cache, view, 0, q)

  return decode_loop(write_and_attend), cache


def dense_side(shape: Shape, dtype, bits: bool):
  """The same on a dense cache; `bits`: bfloat16 carried as uint16."""
  size = (shape.batch, shape.context, shape.kv_heads, shape.head_dim)
  cache = tuple(jnp.zeros(size, jnp.uint16 if bits else dtype) for _ in "kv")
  row = jnp.arange(shape.batch)

  def stored(x):
    return lax.bitcast_convert_type(x, jnp.uint16) if bits else x

  def loaded(x):
    return lax.bitcast_convert_type(x, dtype) if bits else x

  def write_and_attend(cache, q, k, v, held):
    keys = cache[0].at[row, held].set(stored(k[:, 0]))
    values = cache[1].at[row, held].set(stored(v[:, 0]))
    out = jax.nn.dot_product_attention(
      q, loaded(keys), loaded(values), key_value_seq_lengths=held + 1
    )
    return (keys, values), out

  return decode_loop(write_and_attend), cache


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


def attention_rows(shapes, rounds: int):
  """One dictionary per shape and format."""
  for dtype in (jnp.float32, jnp.bfloat16):
    for shape in shapes:
      arguments = inputs(shape, dtype)
      sides = {
        "dense": [*dense_side(shape, dtype, False), arguments],
        "paged": [*paged_side(shape, dtype), arguments],
      }
      if dtype == jnp.bfloat16:
        sides["dense_bits"] = [*dense_side(shape, dtype, True), arguments]
      seconds = timed_rounds(sides, rounds)
      row: dict[str, Any] = dataclasses.asdict(shape)
      row["dtype"] = np.dtype(dtype).name
      for name, values in seconds.items():
        row[f"{name}_min_ms"] = min(values) / STEPS * 1e3
        row[f"{name}_median_ms"] = statistics.median(values) / STEPS * 1e3
      row["ratio_min"] = row["paged_min_ms"] / row["dense_min_ms"]
      row["ratio_median"] = row["paged_median_ms"] / row["dense_median_ms"]
      yield row


def print_attention(rows) -> list[dict]:
  """Prints rows as they come, and returns them."""
  print(
    "ms per decode step (write + attend), min (median)\n"
    f"{'model':13} {'dtype':8} {'B':>3} {'len':>6} {'page':>4}"
    f" {'dense':>16} {'paged':>16} {'ratio':>6} {'median':>6}"
    f" {'dense bits':>16}"
  )
  done = []
  for row in rows:
    cells = [
      f"{row[side + '_min_ms']:7.2f} ({row[side + '_median_ms']:6.2f})"
      if side + "_min_ms" in row
      else ""
      for side in ("dense", "paged", "dense_bits")
    ]
    context = f"{'<=' if row['ragged'] else ''}{row['context']}"
    print(
      f"{row['model']:13} {row['dtype']:8} {row['batch']:3} {context:>6}"
      f" {row['page_size']:4} {cells[0]:>16} {cells[1]:>16}"
      f" {row['ratio_min']:6.2f} {row['ratio_median']:6.2f} {cells[2]:>16}",
      flush=True,
    )
    done.append(row)
  return done


def write_loop(layers: int):
  """Writes WRITES tokens per row, in every layer."""

  def run(cache, table, new):
    def token(carry, position):
      view = memory.View(
        page_table=table,
        starts=jnp.full(table.shape[:1], position),
        counts=jnp.ones(table.shape[:1], jnp.int32),
      )

      def layer(index, cache):
        return memory.write(cache, view, index, new, new)

      if layers == 1:
        return layer(jnp.int32(0), carry), None
      return lax.fori_loop(0, layers, layer, carry), None

    positions = jnp.arange(WRITES, dtype=jnp.int32)
    return lax.scan(token, cache, positions)

  return jax.jit(run, donate_argnums=0)


def write_side(megabytes: int, dtype, layers: int, batch: int = 16):
  """The jitted loop, its pools of `megabytes` in all, and its arguments."""
  kv_heads, page_size, head_dim = 8, 16, 64
  page = 2 * kv_heads * page_size * head_dim * np.dtype(dtype).itemsize
  num_pages = megabytes * 2**20 // page // layers
  config = jaxkv.CacheConfig(
    num_pages=num_pages,
    page_size=page_size,
    num_slots=batch,
    pages_per_slot=1,
  )
  cache = memory.init(
    config,
    num_layers=layers,
    num_kv_heads=kv_heads,
    head_dim=head_dim,
    dtype=dtype,
  )
  # One page per row, reused, and spread over the pool. All sizes touch the same
  # amount of memory, so only the pool's size differs.
  ids = 1 + np.arange(batch) * ((num_pages - 1) // batch)
  columns = -(-WRITES // page_size)
  table = jnp.asarray(np.tile(ids[:, None], columns), jnp.int32)
  new = jnp.ones((batch, 1, kv_heads, head_dim), dtype)
  return [write_loop(layers), cache, (table, new)]


def write_rows(rounds: int):
  """One dictionary per loop and format, with a time for each pool size."""
  for layers in (1, 4):
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
      sides = {
        str(size): write_side(size, dtype, layers) for size in POOL_MEGABYTES
      }
      seconds = timed_rounds(sides, rounds)
      row: dict[str, Any] = {
        "loop": "token scan" if layers == 1 else "4 layers in a scan",
        "dtype": np.dtype(dtype).name,
      }
      for size, values in seconds.items():
        row[f"us_{size}_mb"] = min(values) / WRITES / layers * 1e6
        median = statistics.median(values)
        row[f"us_{size}_mb_median"] = median / WRITES / layers * 1e6
      first, last = (f"us_{POOL_MEGABYTES[i]}_mb" for i in (0, -1))
      row["ratio"] = row[last] / row[first]
      yield row


def print_writes(rows) -> list[dict]:
  """Prints rows as they come, and returns them."""
  sizes = "".join(f"{size:>14} MB" for size in POOL_MEGABYTES)
  print(
    "\nus per write of 16 tokens (K 8, D 64) by pool size, min (median)\n"
    f"{'loop':18} {'dtype':8} {sizes} {'last/first':>10}"
  )
  done = []
  for row in rows:
    cells = "".join(
      f"{row[f'us_{size}_mb']:8.1f} ({row[f'us_{size}_mb_median']:6.1f})"
      for size in POOL_MEGABYTES
    )
    print(
      f"{row['loop']:18} {row['dtype']:8} {cells} {row['ratio']:10.2f}",
      flush=True,
    )
    done.append(row)
  return done


def main(quick: bool, rounds: int) -> dict[str, Any]:
  """Prints all tables and their worst figures; returns the rows."""
  shapes = [SHAPES[i] for i in QUICK] if quick else SHAPES
  prompts = shared_prefix_cpu.SHAPES
  if quick:
    prompts = [prompts[i] for i in shared_prefix_cpu.QUICK]
  attention = print_attention(attention_rows(shapes, rounds))
  shared = shared_prefix_cpu.print_rows(
    shared_prefix_cpu.rows(prompts, rounds, timed_rounds)
  )
  writes = print_writes(write_rows(rounds))
  worst = max(attention, key=lambda row: row["ratio_min"])
  print(
    f"\nslowest paged row: {worst['ratio_min']:.2f}x dense; writes: at most"
    f" {max(row['ratio'] for row in writes):.2f}x from"
    f" {POOL_MEGABYTES[0]} to {POOL_MEGABYTES[-1]} MB"
  )
  return {"attention": attention, "shared_prefix": shared, "writes": writes}


if __name__ == "__main__":
  command.run(
    __doc__,
    main,
    rounds=9,
    quick_rounds=3,
    not_measured="prefill, projections, sampling, page allocation,"
    " accelerators",
  )
