"""The choice of a backend, and its log and errors."""

import logging
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv_kernels as kernels
from jaxkv_kernels._src.attention import choose
from jaxkv_kernels._src.attention.xla import backend as xla

ARGUMENTS = {
  "q": jnp.ones((2, 4, 8)),
  "k_pages": jnp.ones((5, 2, 4, 8)),
  "v_pages": jnp.ones((5, 2, 4, 8)),
  "page_table": jnp.ones((2, 3), jnp.int32),
  "lengths": jnp.ones(2, jnp.int32),
}
CAPPED = kernels.AttentionOptions(soft_cap=30.0)


def unsupported(platform, call):
  """Serves float32 without a soft cap."""
  if call.q.dtype != jnp.float32:
    return f"`q` must be float32, got {call.q.dtype}"
  if call.options.soft_cap is not None:
    return f"`soft_cap` must be None, got {call.options.soft_cap}"
  return None


@pytest.fixture
def particular(monkeypatch):
  """A backend for CPUs, tried first there; its output is all 7."""
  module = types.ModuleType("jaxkv_kernels._src.attention.particular.backend")
  module.unsupported = unsupported
  module.attend = lambda *arguments: tuple(
    jnp.full_like(x, 7) for x in xla.attend(*arguments)
  )
  monkeypatch.setitem(sys.modules, module.__name__, module)
  monkeypatch.setitem(choose._PLATFORMS, "particular", ("cpu", "cuda"))
  monkeypatch.setitem(choose._ORDER, "cpu", ("particular", "xla"))
  monkeypatch.setattr(choose, "BACKENDS", ("auto", "xla", "particular"))
  choose._report.cache_clear()
  yield
  choose._report.cache_clear()


@pytest.mark.skipif(
  jax.default_backend() != "cpu", reason="tests the choice on a CPU"
)
class TestAuto:
  def test_the_first_backend_that_serves_is_chosen(self, particular):
    assert (kernels.paged_decode(**ARGUMENTS)[0] == 7).all()

  def test_reasons_of_skipped_backends_are_logged(self, particular, caplog):
    with caplog.at_level(logging.INFO, "jaxkv_kernels"):
      kernels.paged_decode(**ARGUMENTS, options=CAPPED)
      out, _ = kernels.paged_decode(**ARGUMENTS, options=CAPPED)
    np.testing.assert_array_equal(out, 1)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
      "paged_decode on cpu: backend xla (particular: `soft_cap` must be"
      " None, got 30.0)"
    ]

  def test_reasons_are_listed_if_no_backend_serves(
    self, particular, monkeypatch
  ):
    monkeypatch.setitem(choose._ORDER, "cpu", ("particular",))
    with pytest.raises(NotImplementedError, match=r"on cpu: particular: `soft"):
      kernels.paged_decode(**ARGUMENTS, options=CAPPED)


class TestNamed:
  def test_a_named_backend_is_used(self, particular):
    out, _ = kernels.paged_decode(**ARGUMENTS, backend="particular")
    np.testing.assert_array_equal(out, 7)

  def test_a_named_backend_that_does_not_serve_is_an_error(self, particular):
    q = ARGUMENTS["q"].astype(jnp.bfloat16)
    with pytest.raises(
      NotImplementedError,
      match=r"'particular' does not serve paged_decode: `q` must .* bfloat16",
    ):
      kernels.paged_decode(**{**ARGUMENTS, "q": q}, backend="particular")


class TestPlatform:
  def test_of_the_default_backend(self):
    expected = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    assert choose.platform() == expected

  def test_of_the_default_device(self):
    with jax.default_device(jax.devices("cpu")[1]):
      assert choose.platform() == "cpu"

  def test_of_committed_arrays(self, monkeypatch):
    """Their device counts, not the default device."""
    array = jax.device_put(jnp.ones(3), jax.devices("cpu")[1])
    monkeypatch.setattr(choose, "_platform_of", lambda device: str(device.id))
    default_id = str(jax.devices()[0].id)
    assert choose.platform(jnp.ones(3), array) == "1" != default_id
    assert choose.platform(jnp.ones(3)) == default_id
    assert jax.jit(lambda x: jnp.int32(choose.platform(x)))(array) == 0

  def test_of_the_abstract_mesh(self):
    device = jax.sharding.AbstractDevice(
      device_kind="TPU v6 lite", num_cores=1, platform="tpu"
    )
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
      assert choose.platform() == "tpu"
