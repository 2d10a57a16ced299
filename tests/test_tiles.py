"""Rows computed a tile at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv._src import tiles
from tests import as_users


def _dense(weights, x, scale):
  out = jnp.tanh(x @ weights["w"]) * scale[:, None]
  return {"out": out, "place": jnp.argmax(out, axis=1).astype(jnp.int32)}


def _inputs(rows):
  rng = np.random.default_rng(0)
  weights = {"w": jnp.asarray(rng.normal(size=(40, 24)), jnp.float32)}
  x = jnp.asarray(rng.normal(size=(rows, 40)), jnp.float32)
  return weights, x, jnp.asarray(rng.normal(size=rows), jnp.float32)


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 16, 29])
def test_gives_what_the_function_gives_of_all_rows(rows):
  weights, *arrays = _inputs(rows)
  out = tiles.in_tiles(_dense, weights, tuple(arrays), tile=8)
  wanted = _dense(weights, *arrays)
  np.testing.assert_allclose(out["out"], wanted["out"], atol=1e-5)
  np.testing.assert_array_equal(out["place"], wanted["place"])


def test_a_row_is_the_same_among_any_number_of_rows():
  weights, *arrays = _inputs(70)
  call = as_users.jit(lambda w, *rows: tiles.in_tiles(_dense, w, rows, tile=8))
  whole = call(weights, *arrays)["out"]
  for rows in (1, 2, 8, 9, 33):
    some = call(weights, *(x[:rows] for x in arrays))["out"]
    np.testing.assert_array_equal(some, whole[:rows])


def test_the_gradient_is_that_of_all_rows():
  weights, *arrays = _inputs(13)

  def loss(weights, x, tiled):
    rows = (x, arrays[1])
    if tiled:
      return jnp.sum(tiles.in_tiles(_dense, weights, rows, tile=8)["out"])
    return jnp.sum(_dense(weights, *rows)["out"])

  gradient = jax.grad(loss, argnums=(0, 1))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
    gradient(weights, arrays[0], True),
    gradient(weights, arrays[0], False),
  )


def test_products_have_the_rows_of_a_tile():
  weights, *arrays = _inputs(50)
  call = jax.jit(lambda w, *rows: tiles.in_tiles(_dense, w, rows, tile=8))
  text = call.lower(weights, *arrays).compile().as_text()
  products = [line for line in text.splitlines() if " dot(" in line]
  assert products
  assert all("f32[8,24]" in line for line in products)


def test_keys_are_rows_too():
  keys = jax.random.split(jax.random.key(0), 5)
  draw = jax.vmap(jax.random.bits)
  out = tiles.loop(
    lambda keys, _: draw(keys), (keys, jnp.zeros((5,), jnp.float32)), tile=8
  )
  np.testing.assert_array_equal(out, draw(keys))
