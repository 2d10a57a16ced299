"""Bad arguments of `jaxkv.kv`, and the names in the errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import jaxkv_kernels as kernels
from jaxkv import kv as memory
from tests.kv.memory import DIM
from tests.kv.memory import HEADS
from tests.kv.memory import KV_HEADS
from tests.kv.memory import LAYERS
from tests.kv.memory import PAGES
from tests.kv.memory import SIZE
from tests.kv.memory import attend_by_name
from tests.kv.memory import make
from tests.kv.memory import view

KV = make()
VIEW = view([[3]], [0], [1])
NEW = jnp.ones((1, 1, KV_HEADS, DIM))
Q = jnp.ones((1, 1, HEADS, DIM))
TABLE = jnp.asarray([[3]], jnp.int32)
ID = jnp.asarray([1], jnp.int32)

attend = functools.partial(attend_by_name, KV, VIEW, 0, Q)


def replaced(**fields):
  return dataclasses.replace(VIEW, **fields)


def share(where):
  return memory.share(KV, where, num_clusters=1, cluster_size=2)


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: memory.write(KV, VIEW, 0, NEW.tolist(), NEW), "`k` .* got list"),
    (lambda: memory.write(KV, VIEW, 0, NEW, None), "`v` .* latents, got None"),
    (lambda: memory.attend(KV, VIEW, 0, Q.tolist()), "`q` .* got list"),
    (lambda: attend(sinks=[0.0] * HEADS), "`options.sinks` .* got list"),
    (lambda: attend(alibi_slopes=(0.0,)), "`options.alibi_slopes` .* tuple"),
    (lambda: attend(tree_mask=[[[True]]]), "`options.tree_mask` .* got list"),
    (lambda: attend(window=[3]), "`options.window` must be .* got list"),
    (lambda: attend(window=0), "`options.window` must be at least 1.* got 0"),
    (lambda: attend(scale=1j), "`options.scale` must be .* got complex"),
    (lambda: attend(k_scale=jnp.ones(2)), "`options.k_scale` must be None"),
    (lambda: attend(options=3), "`options` must be an AttentionOptions"),
    (lambda: memory.attend(KV, None, 0, Q), "`view` must be a View, got None"),
    (lambda: memory.copy(KV, [1], ID), "`src` must be an array, got list"),
    (lambda: memory.copy(KV, ID, [2]), "`dst` must be an array, got list"),
    (lambda: memory.copy(KV, ID, 2), "`dst` must be an array, got int"),
    (lambda: memory.copy(KV, ID, ID.astype(jnp.float32)), "`dst` .* float32"),
  ],
)
def test_arguments_that_are_not_arrays(call, message):
  with pytest.raises((TypeError, ValueError), match=message):
    call()


def test_a_traced_window_is_not_compared():
  """A traced window fits any windowed group, but no group without a window."""
  options = kernels.AttentionOptions(window=3)

  def out_of(group, options):
    where = replaced(kind=group)
    run = functools.partial(memory.attend, KV, where, 0, Q)
    return jax.eval_shape(lambda options: run(options=options), options)

  assert out_of(jaxkv.SlidingWindow(3), options).shape == Q.shape
  with pytest.raises(ValueError, match=r"^`options.window` must be None"):
    out_of(jaxkv.FullAttention(), options)


USES = {
  "write": lambda where: memory.write(KV, where, 0, NEW, NEW),
  "attend": lambda where: memory.attend(KV, where, 0, Q),
  "share": share,
  "refresh_shared": functools.partial(memory.refresh_shared, KV),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"page_table": [[1, 2]]}, "`view.page_table` must be an array, got list"),
    ({"page_table": None}, "`view.page_table` must be .* got NoneType"),
    ({"page_table": ID}, r"`view.page_table` must be .* got int32\[1\]"),
    ({"starts": [0]}, "`view.starts` must be an array, got list"),
    ({"starts": 0}, "`view.starts` must be an array, got int"),
    ({"num_tokens": [1]}, "`view.num_tokens` must be an array, got list"),
    (
      {"num_tokens": jnp.ones(1)},
      "`view.num_tokens` must be int32, got float32",
    ),
  ],
)
def test_views_with_bad_fields(use, fields, message):
  with pytest.raises((TypeError, ValueError), match=message):
    use(replaced(**fields))


READS_LAYER = {
  "write": lambda layer: memory.write(KV, VIEW, layer, NEW, NEW),
  "attend": lambda layer: memory.attend(KV, VIEW, layer, Q),
}


class TestLayers:
  @pytest.mark.parametrize("verb", READS_LAYER.values(), ids=READS_LAYER.keys())
  @pytest.mark.parametrize(
    ("layer", "message"),
    [
      (0.9, "an integer scalar, got 0.9"),
      (1.0, "an integer scalar, got 1.0"),
      ("1", "an integer scalar, got '1'"),
      (None, "an integer scalar, got None"),
      (True, "an integer scalar, got True"),
      ([1], r"an integer scalar, got \[1\]"),
      (np.float32(1), "an integer scalar, got"),
      (jnp.float32(1), "an integer scalar, got float32"),
      (jnp.asarray([1]), r"an integer scalar, got int32\[1\]"),
      (-1, "from 0 to 2, got -1"),
      (LAYERS, "from 0 to 2, got 3"),
      (np.int64(5), "from 0 to 2, got 5"),
      (np.uint8(3), "from 0 to 2, got 3"),
      (np.asarray(-1), "from 0 to 2, got -1"),
    ],
  )
  def test_bad_layers(self, verb, layer, message):
    message = f"^`layer` must be {message}"
    with pytest.raises((TypeError, ValueError), match=message):
      verb(layer)

  @pytest.mark.parametrize(
    "layer", [1, np.int64(1), np.asarray(1), jnp.int32(1), jnp.int8(1)]
  )
  def test_any_integer_type_is_a_layer(self, layer):
    written = memory.write(KV, VIEW, layer, NEW, NEW)
    np.testing.assert_array_equal(written.k[PAGES + 3, :, 0], 1)


class TestCheck:
  def config(self, **changes):
    fields = {"num_pages": PAGES, "page_size": SIZE, "num_slots": 1}
    return jaxkv.CacheConfig(**(fields | {"pages_per_slot": 2} | changes))

  def test_equal_pages(self):
    memory.check(KV, self.config())
    jax.jit(lambda kv: memory.check(kv, self.config()))(KV)

  def test_pages_of_one_group(self):
    groups = (jaxkv.FullAttention(page_size=2 * SIZE), jaxkv.SlidingWindow(3))
    config = self.config(groups=groups)
    memory.check(KV, config)
    memory.check(make(page_size=2 * SIZE), config)
    with pytest.raises(
      ValueError, match=r"of 4 .* or .* of 8 tokens, .* of 16 tokens; make"
    ):
      memory.check(make(page_size=4 * SIZE), config)

  @pytest.mark.parametrize(
    "changes", [{"num_pages": PAGES - 1}, {"page_size": 2}]
  )
  def test_other_pages_are_refused(self, changes):
    with pytest.raises(
      ValueError, match=r"`kv` must .* got 24 pages of 4 tokens; make"
    ):
      memory.check(KV, self.config(**changes))

  def test_states_instead_of_configs_are_refused(self):
    with pytest.raises(TypeError, match=r"got CacheState; .* state\.config"):
      memory.check(KV, jaxkv.init(self.config()))
