"""Tiny random checkpoints that transformers has saved, against its logits."""

import functools
import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv import rollout
from jaxkv._src.models.loading.families.architectures import family_of
from tests.models import exact_families
from tests.models.loading import families
from tests.models.loading.families import FAMILIES

_NEW = 12


@functools.cache
def _checkpoint(name: str, folder: Any, transformers: Any) -> Any:
  """A saved checkpoint: its folder, and the model of transformers."""
  model = families.model_of(transformers, name)
  path = folder / name.replace(" ", "")
  model.save_pretrained(path)
  return path, model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, transformers):
  folder = tmp_path_factory.mktemp("checkpoints")
  return lambda name: _checkpoint(name, folder, transformers)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name, checkpoint):
  path, model = checkpoint(name)
  loaded = models.load(path)
  tokens = families.tokens()
  expected = families.expected(model, tokens)
  paged = exact_families.in_chunks(
    loaded.config,
    loaded.params,
    jnp.asarray(tokens),
    (13, 1, 8, 1, 1, 9),
    page_size=4,
    jit=lambda forward: forward,
  )
  for logits in (families.uncached(loaded, tokens), paged):
    np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-5)
    np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))


def _changed(source, folder, values=None, tensors=None):
  """A copy of a checkpoint with another configuration, or other tensors."""
  from safetensors import numpy as stored  # pyright: ignore

  shutil.copytree(source, folder)
  path = folder / "config.json"
  config = json.loads(path.read_text()) | (values or {})
  path.write_text(json.dumps(config))
  if tensors is not None:
    path = folder / "model.safetensors"
    stored.save_file(tensors(stored.load_file(path)), path)
  return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_unknown_keys_and_tensors_are_refused(name, checkpoint, tmp_path):
  path, _ = checkpoint(name)
  copy = _changed(path, tmp_path / "key", {"made_up": 3})
  with pytest.raises(ValueError, match="may change the result: `made_up`: 3"):
    models.load(copy)
  extra = {"model.layers.0.extra.weight": np.zeros(2, np.float32)}
  copy = _changed(path, tmp_path / "more", tensors=lambda all: all | extra)
  with pytest.raises(ValueError, match=r"not known: model\.layers\.0\.extra"):
    models.load(copy)
  copy = _changed(
    path,
    tmp_path / "less",
    tensors=lambda all: {k: all[k] for k in all if k != "model.norm.weight"},
  )
  with pytest.raises(ValueError, match=r"lacks tensors: model.norm.weight; ge"):
    models.load(copy)


@pytest.mark.parametrize("name", FAMILIES)
def test_default_length(name, transformers):
  prefix, _ = FAMILIES[name]
  text = "Gemma3Text" if prefix == "Gemma3" else prefix
  default = getattr(transformers, f"{text}Config")().max_position_embeddings
  family = family_of([f"{prefix}ForCausalLM"], "config.json")
  assert family.max_length == default


_OLDER = ("Llama 3", "Llama, linear", "Gemma 3", "gpt-oss", "DeepSeek-V3")


@pytest.mark.parametrize("name", _OLDER)
def test_older_configurations(name, checkpoint, tmp_path):
  """Most checkpoints were saved before `rope_parameters` had its name."""
  path, _ = checkpoint(name)
  values = json.loads((path / "config.json").read_text())
  rope = values.pop("rope_parameters")
  local = rope.pop("sliding_attention", None)
  rope = rope.get("full_attention", rope)
  if local is not None:
    values["rope_local_base_freq"] = local["rope_theta"]
    values["sliding_window_pattern"] = values.pop("_sliding_window_pattern", 6)
    del values["layer_types"]
  values["rope_theta"] = rope.pop("rope_theta")
  rope["type"] = rope.pop("rope_type")
  values["rope_scaling"] = rope
  values["torch_dtype"] = values.pop("dtype")
  folder = tmp_path / "older"
  shutil.copytree(path, folder)
  (folder / "config.json").write_text(json.dumps(values))
  assert models.load(folder).config == models.load(path).config


@pytest.mark.parametrize("name", FAMILIES)
def test_a_greedy_rollout_has_the_tokens_of_transformers(name, checkpoint):
  """Greedily, as `generate`: prompts in chunks, beside others that decode."""
  import torch  # pyright: ignore[reportMissingImports]

  path, model = checkpoint(name)
  loaded = models.load(path)
  prompts = families.tokens()[:, :20]
  lengths = [20, 11, 16]
  expected = []
  for prompt, length in zip(prompts, lengths, strict=True):
    with torch.no_grad():
      out = model.generate(
        torch.asarray(prompt[None, :length]).long(),
        attention_mask=torch.ones(1, length, dtype=torch.long),
        max_new_tokens=_NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
      )
    expected.append(out[0, length:].tolist())
  cache_config = loaded.cache_config(
    num_pages=400, num_slots=2, page_size=4, max_length=20 + _NEW
  )
  kv = jax.tree.map(lambda a: a * jnp.nan, loaded.init_kv(cache_config))
  config = rollout.RolloutConfig(max_new_tokens=_NEW, prefill_chunk=8)
  state = rollout.init(
    jaxkv.init(cache_config),
    kv,
    rollout.Requests(
      prompts, lengths, sampling=rollout.Sampling(temperature=0.0)
    ),
    jax.random.key(0),
    config,
  )
  program = jax.jit(functools.partial(rollout.generate, model=loaded.forward))
  final_state = program(loaded.params, state)
  out = rollout.generated(final_state)
  tokens = [
    row[mask].tolist()
    for row, mask in zip(
      np.asarray(out.tokens), np.asarray(out.mask), strict=True
    )
  ]
  assert tokens == expected
