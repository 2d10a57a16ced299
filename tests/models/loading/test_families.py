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
from tests.models.loading import families
from tests.models.loading.families import FAMILIES

_NEW = 12


@functools.cache
def _checkpoint(name: str, folder: Any, transformers: Any) -> Any:
  """A saved checkpoint: its folder, and the model of transformers."""
  model = families.model_of(transformers, name)
  place = folder / name.replace(" ", "")
  model.save_pretrained(place)
  return place, model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, transformers):
  folder = tmp_path_factory.mktemp("checkpoints")
  return lambda name: _checkpoint(name, folder, transformers)


def _paged(decoder, params, tokens: np.ndarray, chunks) -> np.ndarray:
  """Logits of chunks of a prompt and of decoding, over poisoned pages."""
  rows, total = tokens.shape
  config = jaxkv.CacheConfig(
    num_pages=200,
    page_size=4,
    num_slots=rows,
    pages_per_slot=-(-total // 4),
    groups=models.cache_groups(decoder),
  )
  cache = jaxkv.init(config)
  kv = jax.tree.map(lambda a: a * jnp.nan, models.init_kv(decoder, config))
  found, start = [], 0
  for count in chunks:
    num_tokens = [count] * rows
    cache, _ = jaxkv.recycle(cache)
    cache, out = jaxkv.allocate(cache, num_tokens)
    assert bool(jnp.all(out.ok))
    views = tuple(
      jaxkv.view(cache, group=group, num_tokens=num_tokens)
      for group in range(len(config.groups))
    )
    piece = jnp.asarray(tokens[:, start : start + count])
    steps = jnp.arange(count, dtype=jnp.int32)[None]
    positions = cache.length[:, None] + steps
    batch = jaxkv.kv.Batch(tokens=piece, positions=positions, views=views)
    logits, kv = models.forward(params, batch, kv, config=decoder)
    cache, _ = jaxkv.commit(cache, piece, num_tokens)
    found.append(np.asarray(logits))
    start += count
  return np.concatenate(found, axis=1)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits(name, checkpoint):
  place, model = checkpoint(name)
  loaded = models.load(place)
  decoder, params = loaded.config, loaded.params
  tokens = families.tokens()
  expected = families.expected(model, tokens)
  paged = _paged(decoder, params, tokens, (13, 1, 8, 1, 1, 9))
  for found in (families.uncached(loaded, tokens), paged):
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-5)
    np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1))


def _changed(place, folder, values=None, tensors=None):
  """A copy of a checkpoint with another configuration, or other tensors."""
  from safetensors import numpy as stored  # pyright: ignore

  shutil.copytree(place, folder)
  path = folder / "config.json"
  found = json.loads(path.read_text()) | (values or {})
  path.write_text(json.dumps(found))
  if tensors is not None:
    path = folder / "model.safetensors"
    stored.save_file(tensors(stored.load_file(path)), path)
  return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_unknown_keys_and_tensors(name, checkpoint, tmp_path):
  place, _ = checkpoint(name)
  other = _changed(place, tmp_path / "key", {"made_up": 3})
  with pytest.raises(ValueError, match="may change the result: `made_up`: 3"):
    models.load(other)
  extra = {"model.layers.0.extra.weight": np.zeros(2, np.float32)}
  other = _changed(place, tmp_path / "more", tensors=lambda all: all | extra)
  with pytest.raises(ValueError, match=r"not known: model\.layers\.0\.extra"):
    models.load(other)
  other = _changed(
    place,
    tmp_path / "less",
    tensors=lambda all: {k: all[k] for k in all if k != "model.norm.weight"},
  )
  with pytest.raises(ValueError, match=r"lacks tensors: model.norm.weight; ge"):
    models.load(other)


@pytest.mark.parametrize("name", FAMILIES)
def test_default_length(name, transformers):
  kind, _ = FAMILIES[name]
  text = "Gemma3Text" if kind == "Gemma3" else kind
  default = getattr(transformers, f"{text}Config")().max_position_embeddings
  family = family_of([f"{kind}ForCausalLM"], "config.json")
  assert family.max_length == default


_OLDER = ("Llama 3", "Llama, linear", "Gemma 3", "gpt-oss", "DeepSeek-V3")


@pytest.mark.parametrize("name", _OLDER)
def test_older_configurations(name, checkpoint, tmp_path):
  """Most checkpoints were saved before `rope_parameters` had its name."""
  place, _ = checkpoint(name)
  values = json.loads((place / "config.json").read_text())
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
  other = tmp_path / "older"
  shutil.copytree(place, other)
  (other / "config.json").write_text(json.dumps(values))
  assert models.load(other).config == models.load(place).config


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rollout_draws_the_same(name, checkpoint):
  """Greedily, as `generate`: prompts in chunks, beside others that decode."""
  import torch  # pyright: ignore[reportMissingImports]

  place, model = checkpoint(name)
  loaded = models.load(place)
  prompts, lengths = families.tokens()[:, :20], [20, 11, 16]
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
  sizes = loaded.cache_config(
    num_pages=400, num_slots=2, page_size=4, max_length=20 + _NEW
  )
  kv = jax.tree.map(lambda a: a * jnp.nan, loaded.init_kv(sizes))
  config = rollout.RolloutConfig(max_new_tokens=_NEW, prefill_chunk=8)
  state = rollout.init(
    jaxkv.init(sizes),
    kv,
    rollout.Requests(
      prompts, lengths, sampling=rollout.Sampling(temperature=0.0)
    ),
    jax.random.key(0),
    config,
  )
  program = jax.jit(functools.partial(rollout.generate, model=loaded.forward))
  end = program(loaded.params, state)
  out = rollout.generated(end)
  found = [
    row[mask].tolist()
    for row, mask in zip(
      np.asarray(out.tokens), np.asarray(out.mask), strict=True
    )
  ]
  assert found == expected
