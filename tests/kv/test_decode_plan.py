"""A decode step's plan, made once and used in every layer."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

import jaxkv
import jaxkv_kernels as kernels
from jaxkv import kv as memory
from tests.kv.memory import draw
from tests.tools.traced_loops import equations
from tests.tools.traced_loops import in_loops

LAYERS, HEADS, KV_HEADS, DIM, SIZE = 2, 4, 2, 64, 16


@pytest.fixture(scope="module")
def step():
  """Memory of bfloat16, a view of four rows, and queries."""
  config = jaxkv.CacheConfig(
    num_pages=32, page_size=SIZE, num_slots=4, pages_per_slot=8
  )
  kv = memory.init(
    config,
    num_layers=LAYERS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    dtype=jnp.bfloat16,
    storage_dtype=jnp.bfloat16,
  )
  k, v = (draw(seed, *kv.k.shape, dtype="bfloat16") for seed in (0, 1))
  kv = dataclasses.replace(kv, k=k, v=v)
  tables = np.random.default_rng(2).permutation(32).reshape(4, 8)
  view = memory.View(
    page_table=jnp.asarray(tables, jnp.int32),
    starts=jnp.asarray([120, 10, 0, 70], jnp.int32),
    num_tokens=jnp.asarray([1, 0, 1, 1], jnp.int32),
  )
  return kv, view, draw(3, 4, 1, HEADS, DIM, dtype="bfloat16")


def layers(kv, view, q, backend):
  def layer(q, index):
    return q + memory.attend(kv, view, index, q, backend=backend), None

  return jax.lax.scan(layer, q, jnp.arange(LAYERS, dtype=jnp.int32))[0]


class TestPlan:
  @pytest.mark.slow
  @pytest.mark.skipif(
    jax.default_backend() != "cpu" or jax.__version_info__ < (0, 11),
    reason="interpreted on a CPU; before jax 0.11 that takes a minute",
  )
  @pytest.mark.parametrize(
    ("starts", "num_tokens"),
    [([120, 10, 0, 70], [1, 0, 1, 1]), ([5, 40, 127, 71], [1, 1, 1, 0])],
    ids=["its own", "later"],
  )
  def test_attention_with_a_plan_equals_xla(
    self, step, monkeypatch, starts, num_tokens
  ):
    """A plan of these rows, or of the rows of an earlier step."""
    kv, view, q = step
    pieces = memory.plan_decode(kv, view, backend="mosaic_gpu").plan
    assert pieces is not None
    view = dataclasses.replace(
      view,
      starts=jnp.asarray(starts, jnp.int32),
      num_tokens=jnp.asarray(num_tokens, jnp.int32),
    )
    expected = memory.attend_with_lse(kv, view, 1, q, backend="xla")
    plans = []

    def interpreted(*arguments, plan, **options):
      plans.append(plan)
      return paged_decode(*arguments, plan=plan, **options)

    paged_decode = functools.partial(
      kernels.paged_decode, interpret=InterpretGPUParams(detect_races=True)
    )
    monkeypatch.setattr(kernels, "paged_decode", interpreted)
    # Calls that have been traced before would not be traced again.
    importlib.import_module("jaxkv._src.kv.attend")._attend.clear_cache()
    view = dataclasses.replace(view, plan=pieces)
    out, lse = memory.attend_with_lse(kv, view, 1, q, backend="mosaic_gpu")
    assert [plan is not None for plan in plans] == [True]
    np.testing.assert_allclose(
      np.asarray(out, np.float32),
      np.asarray(expected[0], np.float32),
      atol=2e-2,  # Two roundings to bfloat16 of numbers up to 2.
    )
    np.testing.assert_allclose(lse, expected[1], atol=1e-4)

  def test_layers_do_not_plan_again(self, step):
    """With a plan no layer computes a prefix sum over the rows' pieces."""
    kv, view, q = step
    for planned in (False, True):
      if planned:
        view = memory.plan_decode(kv, view, backend="mosaic_gpu")
      decode = functools.partial(layers, backend="mosaic_gpu")
      names = {
        equation.primitive.name for equation in in_loops(decode, kv, view, q)
      }
      assert ("cumsum" in names) != planned

  @pytest.mark.parametrize("backend", ["xla", "triton", "mosaic_tpu", "auto"])
  def test_backends_without_plans(self, step, backend):
    kv, view, _ = step
    assert memory.plan_decode(kv, view, backend=backend).plan is None

  def test_ignored_plans_add_no_equation(self, step):
    kv, view, q = step
    planned = memory.plan_decode(kv, view, backend="mosaic_gpu")
    without, with_plan = (
      [
        str(equation.primitive)
        for equation in equations(memory.attend, kv, at, 1, q)
      ]
      for at in (view, planned)
    )
    assert without == with_plan
    np.testing.assert_array_equal(
      memory.attend(kv, planned, 1, q), memory.attend(kv, view, 1, q)
    )

  def test_several_columns_ignore_a_plan(self, step):
    """Attention over several columns ignores it."""
    kv, view, q = step
    planned = memory.plan_decode(kv, view, backend="mosaic_gpu")
    wide = jnp.broadcast_to(q, (4, 3, HEADS, DIM))
    np.testing.assert_array_equal(
      memory.attend(kv, planned, 1, wide), memory.attend(kv, view, 1, wide)
    )

  def test_pieces_cover_the_tokens_of_each_row(self, step):
    """The new token counts, and a row that is idle has one empty piece."""
    kv, view, _ = step
    view = dataclasses.replace(
      view, starts=jnp.asarray([64, 127, 63, 0], jnp.int32)
    )
    plan = memory.plan_decode(kv, view, backend="mosaic_gpu").plan
    assert plan is not None
    # 65 tokens are two blocks of 64; rows 2 and 3 have one.
    np.testing.assert_array_equal(plan.begins, [0, 2, 3, 4, 5])
    np.testing.assert_array_equal(plan.tokens, 64)

  def test_plans_keep_shared_pages(self, step):
    kv, view, _ = step
    view = memory.share(kv, view, num_clusters=1, cluster_size=2)
    assert memory.plan_decode(kv, view).shared is view.shared

  def test_bad_arguments(self, step):
    kv, view, q = step
    with pytest.raises(NotImplementedError, match=r"`backend` .* got 'cuda'"):
      memory.plan_decode(kv, view, backend="cuda")
    with pytest.raises(ValueError, match="`window` must be at least 1"):
      memory.plan_decode(kv, view, window=0, backend="mosaic_gpu")
    planned = memory.plan_decode(kv, view, backend="mosaic_gpu")
    fewer = {
      name: getattr(view, name)[:3]
      for name in ("page_table", "starts", "num_tokens")
    }
    with pytest.raises(ValueError, match="`plan` must be for the 3 rows"):
      memory.attend(kv, dataclasses.replace(planned, **fewer), 1, q[:3])
