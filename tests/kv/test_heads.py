"""Attention of heads that are split over devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv_kernels as kernels
from jaxkv import kv as memory
from jaxkv_kernels._src.attention import shared_prefix
from tests.kv.memory import DIM
from tests.kv.memory import HEADS
from tests.kv.memory import KV_HEADS
from tests.kv.memory import LAYERS
from tests.kv.memory import draw
from tests.kv.memory import make
from tests.kv.memory import view
from tests.tools.ahead_of_time import for_target
from tests.tools.ahead_of_time import mesh_of
from tests.tools.ahead_of_time import needs
from tests.tools.collectives import collectives
from tests.tools.pool_copies import pool_sized_rewrites

# Rows with a page in common.
_TABLE = [[5, 9, 2], [5, 1, 24], [24] * 3]
_STARTS = [9, 5, 0]
_SINKS = jnp.arange(HEADS, dtype=jnp.float32)


def _decode(kv):
  del kv
  return view(_TABLE, _STARTS, [1, 1, 0]), 1, {"sinks": _SINKS, "window": 6}


def _drafts(kv):
  del kv
  mask = jnp.tril(jnp.ones((3, 3, 3), bool)).at[:, 2, 1].set(False)
  options = {"alibi_slopes": _SINKS / 8, "tree_mask": mask, "soft_cap": 3.0}
  return view(_TABLE, [8, 4, 0], [3, 2, 0]), 3, options


def _shared(kv):
  where = view(_TABLE, _STARTS, [1, 1, 0])
  return memory.share(kv, where, num_clusters=2, cluster_size=2), 1, {}


def _packed(kv):
  single = _shared(kv)[0]
  chunk = view([[7, 8, 24]], [2], [3])
  return memory.PackedView(decode=single, prefill=chunk), 3 + 4, {}


_CALLS = {
  "decode": (_decode, "float32"),
  "drafts": (_drafts, "bfloat16"),
  "shared": (_shared, "float32"),
  "packed": (_packed, "int8"),
}


def _mesh():
  return jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,))


needs_two = pytest.mark.skipif(
  jax.device_count() < 2, reason="needs two devices"
)


@pytest.mark.slow
@needs_two
@pytest.mark.parametrize("name", _CALLS)
def test_each_device_attends_to_its_own_heads(name, monkeypatch):
  """Results equal those of one device, without a collective."""
  # Sharing is forced: it would not pay here.
  savings = dict.fromkeys(shared_prefix._LEAST_SAVING, -(2**20))
  monkeypatch.setattr(shared_prefix, "_LEAST_SAVING", savings)
  call, dtype = _CALLS[name]
  kv = make(dtype)
  where, columns, options = call(kv)
  rows = 1 if name == "packed" else 3
  all_pages = view([list(range(1, 24))], [0], [92])
  new = [draw(seed, 1, 92, KV_HEADS, DIM) for seed in (0, 1)]
  kv = jax.jit(memory.write)(kv, all_pages, 1, *new)
  q = draw(2, rows, columns, HEADS, DIM)

  def step(kv, where, q, head_sharding=None):
    return memory.attend_with_lse(
      kv,
      where,
      1,
      q,
      options=kernels.AttentionOptions(**options),
      head_sharding=head_sharding,
    )

  expected = jax.jit(step)(kv, where, q)
  mesh = _mesh()
  kv = jax.device_put(kv, NamedSharding(mesh, P(None, "heads")))
  q = jax.device_put(q, NamedSharding(mesh, P(None, None, "heads")))
  run = jax.jit(
    functools.partial(step, head_sharding=NamedSharding(mesh, P("heads")))
  )
  compiled = run.lower(kv, where, q).compile()
  assert collectives(compiled.as_text()) == {}
  for actual, expected_part in zip(run(kv, where, q), expected, strict=True):
    # float32, summed in another order.
    np.testing.assert_allclose(actual, expected_part, rtol=1e-6, atol=1e-6)


@needs_two
def test_head_sharding_needs_a_named_axis():
  mesh = _mesh()
  for spec in (P(), P(None), P(None, "heads")):
    with pytest.raises(
      ValueError, match="`head_sharding` must be a NamedSharding ove"
    ):
      memory.attend(
        make(),
        view(_TABLE, _STARTS, [1, 1, 0]),
        1,
        draw(0, 3, 1, HEADS, DIM),
        head_sharding=NamedSharding(mesh, spec),
      )


@pytest.mark.slow
@pytest.mark.parametrize(
  ("target", "backend"),
  [
    pytest.param(target, name, marks=needs(target), id=f"{target}-{name}")
    for target in ("h200", "v5e")
    for name in for_target(target)
  ],
)
def test_kernels_on_four_devices_stay_in_place(target, backend):
  """XLA would gather the pages for a Triton kernel, and refuses Mosaic's."""
  mesh = mesh_of(target, "heads", 4)
  options = {"storage_dtype": "bfloat16", "head_dim": 128, "num_kv_heads": 8}
  fields = {"num_pages": 1024, "page_size": 16}
  kv = jax.eval_shape(lambda: make("bfloat16", **options, **fields))

  def step(kv, where, q):
    new = q[:, :, ::2]
    kv = memory.write(kv, where, 1, new, new)
    head_sharding = NamedSharding(mesh, P("heads"))
    return memory.attend(
      kv, where, 1, q, backend=backend, head_sharding=head_sharding
    ), kv

  def placed(tree, *spec):
    where = NamedSharding(mesh, P(*spec))
    return jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
      tree,
    )

  arguments = (
    placed(kv, None, "heads"),
    placed(view([[1, 2, 3, 4]] * 8, [60] * 8, [1] * 8)),
    placed(jnp.zeros((8, 1, 16, 128), jnp.bfloat16), None, None, "heads"),
  )
  with jax.set_mesh(mesh):
    lowered = jax.jit(step, donate_argnums=0).trace(*arguments).lower()
  options = {"xla_backend_optimization_level": 3} if target == "h200" else {}
  compiled = lowered.compile(compiler_options=options)
  assert collectives(compiled.as_text()) == {}
  pool = (LAYERS * 1024, 8 // 4, 16, 128)
  assert pool_sized_rewrites(compiled, pool) == []
  if backend != "xla":
    assert re.search("triton|tpu_custom_call|mosaic_gpu", compiled.as_text())
