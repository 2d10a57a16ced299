"""Exact numerics: a token's logits are the same bits in every program."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from tests import as_users
from tests.models import exact_families as families
from tests.tools.tiers import slow_except

pytestmark = pytest.mark.slow
_deep = pytest.mark.deep
_FAMILIES = [
  name if name == "llama" else pytest.param(name, marks=_deep)
  for name in families.NAMES
]
_DTYPES = [jnp.float32, pytest.param(jnp.bfloat16, marks=_deep)]


@pytest.mark.parametrize("dtype", _DTYPES, ids=lambda x: np.dtype(x).name)
@pytest.mark.parametrize("name", _FAMILIES)
def test_chunks_pages_and_neighbours_change_no_bit(name, dtype):
  config, params = families.decoder(name, dtype)
  tokens = families.tokens_of(3, 37)
  whole = families.whole(config, params, tokens)
  assert np.isfinite(whole).all()
  np.testing.assert_array_equal(
    families.whole(config, params, tokens[1:2]), whole[1:2]
  )
  for rows, chunk, page_size in ((3, 37, 16), (1, 1, 4), (2, 5, 16)):
    logits = families.in_chunks(config, params, tokens[:rows], chunk, page_size)
    np.testing.assert_array_equal(logits, whole[:rows])


@pytest.mark.parametrize(
  "name",
  [
    name if name == "llama" else pytest.param(name, marks=_deep)
    for name in families.NAMES
  ],
)
def test_a_gradient_computes_the_same_and_is_that_of_fast(name):
  config, params = families.decoder(name)
  tokens = families.tokens_of(2, 21)
  columns = jnp.arange(21, dtype=jnp.int32)
  positions = jnp.broadcast_to(columns, tokens.shape)

  def loss(params, config):
    logits = models.forward_uncached(params, tokens, positions, config=config)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 3]), logits

  gradient = jax.value_and_grad(loss, has_aux=True)
  step = as_users.jit(gradient, static_argnums=1)
  (_, logits), grads = step(params, config)
  whole = families.whole(config, params, tokens)
  np.testing.assert_array_equal(logits, whole)
  fast = dataclasses.replace(config, numerics="fast")
  (_, logits), expected = step(params, fast)
  np.testing.assert_allclose(logits, whole, atol=1e-4, rtol=0)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-4),
    grads,
    expected,
  )


@_deep
@pytest.mark.parametrize("name", ["llama", "latents"])
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_pages_of_eight_bits(name, kv_dtype):
  config, params = families.decoder(name)
  tokens = families.tokens_of(3, 37)
  whole = families.whole(config, params, tokens, kv_dtype=kv_dtype)
  for chunk in (1, 5):
    logits = families.in_chunks(
      config, params, tokens, chunk, kv_dtype=kv_dtype
    )
    np.testing.assert_array_equal(logits, whole)


@functools.cache
def _wide(dtype):
  """A decoder wide enough that XLA treats constant weights in another way."""
  config = models.llama(
    vocab_size=301,
    num_layers=1,
    embed_dim=256,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    mlp_dim=512,
    dtype=dtype,
  )
  config = dataclasses.replace(config, numerics="exact")
  return config, models.init_params(jax.random.key(0), config)


def _logits(config, params, tokens):
  columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)
  positions = jnp.broadcast_to(columns, tokens.shape)
  return models.forward_uncached(params, tokens, positions, config=config)


@pytest.mark.parametrize("dtype", _DTYPES, ids=lambda x: np.dtype(x).name)
def test_constant_weights_change_no_bit(dtype):
  config, params = _wide(dtype)
  tokens = families.tokens_of(3, 37)
  run = functools.partial(_logits, config)
  expected = as_users.jit(run)(params, tokens)
  constant = as_users.jit(functools.partial(run, params))(tokens)
  np.testing.assert_array_equal(constant, expected)


@pytest.mark.parametrize("dtype", _DTYPES, ids=lambda x: np.dtype(x).name)
@pytest.mark.parametrize("of_params", [False, True])
def test_vmap_changes_no_bit(dtype, of_params):
  config, params = _wide(dtype)
  tokens = families.tokens_of(3, 37)
  run = functools.partial(_logits, config)
  expected = as_users.jit(run)(params, tokens)
  if of_params:
    two = jax.tree.map(lambda x: jnp.stack([x, x * 2]), params)
    logits = as_users.jit(jax.vmap(run, (0, None)))(two, tokens)[0]
  else:
    logits = as_users.jit(jax.vmap(run, (None, 0)))(params, tokens[:, None])
    logits = logits[:, 0]
  np.testing.assert_array_equal(logits, expected)


def _products(lowered):
  """The shapes of all products of a program, before it is compiled."""
  pattern = r"stablehlo.dot_general [^\n]*: (\([^\n]*)"
  return set(re.findall(pattern, lowered.as_text()))


@pytest.mark.fast
@slow_except("name", families.NAMES, "llama")
@pytest.mark.parametrize("name", families.NAMES)
def test_all_programs_have_products_of_the_same_shapes(name):
  """So they agree wherever a product depends on its shapes alone."""
  config, params = families.decoder(name)
  tokens = families.tokens_of(3, 37)
  positions = jnp.zeros_like(tokens)
  call = functools.partial(models.forward_uncached, config=config)
  expected = _products(jax.jit(call).lower(params, tokens, positions))
  assert expected
  for rows, columns in ((1, 1), (3, 1), (2, 21)):
    lowered = families.lowered(config, params, rows, columns)
    assert _products(lowered) == expected


@pytest.mark.fast
class TestArguments:
  """Arguments that are refused."""

  def test_other_numerics(self):
    with pytest.raises(
      ValueError, match="`numerics` must be one of 'fast', 'exact'"
    ):
      families.decoder("llama", numerics="slow")

  def test_a_tile_of_no_rows(self):
    with pytest.raises(ValueError, match="`tile` must be an int of at least 1"):
      families.decoder("llama", tile=0)

  def test_a_format_of_pages_without_pages(self):
    config, params = families.decoder("llama", numerics="fast")
    with pytest.raises(ValueError, match="`kv_dtype` must be None"):
      families.whole(config, params, families.tokens_of(1, 3), kv_dtype="int8")
