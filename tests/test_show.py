"""Pictures of a cache."""

import xml.etree.ElementTree

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv._src import show as show_module
from jaxkv._src.show import page_kinds
from jaxkv._src.show import show

_CONFIG = jaxkv.CacheConfig(
  num_pages=12, page_size=4, num_slots=3, pages_per_slot=8
)


_SVG = "{http://www.w3.org/2000/svg}"


def _ints(*numbers):
  return jnp.asarray(numbers, jnp.int32)


@pytest.fixture
def state():
  """Slots 0 and 2 share page 1, slot 1 is empty, pages 2 and 3 are cached."""
  tokens = jnp.arange(27, dtype=jnp.int32).reshape(3, 9)
  num_tokens = _ints(6, 9, 0)
  state, _ = jaxkv.allocate(jaxkv.init(_CONFIG), num_tokens)
  state, _ = jaxkv.commit(state, tokens, num_tokens)
  state, _ = jaxkv.free(state, slots=[1])
  return jaxkv.fork(state, _ints(0), _ints(2))[0]


def _texts(picture):
  root = xml.etree.ElementTree.fromstring(picture.svg)
  return [text.text for text in root.iter(f"{_SVG}text")]


def test_pages_are_classified(state):
  kinds = page_kinds(state)
  assert kinds[:2] == ["null", "shared"]
  assert [kinds.count(name) for name in ("in use", "cached", "free")] == [
    2,
    2,
    6,
  ]
  pinned, _ = jaxkv.touch(state, _ints(3))
  assert page_kinds(pinned)[3] == "pinned"


def test_pages_slots_and_the_free_queue_are_drawn(state):
  texts = _texts(show(state, title="A fork"))
  assert texts[0] == "A fork"
  for label in ("slot 0", "slot 1", "slot 2", "pool", "free queue"):
    assert label in texts
  assert [texts.count(f"{n} tokens") for n in (6, 9)] == [2, 0]
  assert texts.count("empty") == 1
  # In two slots and the pool; in the pool and the free queue.
  assert [texts.count(str(page)) for page in (1, 11)] == [3, 2]
  free = [str(page) for page in jaxkv.free_pages(state)]
  start = len(texts) - len(free)
  assert [text for text in texts if text.isdigit()][-len(free) :] == free, start


def test_a_page_has_its_number_in_its_middle(state):
  root = xml.etree.ElementTree.fromstring(show(state).svg)
  middles = {
    (
      round(float(shape.get("x", 0)) + float(shape.get("width", 0)) / 2),
      round(float(shape.get("y", 0)) + float(shape.get("height", 0)) / 2),
    )
    for shape in root.iter(f"{_SVG}rect")
  }
  numbers = [text for text in root.iter(f"{_SVG}text") if text.text.isdigit()]
  assert len(numbers) > 20
  for text in numbers:
    x = round(float(text.get("x")))
    y = round(float(text.get("y")))
    assert any(abs(x - a) <= 1 and abs(y - b) <= 1 for a, b in middles)


def test_the_rest_of_a_free_queue_is_below_its_pages():
  config = jaxkv.CacheConfig(
    num_pages=900, page_size=4, num_slots=1, pages_per_slot=8
  )
  root = xml.etree.ElementTree.fromstring(show(jaxkv.init(config)).svg)
  texts = list(root.iter(f"{_SVG}text"))
  (rest,) = [text for text in texts if "more" in (text.text or "")]
  start = [text.text for text in texts].index("free queue")
  heights = [
    float(text.get("y")) for text in texts[start:] if text.text.isdigit()
  ]
  *_, upper_y, lower_y = sorted(set(heights))
  # A row of pages ends in the middle between the numbers of two rows.
  assert float(rest.get("y")) > lower_y + (lower_y - upper_y) / 2


def test_every_group_has_a_row():
  config = jaxkv.CacheConfig(
    num_pages=33,
    page_size=4,
    num_slots=2,
    pages_per_slot=8,
    groups=(jaxkv.FullAttention(), jaxkv.SlidingWindow(8)),
  )
  state, _ = jaxkv.allocate(jaxkv.init(config), _ints(20, 0))
  tokens = jnp.zeros((2, 20), jnp.int32)
  state, _ = jaxkv.commit(state, tokens, _ints(20, 0))
  state, _ = jaxkv.recycle(state)
  texts = _texts(show(state))
  assert [texts.count(f"group {group}") for group in (0, 1)] == [2, 2]
  assert "null page" in texts


def test_every_pool_has_a_grid_and_a_free_queue():
  config = jaxkv.CacheConfig(
    num_pages=(9, 5),
    page_size=4,
    num_slots=1,
    pages_per_slot=8,
    groups=(jaxkv.FullAttention(), jaxkv.Recurrent(pool=1)),
  )
  state, _ = jaxkv.allocate(jaxkv.init(config), _ints(7))
  assert page_kinds(state)[8:12] == ["free", "null", "in use", "free"]
  picture = show(state)
  assert repr(picture) == "slot 0 has 2 pages; 3 pages in use, 9 free"
  texts = _texts(picture)
  start = texts.index("pool 0")
  numbers = [text for text in texts[start:] if text.isdigit()]
  expected = [*range(9), *jaxkv.free_pages(state, pool=0)]
  expected += [*range(9, 14), *jaxkv.free_pages(state, pool=1)]
  assert numbers == list(map(str, expected))
  assert texts.count("free queue") == 2 and "pool 1" in texts


def test_summary_names_pages_by_kind(state):
  assert repr(show(state, title="A fork")) == (
    "A fork: slot 0 has 2 pages, slot 2 has 2 pages; "
    "2 pages in use, 1 shared, 2 cached, 6 free"
  )


def test_title_is_escaped(state):
  assert _texts(show(state, title="<a> & b"))[0] == "<a> & b"


@pytest.mark.parametrize(
  ("num_pages", "num_slots"), [(2, 64), (513, 1), (4096, 64)]
)
def test_size_is_bounded(num_pages, num_slots):
  config = jaxkv.CacheConfig(
    num_pages=num_pages, page_size=4, num_slots=num_slots, pages_per_slot=100
  )
  picture = show(jaxkv.init(config))
  root = xml.etree.ElementTree.fromstring(picture._repr_svg_())
  assert int(root.get("width")) < 2000
  assert int(root.get("height")) < 3000


def test_traced_stacked_and_large_states_are_refused(state):
  with pytest.raises(TypeError, match="outside jit"):
    jax.jit(show)(state)
  stack = jax.tree.map(lambda leaf: leaf[None], state)
  with pytest.raises(ValueError, match="stack"):
    show(stack)
  with pytest.raises(TypeError, match="CacheState"):
    show((state, None))
  large = jaxkv.CacheConfig(
    num_pages=show_module.MAX_PAGES + 1,
    page_size=4,
    num_slots=1,
    pages_per_slot=8,
  )
  with pytest.raises(ValueError, match=r"at most 4096 pages, got 4097"):
    show(jaxkv.init(large))
