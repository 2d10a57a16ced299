"""K/V memory in loops: whole sequences, in place, over meshes."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv_kernels as kernels
from jaxkv import kv as memory
from tests.kernels import reference
from tests.kernels.shapes import assert_matches
from tests.kv.memory import DIM
from tests.kv.memory import DTYPES
from tests.kv.memory import HEADS
from tests.kv.memory import KV_HEADS
from tests.kv.memory import LAYERS
from tests.kv.memory import TABLE
from tests.kv.memory import draw
from tests.kv.memory import make
from tests.kv.memory import poisoned
from tests.kv.memory import view
from tests.kv.memory import write
from tests.tools.pool_copies import assert_in_place
from tests.tools.pool_copies import pool_sized_rewrites

WINDOW = kernels.AttentionOptions(window=40)


class TestDecodeLoop:
  """A whole sequence through the pages equals causal attention over it."""

  @pytest.mark.parametrize("dtype", DTYPES)
  @pytest.mark.parametrize("chunk", [1, 3])
  def test_equals_full_attention(self, dtype, chunk):
    length = 15  # over three page edges
    table = [[5, 9, 2, 11], [7, 1, 3, 4]]
    num_tokens = [15, 9]  # the second row idles after its ninth token
    q, k, v = (
      draw(seed, 2, length, heads, DIM, dtype=dtype)
      for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    )

    @jax.jit
    def loop(kv):
      def step(kv, start):
        where = view(
          table,
          jnp.full((2,), start, jnp.int32),
          jnp.clip(jnp.asarray(num_tokens, jnp.int32) - start, 0, chunk),
        )
        part = [lax.dynamic_slice_in_dim(x, start, chunk, 1) for x in (q, k, v)]
        kv = memory.write(kv, where, 1, *part[1:])
        return kv, memory.attend(kv, where, 1, part[0])

      return lax.scan(step, kv, jnp.arange(0, length, chunk, dtype=jnp.int32))

    _, out = loop(poisoned(dtype))
    out = out.swapaxes(0, 1).reshape(2, length, HEADS, DIM)
    bits = [np.asarray(x).astype(np.float64) for x in (q, k, v)]
    for row, count in enumerate(num_tokens):
      np.testing.assert_array_equal(out[row, count:], 0)
      expected, lse = reference.paged_attention_padded(
        bits[0][row : row + 1, :count],
        bits[1][row].swapaxes(0, 1)[None],
        bits[2][row].swapaxes(0, 1)[None],
        np.zeros((1, 1), np.int32),
        [0],
        [count],
      )
      assert_matches(out[row : row + 1, :count], lse, expected, lse, dtype)

  def test_equal_shapes_trace_once(self):
    traces = []

    @jax.jit
    def step(kv, where, layer, new, q):
      traces.append(1)
      kv = memory.write(kv, where, layer, new, new)
      return kv, memory.attend(kv, where, layer, q)

    kv = make()
    new, q = (jnp.ones((3, 1, heads, DIM)) for heads in (KV_HEADS, HEADS))
    for start in range(3):
      table = np.roll(TABLE, start, axis=1)
      where = view(table, [start, 2, 0], [1, start % 2, 0])
      kv, _ = step(kv, where, jnp.int32(start), new, q)
    assert len(traces) == 1

  def test_vmap_over_caches(self):
    new = draw(0, 2, 1, 1, KV_HEADS, DIM)
    q = draw(1, 2, 1, 1, HEADS, DIM)
    where = view([[3], [5]], [0, 0], [1, 1])
    where = jax.tree.map(lambda x: x[:, None], where)
    kvs = jax.tree.map(lambda x: jnp.stack([x, x]), make())

    def step(kv, where, new, q):
      kv = memory.write(kv, where, 1, new, new)
      kv = memory.copy(kv, where.page_table[0], where.page_table[0] + 1)
      return kv, memory.attend(kv, where, 1, q)

    alone_step = jax.jit(step)
    together, out = jax.jit(jax.vmap(step))(kvs, where, new, q)
    for index in range(2):
      parts = jax.tree.map(lambda x, i=index: x[i], (kvs, where, new, q))
      kv, single = alone_step(*parts)
      np.testing.assert_array_equal(together.k[index], kv.k)
      np.testing.assert_allclose(out[index], single, atol=1e-6)


class TestInPlace:
  """A token loop around a layer loop copies and converts no pool."""

  def pages(self, dtype):
    return make(dtype, num_pages=400, page_size=16)

  def token(self, kv, step, x):
    table = jnp.arange(1, 17, dtype=jnp.int32).reshape(4, 4)
    where = view(table, jnp.full((4,), step, jnp.int32), [1] * 4)

    def layer(index, carry):
      kv, x = carry
      new = x[:, :, :KV_HEADS]
      kv = memory.write(kv, where, index, new, new)
      return kv, x + memory.attend(kv, where, index, x, options=WINDOW)

    kv, x = lax.fori_loop(0, LAYERS, layer, (kv, x))
    return memory.copy(kv, where.starts, where.starts + 30), x

  @pytest.mark.parametrize("dtype", DTYPES)
  @pytest.mark.parametrize("loop", ["scan", "while"])
  def test_loops_copy_no_pool(self, dtype, loop):
    kv = self.pages(dtype)
    x = jnp.ones((4, 1, HEADS, DIM), dtype)

    def scan(kv, x):
      steps = jnp.arange(9, dtype=jnp.int32)
      return lax.scan(
        lambda carry, step: (self.token(carry[0], step, carry[1]), None),
        (kv, x),
        steps,
      )[0]

    def repeat(kv, x):
      return lax.while_loop(
        lambda carry: carry[0] < 9,
        lambda carry: (carry[0] + 1, *self.token(carry[1], *carry[::2])),
        (jnp.int32(0), kv, x),
      )

    run = jax.jit(scan if loop == "scan" else repeat, donate_argnums=0)
    assert_in_place(run.lower(kv, x).compile(), (kv.k, kv.v))

  def test_single_step_copies_no_pool(self):
    kv = self.pages("bfloat16")
    x = jnp.ones((4, 1, HEADS, DIM), jnp.bfloat16)
    run = jax.jit(self.token, donate_argnums=0)
    assert_in_place(run.lower(kv, jnp.int32(3), x).compile(), (kv.k, kv.v))

  def test_undonated_pages_stay_as_they_were(self):
    kv = make()
    new = jnp.ones((3, 1, KV_HEADS, DIM))
    write(kv, view(TABLE, [0, 0, 0], [1, 1, 1]), jnp.int32(0), new, new)
    np.testing.assert_array_equal(kv.k, 0)

  def test_pages_as_scanned_leaves_would_be_copied(self):
    """Scanned pages with a layer axis are copied, so layers are flattened."""
    kv = self.pages("float32")
    new = jnp.ones((4, 1, KV_HEADS, DIM))
    where = view([[1], [2], [3], [4]], [0] * 4, [1] * 4)

    def per_layer(kv):
      split = jax.tree.map(
        lambda x: x.reshape(LAYERS, -1, *x.shape[1:]), (kv.k, kv.v)
      )

      def layer(_, pools):
        layer_kv = dataclasses.replace(kv, k=pools[0], v=pools[1], num_layers=1)
        layer_kv = memory.write(layer_kv, where, 0, new, new)
        return None, (layer_kv.k, layer_kv.v)

      return lax.scan(layer, None, split)[1]

    compiled = jax.jit(per_layer, donate_argnums=0).lower(kv).compile()
    one_layer = (kv.num_pages, *kv.k.shape[1:])
    assert pool_sized_rewrites(compiled, one_layer)


class TestMeshes:
  @pytest.fixture
  def step(self):
    def step(kv, where, x):
      new = x[:, :, ::4]
      kv = memory.write(kv, where, 1, new, new)
      sinks = jnp.zeros(x.shape[2])
      out = memory.attend(
        kv, where, 1, x, options=kernels.AttentionOptions(window=3, sinks=sinks)
      )
      return memory.copy(kv, where.starts, where.starts + 9), out

    return step

  @pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
  def test_shards_equal_single_caches(self, step):
    """Data parallel: the shards share nothing."""
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    x = draw(0, 2, 3, 1, HEADS, DIM)
    where = view([TABLE, TABLE[::-1]], [[3, 2, 0], [0, 1, 6]], [[1] * 3] * 2)
    kvs = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 1]), make())

    def shard(*arguments):
      out = step(*jax.tree.map(lambda leaf: leaf[0], arguments))
      return jax.tree.map(lambda leaf: leaf[None], out)

    everywhere = jax.jit(
      jax.shard_map(shard, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    )
    compiled = everywhere.lower(kvs, where, x).compile()
    assert not re.search(r"all-|collective-", compiled.as_text() or "")
    kv, out = everywhere(kvs, where, x)
    alone_step = jax.jit(step)
    for index in range(2):
      parts = jax.tree.map(lambda leaf, i=index: leaf[i], (kvs, where, x))
      single_kv, expected = alone_step(*parts)
      np.testing.assert_array_equal(kv.k[index], single_kv.k)
      np.testing.assert_allclose(out[index], expected, atol=1e-6)

  @pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
  def test_heads_over_a_mesh_need_no_collective(self, step):
    """Tensor parallel by sharding alone: the compiler adds no collective."""
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("heads",))
    x = draw(0, 3, 1, HEADS, DIM)
    where = view(TABLE, [3, 2, 0], [1] * 3)
    kv, expected = jax.jit(step)(make(), where, x)

    def put(leaf, *axes):
      return jax.device_put(leaf, NamedSharding(mesh, P(*axes)))

    sharded = jax.tree.map(lambda leaf: put(leaf, None, "heads"), make())
    run = jax.jit(step, donate_argnums=0)
    arguments = (sharded, where, put(x, None, None, "heads"))
    compiled = run.lower(*arguments).compile()
    assert not re.search(r"all-|collective-", compiled.as_text() or "")
    over_mesh, out = run(*arguments)
    np.testing.assert_array_equal(over_mesh.k, kv.k)
    np.testing.assert_allclose(out, expected, atol=1e-6)
