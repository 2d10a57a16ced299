"""Bad arguments of the functions on plain arrays, and the error messages."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv_kernels as kernels
from tests.kernels.backends import call_of

POOL, IDS = jnp.ones((5, 2, 4, 8)), jnp.ones(3, jnp.int32)
BYTES, NEW = jnp.ones(POOL.shape, jnp.int8), jnp.ones((3, 2, 8))
ATTENTION = {
  "page_offset": jnp.int32(0),
  "scale": jnp.float32(1),
  "window": jnp.int32(3),
  "sinks": jnp.ones(4),
  "alibi_slopes": jnp.ones(4),
  "k_scale": jnp.ones(2),
  "v_scale": jnp.ones(2),
}


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


def packed(**changes):
  """A valid call with packed queries, changed."""
  call = arguments(q=jnp.ones((3, 4, 8)))
  call["kv_lens"] = call.pop("lengths")
  call["cu_q_lens"] = jnp.asarray([0, 1, 3], jnp.int32)
  return {**call, **changes}


# A valid call of each function, with arrays for as many arguments as possible.
CALLS = {
  "append_pages": {
    "pages": BYTES,
    "new": NEW,
    "page_ids": IDS,
    "offsets": IDS,
    "page_offset": jnp.int32(0),
    "scale": jnp.ones(2),
  },
  "copy_pages": {"pages": POOL, "src": IDS, "dst": IDS, "num_layers": 1},
  "load": {"stored": BYTES},
  "merge_states": {"out": NEW, "lse": NEW[..., 0]},
  "quantize": {"values": NEW, "pool_dtype": "uint8"},
  "store": {"values": NEW, "pool_dtype": "uint16"},
  "paged_decode": arguments(**ATTENTION),
  "paged_attention": packed(**ATTENTION, tree_mask=jnp.ones((3, 2), bool)),
}
OPTIONS = {field.name for field in dataclasses.fields(kernels.AttentionOptions)}
over_functions = pytest.mark.parametrize("function", CALLS)


def takes_options(function):
  return "options" in inspect.signature(getattr(kernels, function)).parameters


def run(function, **call):
  call = call_of(**call) if takes_options(function) else call
  return getattr(kernels, function)(**call)


def shown(function, name):
  """The name of an argument in errors."""
  inside = takes_options(function) and name in OPTIONS
  return f"`options.{name}`" if inside else f"`{name}`"


def refusal(function, changes):
  """The error message for a function's valid call with some changes."""
  with pytest.raises((TypeError, ValueError)) as caught:
    run(function, **{**CALLS[function], **changes})
  return str(caught.value)


class TestEveryFunction:
  @over_functions
  def test_names_arguments_that_are_not_arrays(self, function):
    parameters = inspect.signature(getattr(kernels, function)).parameters
    for name in CALLS[function]:
      inside = takes_options(function) and name in OPTIONS
      optional = inside or parameters[name].default is None
      missing = () if optional else (None,)
      for value in ("junk", [1.0], (), object(), *missing):
        message = refusal(function, {name: value})
        assert message.startswith(f"{shown(function, name)} must be"), (
          value,
          message,
        )

  @over_functions
  def test_names_arguments_on_another_device(self, function):
    cpus = jax.devices("cpu")
    arrays = {
      name: jax.device_put(value, cpus[0])
      for name, value in CALLS[function].items()
      if isinstance(value, jax.Array)
    }
    first_name, *names = arrays
    for name in names:
      moved = {name: jax.device_put(arrays[name], cpus[1])}
      message = refusal(function, arrays | moved)
      expected = f"must be on {cpus[0]} like {first_name}, got"
      assert message.startswith(f"{shown(function, name)} {expected}"), message

  @pytest.mark.slow
  @over_functions
  def test_takes_numpy_arrays(self, function):
    """Also as constants under `jit`."""
    call = CALLS[function]
    numpy = {
      name: np.asarray(value) if isinstance(value, jax.Array) else value
      for name, value in call.items()
    }
    verb = functools.partial(run, function)
    expected = verb(**call)
    for out in (verb(**numpy), jax.jit(lambda: verb(**numpy))()):
      assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(out))
      jax.tree.map(np.testing.assert_array_equal, out, expected)

  @pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
      ("append_pages", {"scale": None}, "`new` .* float32; `quantize` it"),
      ("append_pages", {"new": NEW.astype(jnp.int8)}, "`new` must be floats"),
      ("append_pages", {"new": NEW.astype(jnp.uint8)}, "`new` .* got uint8"),
      ("append_pages", {"page_ids": IDS[None]}, "`page_ids` must be a vector"),
      ("append_pages", {"pages": POOL[0]}, "`new` must be"),
      ("append_pages", {"pages": POOL[0, 0]}, r"`pages` must be \[N, K, S, D"),
      ("copy_pages", {"num_layers": 0}, "`num_layers` .* at least 1, got 0"),
      ("copy_pages", {"num_layers": 2.0}, "`num_layers` .* int .* got 2.0"),
      ("copy_pages", {"num_layers": 2}, "`num_layers` .* divisor .* got 2"),
      ("copy_pages", {"src": IDS[None]}, "`src` must be a vector"),
      ("copy_pages", {"dst": IDS[:1]}, r"`dst` must be int32\[3\], got int32"),
      ("load", {"stored": IDS}, "`stored` must be float32, .*got int32; use"),
      ("store", {"values": NEW > 0}, "`values` must be floats or integers"),
      ("store", {"pool_dtype": "int16"}, "`pool_dtype` .* got int16"),
      ("quantize", {"pool_dtype": "uint16"}, "`pool_dtype` .* to have scales"),
      ("quantize", {"values": jnp.float32(1)}, r"`values` .* got float32\[\]"),
      ("quantize", {"values": NEW[..., :0]}, r"`values` .*\[3, 2, 0\]"),
    ],
  )
  def test_bad_arguments(self, function, changes, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
      getattr(kernels, function)(**{**CALLS[function], **changes})


class TestErrors:
  @pytest.mark.parametrize(
    ("changes", "message"),
    [
      ({"q": jnp.ones((2, 4, 1, 8))}, r"`q` must be \[B, H, D\]"),
      ({"q": jnp.ones((2, 4, 8), jnp.int32)}, "`q` must be float32, bfloat16"),
      ({"q": jnp.ones((2, 3, 8))}, "multiple of 2, .* got 3"),
      (
        {"q": jnp.ones((2, 4, 6))},
        r"`k_pages` .*, 6\], with the head size",
      ),
      ({"k_pages": jnp.ones((2, 4, 8))}, r"`k_pages` must be \[N, K, S, D\]"),
      ({"k_pages": jnp.ones((0, 2, 4, 8))}, "`k_pages` .* no axis of size 0"),
      (
        {"k_pages": jnp.ones((5, 2, 4, 8), jnp.int32)},
        "`k_pages` must be float32, .* got int32",
      ),
      (
        {"v_pages": jnp.ones((5, 2, 4, 8), jnp.float16)},
        "`v_pages` must be float32, the dtype of k_pages",
      ),
      (
        {"v_pages": jnp.ones((4, 2, 4, 8))},
        r"`v_pages` must be \[5, 2, 4, Dv\], like k_pages, got float32\[4, ",
      ),
      (
        {"page_table": jnp.ones((3, 3), jnp.int32)},
        r"`page_table` .* int32\[2",
      ),
      ({"page_table": jnp.ones((2, 0), jnp.int32)}, "`page_table` .* M >= 1"),
      ({"page_table": jnp.ones((2, 3), jnp.int16)}, "`page_table` .* int16"),
      (
        {"lengths": jnp.ones(3, jnp.int32)},
        r"`lengths` .* int32\[2\], got",
      ),
      ({"lengths": jnp.ones(2)}, "`lengths` .* got float32; cast it with"),
      ({"page_offset": 1.5}, "`page_offset` .* integer scalar, got 1.5"),
      ({"scale": jnp.ones(2)}, r"`options.scale` .* got float32\[2\]"),
      ({"soft_cap": 0.0}, "`options.soft_cap` .* above 0, or None, got 0.0"),
      ({"window": 0}, "`options.window` must be at least 1, or None, got 0"),
      ({"window": 2.0}, "`options.window` must be an integer scalar, got 2.0"),
      ({"window": np.int32(0)}, r"`options.window` .* got np.int32\(0\)"),
      ({"window": True}, "`options.window` must be an integer .*, got True"),
      ({"window": 2**31}, "`options.window` .* fits int32, got 2147483648"),
      ({"soft_cap": np.inf}, "`options.soft_cap` must be a finite .* got inf"),
      ({"soft_cap": np.nan}, "`options.soft_cap` must be a finite .* got nan"),
      ({"soft_cap": True}, "`options.soft_cap` .* got True"),
      ({"page_offset": 2**31}, "`page_offset` .* fits int32, got 2147483648"),
      ({"q": jnp.ones((0, 4, 8))}, r"`q` .* got float32\[0, 4, 8\]"),
      ({"q": jnp.ones((2, 0, 8))}, r"`q` .* got float32\[2, 0, 8\]"),
      ({"sinks": jnp.ones(2)}, r"`options.sinks` must be float\[4\], one"),
      ({"alibi_slopes": jnp.ones(2)}, r"`options.alibi_slopes` must be float"),
      ({"k_scale": jnp.ones(2)}, "`options.v_scale` .* got None; give both"),
      (
        {"k_scale": jnp.ones(4)},
        r"`options.k_scale` must be float32\[2\], .* got float32\[4\]",
      ),
      ({"v_scale": jnp.ones(2, jnp.int8)}, "`options.v_scale` .* got int8"),
      (
        {"tree_mask": jnp.ones((2, 1, 1), bool)},
        "`options.tree_mask` must be None, .*; trees need several queries",
      ),
      ({"options": {"window": 3}}, "`options` must be an AttentionOptions"),
    ],
  )
  def test_bad_arguments(self, changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
      kernels.paged_decode(**call_of(**arguments(**changes)))

  @pytest.mark.parametrize(
    ("changes", "message"),
    [
      ({"q": jnp.ones((0, 4, 8))}, r"`q` must be \[T, H, D\]"),
      ({"page_table": jnp.int32(1)}, r"`page_table` .* int32\[\]"),
      ({"page_table": jnp.ones((0, 3), jnp.int32)}, "`page_table` .* B >= 1"),
      ({"kv_lens": jnp.ones(3, jnp.int32)}, "`kv_lens` must be"),
      ({"cu_q_lens": jnp.ones(2, jnp.int32)}, "`cu_q_lens` must be"),
    ],
  )
  def test_bad_packed_arguments(self, changes, message):
    with pytest.raises(ValueError, match=message):
      kernels.paged_attention(**packed(**changes))

  def test_unknown_backend(self):
    with pytest.raises(NotImplementedError, match="one of auto, mosaic_gpu"):
      kernels.paged_decode(**arguments(), backend="cudnn")

  @pytest.mark.parametrize("call", [arguments(), packed()])
  def test_a_backend_for_another_platform(self, call):
    """An error outside a trace; a trace may be compiled for that platform."""
    verb = "paged_decode" if "lengths" in call else "paged_attention"
    call = jax.device_put(call, jax.devices("cpu")[0])
    run = functools.partial(getattr(kernels, verb), backend="triton")
    message = (
      f"'triton' does not serve {verb}: the platform must be cuda, got cpu"
    )
    with pytest.raises(NotImplementedError, match=message):
      run(**call)
    jax.jit(run).trace(**call)
    jax.jit(lambda: run(**call)).trace()

  @pytest.mark.parametrize("backend", ["auto", "xla"])
  def test_interpret_needs_something_to_interpret(self, backend):
    with pytest.raises(ValueError, match="`interpret` must be False with"):
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
    options = kernels.AttentionOptions(tree_mask=mask)
    message = r"`options.tree_mask` must be bool\[2, 1, X\]"
    with pytest.raises((TypeError, ValueError), match=message):
      kernels.paged_attention_padded(**call, options=options)

  @pytest.mark.parametrize(
    ("query_tile", "message"),
    [
      (0, "`query_tile` must be a Python int of at least 1, got 0"),
      (2.0, "`query_tile` must be a Python int .* got 2.0"),
      (2, "`options.tree_mask` must be None"),
    ],
  )
  def test_bad_query_tile(self, query_tile, message):
    call = arguments(q=jnp.ones((2, 1, 4, 8)), starts=jnp.ones(2, jnp.int32))
    call["counts"] = call.pop("lengths")
    options = kernels.AttentionOptions(tree_mask=jnp.ones((2, 1, 3), bool))
    with pytest.raises((TypeError, ValueError), match=message):
      kernels.paged_attention_padded(
        **call, options=options, query_tile=query_tile
      )

  @pytest.mark.parametrize("longest", [0, 2.5])
  def test_bad_max_query_len(self, longest):
    with pytest.raises((TypeError, ValueError), match="`max_query_len` must"):
      kernels.paged_attention(**packed(), max_query_len=longest)

  def test_good_arguments(self):
    out, _ = kernels.paged_decode(**arguments())
    np.testing.assert_array_equal(out, np.ones((2, 4, 8)))
