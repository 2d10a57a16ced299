"""What `jaxkv.kv` refuses, and by which name."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import kv as memory
from tests.kv.memory import DIM
from tests.kv.memory import HEADS
from tests.kv.memory import KV_HEADS
from tests.kv.memory import LAYERS
from tests.kv.memory import PAGES
from tests.kv.memory import SIZE
from tests.kv.memory import make
from tests.kv.memory import view

KV, VIEW = make(), view([[3]], [0], [1])
NEW = jnp.ones((1, 1, KV_HEADS, DIM))
Q = jnp.ones((1, 1, HEADS, DIM))
TABLE = jnp.asarray([[3]], jnp.int32)
ID = jnp.asarray([1], jnp.int32)

attend = functools.partial(memory.attend, KV, VIEW, 0, Q)


def replaced(**fields):
  return dataclasses.replace(VIEW, **fields)


def share(where):
  return memory.share(KV, where, num_groups=1, group_size=2)


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: memory.write(KV, VIEW, 0, NEW.tolist(), NEW), "k is of type list"),
    (lambda: memory.write(KV, VIEW, 0, NEW, None), "v is of type NoneType"),
    (lambda: memory.attend(KV, VIEW, 0, Q.tolist()), "q is of type list"),
    (lambda: attend(sinks=[0.0] * HEADS), "sinks is of type list"),
    (lambda: attend(alibi_slopes=(0.0,)), "alibi_slopes is of type tuple"),
    (lambda: attend(tree_mask=[[[True]]]), "tree_mask is of type list"),
    (lambda: attend(window=[3]), "window is of type list"),
    (lambda: attend(scale=1j), "scale is of type complex"),
    (lambda: memory.copy(KV, [1], ID), "src is of type list"),
    (lambda: memory.copy(KV, ID, [2]), "dst is of type list"),
    (lambda: memory.copy(KV, ID, 2), "dst is of type int"),
    (lambda: memory.copy(KV, ID, ID.astype(jnp.float32)), "dst is float32"),
    (lambda: memory.gather(KV, 0, None), "page_table is of type NoneType"),
    (lambda: memory.gather(KV, 0, [[3]]), "page_table is of type list"),
    (lambda: memory.gather(KV, 0, ID), r"page_table has shape \(1,\)"),
  ],
)
def test_what_is_no_array(call, message):
  with pytest.raises(ValueError, match=message):
    call()


USES = {
  "write": lambda where: memory.write(KV, where, 0, NEW, NEW),
  "attend": lambda where: memory.attend(KV, where, 0, Q),
  "share": share,
  "refresh_shared": functools.partial(memory.refresh_shared, KV),
  "plan_decode": functools.partial(memory.plan_decode, KV),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"page_table": [[1, 2]]}, "view.page_table is of type list"),
    ({"page_table": None}, "view.page_table is of type NoneType"),
    ({"page_table": ID}, r"view.page_table has shape \(1,\)"),
    ({"starts": [0]}, "view.starts is of type list"),
    ({"starts": 0}, "view.starts is of type int"),
    ({"counts": [1]}, "view.counts is of type list"),
    ({"counts": jnp.ones(1)}, "view.counts is float32"),
  ],
)
def test_what_is_no_view(use, fields, message):
  with pytest.raises(ValueError, match=message):
    use(replaced(**fields))


READS_LAYER = {
  "write": lambda layer: memory.write(KV, VIEW, layer, NEW, NEW),
  "attend": lambda layer: memory.attend(KV, VIEW, layer, Q),
  "gather": lambda layer: memory.gather(KV, layer, TABLE),
}


class TestLayers:
  @pytest.mark.parametrize("verb", READS_LAYER.values(), ids=READS_LAYER.keys())
  @pytest.mark.parametrize(
    ("layer", "message"),
    [
      (0.9, "layer=0.9; it must be an integer"),
      (1.0, "layer=1.0; it must be an integer"),
      ("1", "layer='1'; it must be an integer"),
      (None, "layer=None; it must be an integer"),
      (True, "layer=True; it must be an integer"),
      ([1], r"layer=\[1\]; it must be an integer"),
      (np.float32(1), "it must be an integer"),
      (jnp.float32(1), "it must be an integer"),
      (jnp.asarray([1]), "it must be an integer"),
      (-1, "layer=-1; there are 3 layers"),
      (LAYERS, "layer=3; there are 3 layers"),
      (np.int64(5), "layer=5; there are 3 layers"),
      (np.uint8(3), "layer=3; there are 3 layers"),
      (np.asarray(-1), "layer=-1; there are 3 layers"),
    ],
  )
  def test_what_is_no_layer(self, verb, layer, message):
    with pytest.raises(ValueError, match=message):
      verb(layer)

  @pytest.mark.parametrize(
    "layer", [1, np.int64(1), np.asarray(1), jnp.int32(1), jnp.int8(1)]
  )
  def test_any_integer_is_one(self, layer):
    written = memory.write(KV, VIEW, layer, NEW, NEW)
    k, _ = memory.gather(written, layer, TABLE)
    np.testing.assert_array_equal(written.k[PAGES + 3, :, 0], 1)
    np.testing.assert_array_equal(k[0, 0], 1)


class TestCheck:
  def config(self, **changes):
    sizes = {"num_pages": PAGES, "page_size": SIZE, "num_slots": 1}
    return jaxkv.CacheConfig(**(sizes | {"pages_per_slot": 2} | changes))

  def test_equal_pages(self):
    memory.check(KV, self.config())
    jax.jit(lambda kv: memory.check(kv, self.config()))(KV)

  def test_pages_of_one_group(self):
    groups = (jaxkv.FullAttention(page_size=2 * SIZE), jaxkv.SlidingWindow(3))
    config = self.config(groups=groups)
    memory.check(KV, config)
    memory.check(make(page_size=2 * SIZE), config)
    with pytest.raises(ValueError, match=r"of 16 tokens and .* of 4 or 8"):
      memory.check(make(page_size=4 * SIZE), config)

  @pytest.mark.parametrize(
    "changes", [{"num_pages": PAGES - 1}, {"page_size": 2}]
  )
  def test_other_pages(self, changes):
    with pytest.raises(ValueError, match="kv has 24 pages of 4 tokens and the"):
      memory.check(KV, self.config(**changes))

  def test_a_state_is_no_config(self):
    with pytest.raises(TypeError, match=r"got CacheState; .* state\.config"):
      memory.check(KV, jaxkv.init(self.config()))
