"""What the attention functions refuse, and what they say."""

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
      ({"k_pages": jnp.ones((5, 2, 4, 8), jnp.uint8)}, "uint8 is reserved"),
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
    ],
  )
  def test_bad_arguments(self, changes, message):
    with pytest.raises(ValueError, match=message):
      kernels.paged_decode(**arguments(**changes))

  def test_unknown_backend(self):
    with pytest.raises(NotImplementedError, match="there are auto, xla"):
      kernels.paged_decode(**arguments(), backend="triton")

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
