"""Meaning of a config.json: keys without effect, missing keys and nulls.

The defaults are those of transformers 5.20.
"""

import jax.numpy as jnp
import pytest

from jaxkv._src.models.decoder.rope import YarnScaling
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.families.architectures import family_of
from tests.models.loading import families


def _decoder(name, missing=(), **changes):
  """The decoder of a family's config.json with changed and missing keys."""
  prefix, values = families.FAMILIES[name]
  values = families.SIZES | values | changes
  values = {key: values[key] for key in values if key not in missing}
  config = ConfigFile(values, "config.json")
  family = family_of([f"{prefix}ForCausalLM"], "config.json")
  decoder = family.weight_map(config, jnp.float32).decoder
  config.check_all_read()
  return decoder


def _attention(*args, **changes):
  return _decoder(*args, **changes).layers[-1].attention


def _windows(*args, **changes):
  layers = _decoder(*args, **changes).layers
  return [layer.attention.window for layer in layers]


@pytest.mark.parametrize(
  ("name", "values"),
  [
    ("Qwen2", {"use_mrope": False}),
    ("Qwen3-MoE", {"qkv_bias": False, "use_qk_norm": True}),
    ("Qwen3-MoE", {"shared_expert_intermediate_size": 0}),
    ("Qwen3-Next", {"use_sliding_window": False}),
    ("Gemma 2", {"sliding_window_size": 6}),
  ],
)
def test_keys_without_effect_are_accepted(name, values):
  """Published files have them; transformers does not write them."""
  assert _decoder(name, **values) == _decoder(name)


@pytest.mark.parametrize(
  ("name", "key", "value"),
  [
    ("Qwen2", "use_mrope", True),
    ("Qwen3-MoE", "qkv_bias", True),
    ("Qwen3-MoE", "use_qk_norm", False),
    ("Qwen3-MoE", "shared_expert_intermediate_size", 16),
    ("Qwen3-Next", "use_sliding_window", True),
    ("Gemma 2", "sliding_window_size", 7),
  ],
)
def test_the_same_keys_are_refused_with_another_value(name, key, value):
  with pytest.raises(ValueError, match=rf"`{key}` in config\.json must be"):
    _decoder(name, **{key: value})


def test_null_disables_a_cap():
  attention = "attn_logit_softcapping"
  assert _attention("Gemma 2").soft_cap == 50
  assert _attention("Gemma 2", **{attention: None}).soft_cap is None
  assert _decoder("Gemma 2").logit_cap == 30
  assert _decoder("Gemma 2", final_logit_softcapping=None).logit_cap is None


def test_a_missing_window_is_the_default_and_null_disables_it():
  key = "sliding_window"
  assert _windows("Mistral", [key]) == [4096] * 4
  assert _windows("Mistral", sliding_window=None) == [None] * 4
  assert _windows("Mixtral", [key]) == [None] * 4
  flags = {"use_sliding_window": True, "max_window_layers": 3}
  for name in ("Qwen2", "Qwen3"):
    assert _windows(name, **flags) == [None, None, None, 4096]
    assert _windows(name, sliding_window=None, **flags) == [None] * 4
    assert _windows(name, max_window_layers=3) == [None] * 4


def test_defaults_of_mixtral():
  decoder = _decoder("Mixtral")
  assert decoder.norm_eps == 1e-5
  assert decoder.layers[0].attention.rope.base == 1e6


def test_defaults_of_qwen3_next():
  layer = _decoder("Qwen3-Next").layers[-1]
  assert layer.mlp.normalized
  assert (layer.attention.head_dim, layer.attention.rope.dim) == (16, 4)


def test_gpt_oss_has_yarn_unless_it_has_a_rope_table():
  default = YarnScaling(
    factor=32.0,
    original_length=4096,
    truncate=False,
    attention_factor=pytest.approx(1.3465736),
  )
  key = "rope_parameters"
  assert _attention("gpt-oss", [key]).rope.scaling == default
  assert _attention("gpt-oss", [key], rope_theta=1e4).rope.scaling == default
  assert _attention("gpt-oss", rope_parameters=None).rope.scaling == default
  assert _attention("gpt-oss", rope_parameters={}).rope.scaling is None
  linear = {"rope_type": "linear", "factor": 2.0}
  rope = _attention("gpt-oss", [key], rope_scaling=linear).rope
  assert rope.scaling.factor == 2
