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


def plan_of(rows):
  return kernels.plan_decode(jnp.ones(rows, jnp.int32), workers=2)


def packed(**changes):
  """A valid call with packed queries, changed."""
  call = arguments(q=jnp.ones((3, 4, 8)))
  call["kv_lens"] = call.pop("lengths")
  call["cu_q_lens"] = jnp.asarray([0, 1, 3], jnp.int32)
  return {**call, **changes}


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
      ({"window": np.int32(0)}, "window=0"),
      ({"window": True}, "window=True"),
      ({"window": 2**31}, "window=2147483648"),
      ({"soft_cap": np.inf}, "soft_cap=inf"),
      ({"soft_cap": np.nan}, "soft_cap=nan"),
      ({"soft_cap": True}, "soft_cap=True"),
      ({"page_offset": 2**31}, "page_offset=2147483648"),
      ({"sinks": [1.0] * 4}, "sinks is of type list"),
      ({"page_table": [[1]]}, "page_table is of type list"),
      ({"k_scale": 1.0, "v_scale": 1.0}, "k_scale is of type float"),
      ({"plan": "junk"}, "plan is str; it must be what plan_decode gives"),
      ({"plan": plan_of(3)}, "plan is for 3 rows but q has 2"),
      ({"plan": plan_of(2)._replace(row=jnp.ones(3))}, "plan.row is float32"),
      ({"q": jnp.ones((0, 4, 8))}, r"q has shape \(0, 4, 8\)"),
      ({"q": jnp.ones((2, 0, 8))}, r"q has shape \(2, 0, 8\)"),
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

  @pytest.mark.parametrize(
    ("changes", "message"),
    [
      ({"q": jnp.ones((0, 4, 8))}, "q has shape"),
      ({"page_table": jnp.int32(1)}, r"page_table has shape \(\)"),
      ({"page_table": jnp.ones((0, 3), jnp.int32)}, "page_table has shape"),
      ({"kv_lens": jnp.ones(3, jnp.int32)}, "kv_lens has shape"),
      ({"cu_q_lens": jnp.ones(2, jnp.int32)}, "cu_q_lens has shape"),
    ],
  )
  def test_bad_packed_arguments(self, changes, message):
    with pytest.raises(ValueError, match=message):
      kernels.paged_attention(**packed(**changes))

  def test_devices_of_packed_arguments(self):
    cpus = jax.devices("cpu")
    call = jax.device_put(packed(), cpus[0])
    call["cu_q_lens"] = jax.device_put(call["cu_q_lens"], cpus[1])
    with pytest.raises(ValueError, match=r"cu_q_lens is on .*:1 but q on"):
      kernels.paged_attention(**call)

  @pytest.mark.parametrize(
    "name", ["k_pages", "page_table", "lengths", "sinks", "v_scale"]
  )
  def test_devices(self, name):
    cpus = jax.devices("cpu")
    scales = {"k_scale": jnp.ones(2), "v_scale": jnp.ones(2)}
    call = arguments(sinks=jnp.ones(4), **scales)
    call = jax.device_put(call, cpus[0])
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
    with pytest.raises(ValueError, match="max_query_len"):
      kernels.paged_attention(**packed(), max_query_len=longest)

  @pytest.mark.parametrize("lengths", [jnp.zeros((0,), jnp.int32), [1, 2]])
  def test_a_plan_of_no_rows(self, lengths):
    with pytest.raises(ValueError, match="lengths "):
      kernels.plan_decode(lengths, workers=1)

  def test_good_arguments(self):
    out = kernels.paged_decode(**arguments(), plan=plan_of(2))
    np.testing.assert_array_equal(out, np.ones((2, 4, 8)))
