"""What the attention functions refuse, and what they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv_kernels as kernels


def arguments(**changes):
  """A valid decode call, changed."""
  return {
    "q": jnp.ones((2, 4, 8)),
    "k_pages": jnp.ones((5, 2, 4, 8)),
    "v_pages": jnp.ones((5, 2, 4, 8)),
    "page_table": jnp.ones((2, 3), jnp.int32),
    "lengths": jnp.ones(2, jnp.int32),
    **changes,
  }


class TestErrors:
  @pytest.mark.parametrize(
    ("changes", "message"),
    [
      ({"q": jnp.ones((2, 4, 1, 8))}, r"q has shape \(2, 4, 1, 8\)"),
      ({"q": jnp.ones((2, 4, 8), jnp.int32)}, "q is int32"),
      ({"q": jnp.ones((2, 3, 8))}, "q has 3 heads and k_pages 2"),
      ({"q": jnp.ones((2, 4, 6))}, "head size 8 but q has 6"),
      ({"k_pages": jnp.ones((2, 4, 8))}, "k_pages has shape"),
      ({"k_pages": jnp.ones((0, 2, 4, 8))}, "k_pages has shape"),
      ({"k_pages": jnp.ones((5, 2, 4, 8), jnp.int32)}, "pool dtype int32"),
      ({"v_pages": jnp.ones((5, 2, 4, 8), jnp.float16)}, "v_pages is float16"),
      ({"v_pages": jnp.ones((4, 2, 4, 8))}, "all but the last axis"),
      ({"page_table": jnp.ones((3, 3), jnp.int32)}, "page_table has shape"),
      ({"page_table": jnp.ones((2, 0), jnp.int32)}, "page_table has shape"),
      ({"page_table": jnp.ones((2, 3), jnp.int16)}, "page_table is int16"),
      ({"lengths": jnp.ones(3, jnp.int32)}, "lengths has shape"),
      ({"lengths": jnp.ones(2)}, "lengths is float32"),
      ({"page_offset": 1.5}, "page_offset=1.5"),
      ({"scale": jnp.ones(2)}, "scale="),
      ({"soft_cap": 0.0}, "soft_cap=0.0"),
      ({"window": 0}, "window=0"),
      ({"window": 2.0}, "window=2.0"),
      ({"sinks": jnp.ones(2)}, r"sinks is float32\[2\]"),
      ({"alibi_slopes": jnp.ones(2)}, r"alibi_slopes is float32\[2\]"),
      ({"k_scale": jnp.ones(2)}, "k_scale and v_scale: give both"),
      ({"k_scale": jnp.ones(4)}, r"k_scale is float32\[4\].*float32\[2\]"),
      ({"v_scale": jnp.ones(2, jnp.int8)}, r"v_scale is int8"),
    ],
  )
  def test_bad_arguments(self, changes, message):
    with pytest.raises(ValueError, match=message):
      kernels.paged_decode(**arguments(**changes))

  @pytest.mark.parametrize("name", ["k_pages", "page_table", "lengths"])
  def test_devices(self, name):
    cpus = jax.devices("cpu")
    call = jax.device_put(arguments(), cpus[0])
    call[name] = jax.device_put(call[name], cpus[1])
    with pytest.raises(ValueError, match=f"{name} is on .*:1 but q on"):
      kernels.paged_decode(**call)

  def test_unknown_backend(self):
    with pytest.raises(NotImplementedError, match="there are auto, mosaic"):
      kernels.paged_decode(**arguments(), backend="cudnn")

  @pytest.mark.parametrize("backend", ["auto", "xla"])
  def test_interpret_needs_something_to_interpret(self, backend):
    with pytest.raises(ValueError, match="interpret=True with backend"):
      kernels.paged_decode(**arguments(), backend=backend, interpret=True)

  @pytest.mark.parametrize(
    "mask",
    [
      jnp.ones((2, 1, 3), jnp.int32),
      jnp.ones((2, 3), bool),
      jnp.ones((2, 2, 3), bool),
      jnp.ones((2, 1, 0), bool),
    ],
  )
  def test_bad_tree_mask(self, mask):
    call = arguments(q=jnp.ones((2, 1, 4, 8)), starts=jnp.ones(2, jnp.int32))
    call["counts"] = call.pop("lengths")
    with pytest.raises(ValueError, match=r"tree_mask is .* bool"):
      kernels.paged_attention_padded(**call, tree_mask=mask)

  @pytest.mark.parametrize(
    ("changes", "message"),
    [
      ({"workers": 0}, "workers=0"),
      ({"workers": 1, "block": 2.0}, "block=2.0"),
      ({"workers": 1, "window": 0}, "window=0"),
    ],
  )
  def test_bad_plan(self, changes, message):
    with pytest.raises(ValueError, match=message):
      kernels.plan_decode(jnp.ones(2, jnp.int32), **changes)

  @pytest.mark.parametrize("longest", [0, 2.5])
  def test_bad_max_query_len(self, longest):
    call = arguments(q=jnp.ones((3, 4, 8)))
    call["kv_lens"] = call.pop("lengths")
    with pytest.raises(ValueError, match="max_query_len"):
      kernels.paged_attention(
        **call,
        cu_q_lens=jnp.asarray([0, 1, 3], jnp.int32),
        max_query_len=longest,
      )

  def test_good_arguments(self):
    out = kernels.paged_decode(**arguments())
    np.testing.assert_array_equal(out, np.ones((2, 4, 8)))
