"""Offloaded pages: contents, shardings and compiled programs."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv.results import Moves
from tests.tools import ahead_of_time
from tests.tools.compiled_loops import work_in_loops

_N = 8
_HOST = 6
_CONFIG = jaxkv.CacheConfig(
  num_pages=_N,
  page_size=4,
  num_slots=2,
  pages_per_slot=4,
  offload_pages=_HOST,
  groups=(jaxkv.FullAttention(), jaxkv.Recurrent()),
)
_ONE_GROUP = dataclasses.replace(_CONFIG, groups=(jaxkv.FullAttention(),))


def _moves(*rows, num_pages=_N):
  """Makes moves from rows of (page, saved to, restored from)."""
  table = np.zeros((num_pages, 3), np.int32)
  for index, row in enumerate(rows):
    table[index] = [Moves.NONE if item is None else item for item in row]
  page, saved_to, restored_from = jnp.asarray(table.T)
  return Moves(
    page=page,
    saved_to=saved_to,
    restored_from=restored_from,
    count=jnp.int32(len(rows)),
  )


def _pools():
  """Returns pools of every class, with random contents."""
  pools = (
    jaxkv.kv.init(_CONFIG, num_layers=2, num_kv_heads=2, head_dim=16),
    jaxkv.kv.init(
      _CONFIG, num_layers=3, num_kv_heads=2, head_dim=5, dtype="int8"
    ),
    jaxkv.kv.init(
      _CONFIG, num_layers=2, num_kv_heads=1, head_dim=8, value_dim=6
    ),
    jaxkv.kv.init_states(
      _CONFIG,
      num_layers=2,
      shapes={"a": ((3,), "float32"), "b": ((2, 4, 16), "bfloat16")},
    ),
    jaxkv.kv.init_expert_ids(_CONFIG, num_layers=2, width=2),
  )
  leaves, structure = jax.tree.flatten(pools)
  keys = jax.random.split(jax.random.key(0), len(leaves))
  values = [
    jax.random.randint(key, leaf.shape, 0, 100).astype(leaf.dtype)
    for key, leaf in zip(keys, leaves, strict=True)
  ]
  return jax.tree.unflatten(structure, values)


def _pages(pools):
  """Returns the arrays [L, N, ...] of all pools."""
  return [
    np.asarray(array).reshape(pool.num_layers, _N, *array.shape[1:])
    for pool in pools
    for array in jax.tree.leaves(pool)
  ]


def test_moves_keep_the_contents_of_every_pool():
  """Pages are saved, exchanged and restored bit for bit, also across calls."""
  pools = _pools()
  offload = jaxkv.kv.init_offload(pools, _CONFIG)
  old_pools = _pages(pools)
  move = jax.jit(jaxkv.kv.move, donate_argnums=(0, 1))
  # Page 4 and offload page 2 exchange places; so do page 2 and offload page 1.
  pools, offload = move(
    pools, offload, _moves((3, 1, None), (4, 2, 2), (5, None, 1), (2, 1, 1))
  )
  middle = _pages(pools)
  for old_pool, new_pool in zip(old_pools, middle, strict=True):
    np.testing.assert_array_equal(new_pool[:, 4], 0)
    for page, content in ((5, 3), (2, 3), (3, 3), (6, 6), (7, 7), (1, 1)):
      np.testing.assert_array_equal(new_pool[:, page], old_pool[:, content])
  pools, offload = move(pools, offload, _moves((6, None, 2), (7, None, 1)))
  for old_pool, new_pool in zip(old_pools, _pages(pools), strict=True):
    np.testing.assert_array_equal(new_pool[:, 6], old_pool[:, 4])
    np.testing.assert_array_equal(new_pool[:, 7], old_pool[:, 2])
  kinds = {pages.sharding.memory_kind for pages in offload.pages}
  assert kinds == {"pinned_host"}
  kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(pools)}
  assert kinds == {"device"}


def test_pages_are_split_by_heads():
  """On a mesh, no page leaves the device of its heads."""
  if jax.device_count() < 2:
    pytest.skip("needs two devices")
  auto = jax.sharding.AxisType.Auto
  mesh = jax.make_mesh((2,), ("model",), axis_types=(auto,))
  kv = jaxkv.kv.init(_ONE_GROUP, num_layers=2, num_kv_heads=2, head_dim=16)
  kv = jax.tree.map(
    lambda leaf: jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape), kv
  )
  old_pools = _pages((kv,))
  where = NamedSharding(mesh, P(None, "model"))
  kv = jax.device_put(kv, where)
  offload = jaxkv.kv.init_offload(kv, _ONE_GROUP)
  assert offload.pages[0].sharding.spec == P(None, "model")
  move = jax.jit(jaxkv.kv.move)
  moves = _moves((3, 1, None), (4, None, 1))
  text = move.lower(kv, offload, moves).compile().as_text()
  assert not re.search("all-gather|collective-permute|all-to-all", text)
  # Devices agree on a number that orders reads and writes.
  reduced = [line for line in text.splitlines() if " all-reduce(" in line]
  shapes = re.findall(r"\w\[([\d,]*)\]", " ".join(reduced).split("metadata")[0])
  assert set(shapes) <= {"", "1"}
  kv, offload = move(kv, offload, moves)
  assert offload.pages[0].sharding.memory_kind == "pinned_host"
  for old_pool, new_pool in zip(old_pools, _pages((kv,)), strict=True):
    np.testing.assert_array_equal(new_pool[:, 4], old_pool[:, 3])


def test_moves_inside_shard_map():
  """Each device moves pages of one shard's pools."""
  if jax.device_count() < 2:
    pytest.skip("needs two devices")
  auto = jax.sharding.AxisType.Auto
  mesh = jax.make_mesh((2,), ("data",), axis_types=(auto,))

  @jax.jit
  @functools.partial(
    jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data")
  )
  def run(offsets):
    kv = jaxkv.kv.init(
      _ONE_GROUP, num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32"
    )
    kv = jax.tree.map(lambda leaf: leaf + offsets[0].astype(jnp.float32), kv)
    offload = jaxkv.kv.init_offload(kv, _ONE_GROUP)
    kv, offload = jaxkv.kv.move(kv, offload, _moves((3, 1, None)))
    kv = jax.tree.map(jnp.zeros_like, kv)
    kv, _ = jaxkv.kv.move(kv, offload, _moves((5, None, 1)))
    return kv.k[5, 0, 0, :1]

  assert run(jnp.asarray([7, 9])).tolist() == [7, 9]


def _in_a_loop(kv, offload, moves):
  """Moves in each iteration of a loop that carries both memories."""

  def body(_, loop):
    return jaxkv.kv.move(*loop, moves)

  return jax.lax.fori_loop(0, 3, body, (kv, offload))


def test_moves_copy_no_pool():
  config = jaxkv.CacheConfig(
    num_pages=512, page_size=4, num_slots=2, pages_per_slot=4, offload_pages=768
  )
  kv = jaxkv.kv.init(config, num_layers=2, num_kv_heads=2, head_dim=16)
  offload = jaxkv.kv.init_offload(kv, config)
  moves = _moves((3, 1, None), num_pages=512)
  program = jax.jit(_in_a_loop, donate_argnums=(0, 1))
  compiled = program.lower(kv, offload, moves).compile()
  smallest = min(leaf.size for leaf in jax.tree.leaves((kv, offload.pages)))
  assert work_in_loops(compiled.as_text(), smallest) == {}
  assert compiled.memory_analysis().temp_size_in_bytes < smallest


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e", "v6e", "v7x"])
def test_moves_are_in_place_on_a_tpu(target):
  """The offloaded pages stay in host memory, S(5), and are updated in place."""
  if why := ahead_of_time.why_not(target):
    pytest.skip(why)
  config = jaxkv.CacheConfig(
    num_pages=4096,
    page_size=16,
    num_slots=2,
    pages_per_slot=4,
    offload_pages=16_384,
  )
  mesh = ahead_of_time.mesh_of(target, "device", 1)
  on_device = NamedSharding(mesh, P())
  host_sharding = NamedSharding(mesh, P(), memory_kind="pinned_host")

  def placed(tree, where):
    return jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
      tree,
    )

  kv = jax.eval_shape(
    functools.partial(
      jaxkv.kv.init,
      config,
      num_layers=8,
      num_kv_heads=8,
      head_dim=128,
      dtype="bfloat16",
      storage_dtype="bfloat16",
    )
  )
  offload = jax.eval_shape(lambda kv: jaxkv.kv.init_offload(kv, config), kv)
  moves = _moves(num_pages=4096)

  def run(kv, offload, moves):
    # The type of an argument does not tell that it is in host memory.
    pages = jax.device_put(offload.pages, jax.memory.Space.Host)
    offload = dataclasses.replace(offload, pages=pages)
    return _in_a_loop(kv, offload, moves)

  shardings = jax.tree.map(lambda _: on_device, kv)
  host_shardings = dataclasses.replace(
    jax.tree.map(lambda _: on_device, offload),
    pages=jax.tree.map(lambda _: host_sharding, offload.pages),
  )
  program = jax.jit(
    run, donate_argnums=(0, 1), out_shardings=(shardings, host_shardings)
  )
  with jax.set_mesh(mesh):
    lowered = program.trace(
      placed(kv, on_device),
      jax.tree.map(placed, offload, host_shardings),
      placed(moves, on_device),
    ).lower()
  compiled = lowered.compile()
  assert "S(5)" in str(compiled.as_text())
  # A page of all layers is staged, and no pool.
  assert compiled.memory_analysis().temp_size_in_bytes < 2**23


def test_bad_arguments_are_refused():
  config = dataclasses.replace(_ONE_GROUP, offload_pages=0)
  kv = jaxkv.kv.init(config, num_layers=2, num_kv_heads=2, head_dim=16)
  with pytest.raises(ValueError, match="got offload_pages=0"):
    jaxkv.kv.init_offload(kv, config)
  with pytest.raises(ValueError, match="needs prefix_caching=True"):
    dataclasses.replace(_ONE_GROUP, prefix_caching=False)
  pools = _pools()
  offload = jaxkv.kv.init_offload(pools, _CONFIG)
  with pytest.raises(ValueError, match="`offload` must have the pages of `kv`"):
    jaxkv.kv.move(kv, offload, _moves())
  with pytest.raises(TypeError, match="`offload` must be an OffloadMemory"):
    jaxkv.kv.move(kv, None, _moves())
  with pytest.raises(TypeError, match="`moves` must be"):
    jaxkv.kv.move(pools, offload, None)
  on_device = jax.tree.map(
    lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), offload
  )
  with pytest.raises(ValueError, match="in host memory"):
    jaxkv.kv.move(pools, on_device, _moves())


class TestMisuse:
  """Moves that an own loop forgets, or makes twice."""

  config = jaxkv.CacheConfig(
    num_pages=4, page_size=2, num_slots=1, pages_per_slot=3, offload_pages=9
  )

  def planned(self):
    """Returns a memory, a cache, and the moves of three sequences."""
    kv = jaxkv.kv.init(self.config, num_layers=1, num_kv_heads=1, head_dim=2)
    kv = jax.tree.map(lambda array: array + 1, kv)
    state = jaxkv.init(self.config)
    moves = []
    for token in range(3):
      tokens = jnp.full((1, 6), token, jnp.int32)
      state, out = jaxkv.allocate(state, [6])
      moves.append(out.moves)
      state, _ = jaxkv.commit(state, tokens, [6])
      state, _ = jaxkv.free(state)
    assert [int(out.count) for out in moves] == [0, 3, 3]
    return kv, jaxkv.kv.init_offload(kv, self.config), state, moves

  def check(self, kv, offload, state=None):
    jaxkv.kv.check(kv, self.config, offload=offload, state=state)

  def test_ordered_moves_record_no_error(self):
    kv, offload, state, moves = self.planned()
    for out in moves:
      kv, offload = jaxkv.kv.move(kv, offload, out)
    self.check(kv, offload, state)
    assert int(offload.num_moves) == 6 and int(offload.error) == 0

  def test_forgotten_moves_are_reported(self):
    """The next moves are not made; the forgotten ones can still be made."""
    kv, offload, state, moves = self.planned()
    match = "has planned 6 moves, and `offload` has made 0: MOVES_FORGOTTEN"
    with pytest.raises(jaxkv.CacheError, match=match):
      self.check(kv, offload, state)
    self.check(kv, offload)
    old_arrays = [np.asarray(pages) for pages in offload.pages]
    kv, offload = jax.jit(jaxkv.kv.move)(kv, offload, moves[2])
    for old_array, new_array in zip(old_arrays, offload.pages, strict=True):
      np.testing.assert_array_equal(old_array, new_array)
    assert int(offload.num_moves) == 0
    with pytest.raises(jaxkv.CacheError, match="recorded MOVES_FORGOTTEN"):
      self.check(kv, offload)
    for out in moves[1:]:
      kv, offload = jaxkv.kv.move(kv, offload, out)
    assert int(offload.num_moves) == 6
    assert int(offload.error) == jaxkv.Status.MOVES_FORGOTTEN

  def test_late_moves_are_reported(self):
    """The moves of the later verb reveal it, even if it needs none."""
    kv, offload, state, moves = self.planned()
    for out in moves[:2]:
      kv, offload = jaxkv.kv.move(kv, offload, out)
    state, out = jaxkv.allocate(state, [0])
    kv, offload = jaxkv.kv.move(kv, offload, out.moves)
    with pytest.raises(jaxkv.CacheError, match="recorded MOVES_FORGOTTEN"):
      self.check(kv, offload, state)

  def test_repeated_moves_are_reported(self):
    """The saved contents are not overwritten by those of a later write."""
    kv, offload, state, moves = self.planned()
    for out in moves:
      kv, offload = jaxkv.kv.move(kv, offload, out)
    kv = jax.tree.map(lambda array: array + 1, kv)
    old_arrays = [np.asarray(array) for array in (kv.k, kv.v, *offload.pages)]
    kv, offload = jaxkv.kv.move(kv, offload, moves[2])
    new_arrays = [kv.k, kv.v, *offload.pages]
    for old_array, new_array in zip(old_arrays, new_arrays, strict=True):
      np.testing.assert_array_equal(old_array, new_array)
    with pytest.raises(jaxkv.CacheError, match="recorded MOVES_REPEATED"):
      self.check(kv, offload, state)

  def test_older_states_are_reported(self):
    kv, offload, _, moves = self.planned()
    for out in moves:
      kv, offload = jaxkv.kv.move(kv, offload, out)
    with pytest.raises(jaxkv.CacheError, match="MOVES_REPEATED"):
      self.check(kv, offload, jaxkv.init(self.config))

  def test_counts_of_moves_wrap_around(self):
    kv, offload, _, moves = self.planned()
    start = jnp.uint32(2**32 - 2)
    offload = dataclasses.replace(offload, num_moves=start)
    first_moves = dataclasses.replace(moves[1], start=start)
    last_moves = dataclasses.replace(moves[2], start=start + jnp.uint32(3))
    kv, offload = jaxkv.kv.move(kv, offload, first_moves)
    kv, offload = jaxkv.kv.move(kv, offload, last_moves)
    assert int(offload.num_moves) == 4 and int(offload.error) == 0
    _, offload = jaxkv.kv.move(kv, offload, first_moves)
    assert int(offload.error) == jaxkv.Status.MOVES_REPEATED
