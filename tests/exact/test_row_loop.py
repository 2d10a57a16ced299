"""Rows computed a tile at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv._src.exact import row_loop
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
def test_tiles_give_the_results_of_one_call(rows):
  weights, *arrays = _inputs(rows)
  out = row_loop.in_tiles(_dense, weights, tuple(arrays), tile=8)
  expected = _dense(weights, *arrays)
  np.testing.assert_allclose(out["out"], expected["out"], atol=1e-5)
  np.testing.assert_array_equal(out["place"], expected["place"])


def test_bits_of_a_row_do_not_depend_on_other_rows():
  weights, *arrays = _inputs(70)
  call = as_users.jit(
    lambda w, *rows: row_loop.in_tiles(_dense, w, rows, tile=8)
  )
  whole = call(weights, *arrays)["out"]
  for rows in (1, 2, 8, 9, 33):
    few_rows = call(weights, *(x[:rows] for x in arrays))["out"]
    np.testing.assert_array_equal(few_rows, whole[:rows])


def test_the_gradient_is_that_of_one_call():
  weights, *arrays = _inputs(13)

  def loss(weights, x, tiled):
    rows = (x, arrays[1])
    if tiled:
      return jnp.sum(row_loop.in_tiles(_dense, weights, rows, tile=8)["out"])
    return jnp.sum(_dense(weights, *rows)["out"])

  gradient = jax.grad(loss, argnums=(0, 1))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
    gradient(weights, arrays[0], True),
    gradient(weights, arrays[0], False),
  )


def test_products_have_the_shape_of_a_tile():
  weights, *arrays = _inputs(50)
  call = jax.jit(lambda w, *rows: row_loop.in_tiles(_dense, w, rows, tile=8))
  text = call.lower(weights, *arrays).compile().as_text()
  products = [line for line in text.splitlines() if " dot(" in line]
  assert products
  assert all("f32[8,24]" in line for line in products)


@pytest.mark.parametrize("axes", [(None, 0), (0, None), (0, 0)])
def test_vmap_is_a_call_for_each(axes):
  weights, x, scale = _inputs(12)
  weights = jax.tree.map(lambda w: jnp.stack([w, w * 2]), weights)
  x = x.reshape(2, 6, 40)
  call = functools.partial(row_loop.in_tiles, _dense, tile=8)

  def one(weights, x):
    return call(weights, (x, scale[:6]))["out"]

  def nth(axis, tree, i):
    return tree if axis is None else jax.tree.map(lambda leaf: leaf[i], tree)

  arguments = [
    tree if axis == 0 else nth(0, tree, 0)
    for axis, tree in zip(axes, (weights, x), strict=True)
  ]
  batch = as_users.jit(jax.vmap(one, axes))(*arguments)
  for i in range(2):
    row_arguments = (
      nth(axis, tree, i) for axis, tree in zip(axes, arguments, strict=True)
    )
    np.testing.assert_array_equal(batch[i], as_users.jit(one)(*row_arguments))


def test_random_keys_are_split_into_tiles():
  keys = jax.random.split(jax.random.key(0), 5)
  draw = jax.vmap(jax.random.bits)
  out = row_loop.loop(
    lambda _, keys, zeros: draw(keys),
    (),
    (keys, jnp.zeros((5,), jnp.float32)),
    tile=8,
  )
  np.testing.assert_array_equal(out, draw(keys))
