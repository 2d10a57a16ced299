"""`rollout.check_model` names four mistakes of an own model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from jaxkv import models
from jaxkv import rollout
from tests.models import tiny_decoders

_DECODER = tiny_decoders.decoder(tiny_decoders.LAYERS["llama"])
_WINDOWS = tiny_decoders.decoder(tiny_decoders.LAYERS["windows and caps"])


def _forward(decoder):
  return functools.partial(models.forward, config=decoder)


def _uncached(decoder):
  return functools.partial(models.forward_uncached, config=decoder)


def _check(model, decoder=_DECODER, **options):
  if not isinstance(model, functools.partial):
    options["init_kv"] = functools.partial(models.init_kv, decoder)
  rollout.check_model(
    models.init_params(jax.random.key(0), decoder),
    model,
    _uncached(decoder),
    models.cache_config(decoder, num_slots=3, max_length=24, page_size=4),
    **options,
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  "decoder", [_DECODER, _WINDOWS], ids=["llama", "windows"]
)
def test_models_of_the_library_pass(decoder):
  _check(_forward(decoder), decoder)


def _with_own_positions(params, batch, kv):
  positions = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None]
  batch = dataclasses.replace(batch, positions=positions)
  return models.forward(params, batch, kv, config=_DECODER)


def _mixing_columns(params, batch, kv):
  everything = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)
  columns = batch.columns
  batch = dataclasses.replace(batch, columns=everything)
  logits, kv = models.forward(params, batch, kv, config=_DECODER)
  return logits[columns] + jnp.roll(logits, 1, axis=0)[columns], kv


def _scaling_twice(params, batch, kv):
  changed = jax.tree_util.tree_map_with_path(
    lambda path, leaf: 3 * leaf if "query" in str(path) else leaf, params
  )
  return models.forward(changed, batch, kv, config=_DECODER)


def _with_views_of_others(params, batch, kv):
  batch = dataclasses.replace(batch, views=batch.views[::-1])
  return models.forward(params, batch, kv, config=_WINDOWS)


@pytest.mark.parametrize(
  ("model", "reason"),
  [
    (_with_own_positions, "it ignores `batch.positions`"),
    pytest.param(
      _mixing_columns,
      "other sequences of the call change",
      marks=pytest.mark.slow,
    ),
    pytest.param(
      _scaling_twice, "compare the weights, the scale", marks=pytest.mark.slow
    ),
  ],
)
def test_mistakes_are_named(model, reason):
  with pytest.raises(ValueError, match=reason):
    _check(model)


@pytest.mark.slow
def test_a_partial_that_differs_is_named():
  """It has a memory of its own without `init_kv`, also where it is changed."""
  layers = tuple(
    dataclasses.replace(
      layer, attention=dataclasses.replace(layer.attention, scale=3.0)
    )
    for layer in _DECODER.layers
  )
  wrong = _forward(dataclasses.replace(_DECODER, layers=layers))
  with pytest.raises(ValueError, match="compare the weights, the scale"):
    _check(wrong)


@pytest.mark.slow
def test_groups_of_another_cache_are_refused():
  with pytest.raises(ValueError, match="pass the view of the layer's group"):
    _check(_with_views_of_others, _WINDOWS)
