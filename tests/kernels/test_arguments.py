"""What the functions on plain arrays refuse, and what they say."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv_kernels as kernels

POOL, IDS = jnp.ones((5, 2, 4, 8)), jnp.ones(3, jnp.int32)
BYTES, NEW = jnp.ones(POOL.shape, jnp.int8), jnp.ones((3, 2, 8))
PLACES = {"page_ids": IDS, "offsets": IDS, "page_offset": jnp.int32(0)}
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


def plan_of(rows):
  return kernels.plan_decode(jnp.ones(rows, jnp.int32), workers=2)


def packed(**changes):
  """A valid call with packed queries, changed."""
  call = arguments(q=jnp.ones((3, 4, 8)))
  call["kv_lens"] = call.pop("lengths")
  call["cu_q_lens"] = jnp.asarray([0, 1, 3], jnp.int32)
  return {**call, **changes}


def appended(**sides):
  """Arguments of a call that appends the same as keys and as values."""
  both = {f"{side}_{name}": sides[name] for name in sides for side in "kv"}
  return {**both, **PLACES}


# A valid call of each function, as many arguments arrays as can be.
CALLS = {
  "append_kv": appended(pages=BYTES, new=NEW, scale=jnp.ones(2)),
  "append_quantized": appended(pages=BYTES, new=NEW, scale=POOL[..., 0]),
  "append_pages": {"pages": POOL, "new": NEW, **PLACES},
  "copy_pages": {"pages": POOL, "src": IDS, "dst": IDS, "num_layers": 1},
  "gather_pages": {
    "pages": POOL,
    "page_table": IDS[None],
    "page_offset": jnp.int32(0),
  },
  "load": {"stored": BYTES},
  "merge_states": {"out": NEW, "lse": NEW[..., 0]},
  "quantize": {"values": NEW, "pool_dtype": "uint8"},
  "store": {"values": NEW, "pool_dtype": "uint16"},
  "mla_decode": {
    "q": jnp.ones((2, 4, 8)),
    "pages": jnp.ones((5, 1, 4, 8)),
    "page_table": jnp.ones((2, 3), jnp.int32),
    "lengths": jnp.ones(2, jnp.int32),
    "value_dim": 6,
    "scale": jnp.float32(1),
    "latent_scale": jnp.ones(1),
  },
  "paged_decode": arguments(**ATTENTION),
  "paged_attention": packed(**ATTENTION, tree_mask=jnp.ones((3, 2), bool)),
}
over_functions = pytest.mark.parametrize("function", CALLS)


def refusal(function, changes):
  """What a function says of its valid call, changed."""
  with pytest.raises(ValueError) as caught:
    getattr(kernels, function)(**{**CALLS[function], **changes})
  return str(caught.value)


class TestEveryFunction:
  @over_functions
  def test_names_what_is_no_array_and_no_number(self, function):
    known = inspect.signature(getattr(kernels, function)).parameters
    for name in CALLS[function]:
      nothing = () if known[name].default is None else (None,)
      for value in ("junk", [1.0], (), object(), *nothing):
        said = refusal(function, {name: value})
        assert said.startswith((f"{name} ", f"{name}=")), (value, said)

  @over_functions
  def test_names_what_is_on_another_device(self, function):
    cpus = jax.devices("cpu")
    arrays = {
      name: jax.device_put(value, cpus[0])
      for name, value in CALLS[function].items()
      if isinstance(value, jax.Array)
    }
    first, *others = arrays
    for name in others:
      moved = {name: jax.device_put(arrays[name], cpus[1])}
      said = refusal(function, arrays | moved)
      assert said.startswith(f"{name} is on {cpus[1]} but {first} on"), said

  @over_functions
  def test_takes_arrays_of_numpy(self, function):
    """Those of a call under `jit`, constants, too."""
    verb, call = getattr(kernels, function), CALLS[function]
    numpy = {
      name: np.asarray(value) if isinstance(value, jax.Array) else value
      for name, value in call.items()
    }
    wanted = verb(**call)
    for out in (verb(**numpy), jax.jit(lambda: verb(**numpy))()):
      assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(out))
      jax.tree.map(np.testing.assert_array_equal, out, wanted)

  @pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
      ("append_pages", {"pages": BYTES}, "new is float32 .* `quantize` it"),
      ("append_pages", {"new": NEW.astype(jnp.int8)}, "new is int8"),
      ("append_pages", {"page_ids": IDS[None]}, "page_ids has shape"),
      ("append_kv", {"k_scale": None}, "k_new is float32 .* `quantize` it"),
      ("append_kv", {"v_scale": None}, "v_new is float32 .* `quantize` it"),
      ("append_kv", {"k_new": NEW.astype(jnp.int8)}, "k_new is int8, elements"),
      ("append_kv", {"v_new": NEW.astype(jnp.uint8)}, "v_new is uint8"),
      ("append_quantized", {"v_new": NEW.astype(jnp.int8)}, "v_new is int8, "),
      (
        "append_quantized",
        {"k_pages": POOL, "v_pages": POOL},
        "k_pages is float32, and .* takes no scales",
      ),
      ("copy_pages", {"num_layers": 0}, "num_layers=0"),
      ("copy_pages", {"num_layers": 2.0}, "num_layers=2.0"),
      ("copy_pages", {"num_layers": 2}, "num_layers=2 does not divide"),
      ("copy_pages", {"src": IDS[None]}, "src has shape"),
      ("copy_pages", {"dst": IDS[:1]}, "dst has shape"),
      ("gather_pages", {"page_table": IDS}, "page_table has shape"),
      ("gather_pages", {"page_offset": np.int64(2**31)}, "page_offset="),
      ("load", {"stored": IDS}, "stored is int32; a pool is float32, "),
      ("store", {"values": NEW > 0}, "values is bool"),
      ("store", {"pool_dtype": "int16"}, "pool_dtype is int16; a pool is"),
      ("quantize", {"pool_dtype": "uint16"}, "pool_dtype is uint16, and .* no"),
      ("quantize", {"values": jnp.float32(1)}, r"values has shape \(\)"),
      ("quantize", {"values": NEW[..., :0]}, r"values has shape \(3, 2, 0\)"),
    ],
  )
  def test_bad_arguments(self, function, changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
      getattr(kernels, function)(**{**CALLS[function], **changes})


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
      (
        {"k_pages": jnp.ones((5, 2, 4, 8), jnp.int32)},
        "k_pages is int32; a pool is",
      ),
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

  def test_unknown_backend(self):
    with pytest.raises(NotImplementedError, match="there are auto, mosaic"):
      kernels.paged_decode(**arguments(), backend="cudnn")

  @pytest.mark.parametrize("call", [arguments(), packed()])
  def test_a_backend_for_another_platform(self, call):
    """Outside a trace; what is traced may be compiled for that platform."""
    verb = "paged_decode" if "lengths" in call else "paged_attention"
    call = jax.device_put(call, jax.devices("cpu")[0])
    run = functools.partial(getattr(kernels, verb), backend="triton")
    message = (
      f"'triton' does not serve {verb}: the platform is cpu; .* cuda, or"
    )
    with pytest.raises(NotImplementedError, match=message):
      run(**call)
    jax.jit(run).trace(**call)
    jax.jit(lambda: run(**call)).trace()

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
