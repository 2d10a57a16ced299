"""A tiny random T5Gemma that transformers has saved, against its logits."""

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

_SIZES: dict[str, Any] = {
  "vocab_size": 96,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 4,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 16,
  "max_position_embeddings": 256,
  "sliding_window": 6,
  "query_pre_attn_scalar": 24,
}
# The second is as wide as no decoder: a balanced model, and an unbalanced one.
_ENCODERS: dict[str, dict[str, Any]] = {
  "balanced": {},
  "unbalanced": {"hidden_size": 24, "num_hidden_layers": 3, "head_dim": 8},
}
_LENGTHS, _TOKENS, _NEW = np.array([19, 5, 12], np.int32), 21, 12


@pytest.fixture(scope="module", params=_ENCODERS)
def checkpoint(request, tmp_path_factory):
  """A saved checkpoint: its folder, and the model of transformers."""
  torch = pytest.importorskip("torch")
  pytest.importorskip("safetensors")
  transformers = pytest.importorskip("transformers")
  torch.manual_seed(0)
  module = transformers.T5GemmaModuleConfig
  config = transformers.T5GemmaConfig(
    encoder=module(**(_SIZES | _ENCODERS[request.param])),
    decoder=module(**_SIZES),
    vocab_size=96,
  )
  config._attn_implementation = "eager"
  model = transformers.T5GemmaForConditionalGeneration(config).eval().float()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(torch.randn_like(parameter) * 0.1)
  model.tie_weights()
  place = tmp_path_factory.mktemp("t5gemma") / "model"
  model.save_pretrained(place)
  # Tokens of the encoder at a distance of the window see each other in
  # transformers 5, but neither in the version that the model came with, nor
  # with its flash attention, nor in the decoder.
  model.model.encoder.config.sliding_window -= 1
  return place, model


def _draw(columns: int) -> np.ndarray:
  draws = np.random.default_rng(0)
  return draws.integers(3, 96, (3, columns)).astype(np.int32)


def _inputs(torch: Any) -> dict[str, Any]:
  """Tokens and mask of the encoder."""
  real = np.arange(_LENGTHS.max())[None] < _LENGTHS[:, None]
  return {
    "input_ids": torch.asarray(np.where(real, _draw(19), 0)).long(),
    "attention_mask": torch.asarray(real).long(),
  }


def _encoded(loaded: Any) -> jax.Array:
  lengths = jnp.asarray(_LENGTHS)
  return loaded.encode(loaded.params, jnp.asarray(_draw(19)), lengths)


class _Steps:
  """A cache and its memory, NaN where nothing was written."""

  def __init__(self, loaded: Any):
    self.loaded = loaded
    sizes = loaded.cache_config(
      num_pages=200, num_slots=3, page_size=4, max_length=36
    )
    self.cache = jaxkv.init(sizes)
    kv = jax.tree.map(lambda leaf: leaf * jnp.nan, loaded.init_kv(sizes))
    self.cache, out = jaxkv.admit(
      self.cache,
      [0, 1, 2],
      _draw(_TOKENS),
      [1, 1, 1],
      num_encoder_tokens=_LENGTHS,
    )
    assert bool(jnp.all(out.ok))
    self.kv = loaded.write_encoded(
      loaded.params,
      _encoded(loaded),
      jnp.asarray(_LENGTHS),
      kv,
      self._views([0] * 3),
    )

  def _views(self, counts):
    return tuple(
      jaxkv.view(
        self.cache,
        group=group,
        counts=counts,
        num_encoder_tokens=_LENGTHS if kind.holds_encoder else None,
      )
      for group, kind in enumerate(self.cache.config.groups)
    )

  def __call__(self, piece: np.ndarray) -> np.ndarray:
    counts = [piece.shape[1]] * 3
    self.cache, _ = jaxkv.recycle(self.cache)
    self.cache, out = jaxkv.allocate(self.cache, counts)
    assert bool(jnp.all(out.ok))
    steps = jnp.arange(piece.shape[1], dtype=jnp.int32)[None]
    logits, self.kv = self.loaded.forward(
      self.loaded.params,
      jnp.asarray(piece),
      self.cache.length[:, None] + steps,
      self.kv,
      self._views(counts),
    )
    self.cache, _ = jaxkv.commit(self.cache, piece, counts)
    return np.asarray(logits)


def test_logits(checkpoint):
  import torch  # pyright: ignore[reportMissingImports]

  place, model = checkpoint
  loaded = models.load(place)
  tokens = _draw(_TOKENS)
  with torch.no_grad():
    out = model(
      **_inputs(torch), decoder_input_ids=torch.asarray(tokens).long()
    )
  expected = out.logits.numpy()
  encoded = _encoded(loaded)
  for row, length in enumerate(_LENGTHS):
    np.testing.assert_allclose(
      encoded[row, :length],
      out.encoder_last_hidden_state.numpy()[row, :length],
      rtol=0,
      atol=5e-5,
    )
  positions = jnp.broadcast_to(
    jnp.arange(_TOKENS, dtype=jnp.int32)[None], tokens.shape
  )
  whole = models.forward_uncached(
    loaded.params,
    jnp.asarray(tokens),
    positions,
    encoded,
    jnp.asarray(_LENGTHS),
    config=loaded.config,
  )
  steps, start, pieces = _Steps(loaded), 0, []
  for count in (7, 1, 8, 1, 4):
    pieces.append(steps(tokens[:, start : start + count]))
    start += count
  for found in (np.asarray(whole), np.concatenate(pieces, axis=1)):
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-5)
    np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1))


def test_greedy_tokens(checkpoint):
  """Those of `generate`, for inputs of three lengths."""
  import torch  # pyright: ignore[reportMissingImports]

  place, model = checkpoint
  loaded = models.load(place)
  assert loaded.start_token == 2
  assert loaded.stop_tokens == (1,)
  with torch.no_grad():
    out = model.generate(
      **_inputs(torch),
      max_new_tokens=_NEW,
      do_sample=False,
      eos_token_id=None,
    )
  steps, token, found = _Steps(loaded), np.full((3, 1), 2, np.int32), []
  for _ in range(_NEW):
    token = steps(token).argmax(-1).astype(np.int32)
    found.append(token)
  found = np.concatenate(found, axis=1)
  np.testing.assert_array_equal(found, out[:, 1:].numpy())
  np.testing.assert_array_equal(_rolled_out(loaded), found)


def _rolled_out(loaded: Any) -> np.ndarray:
  """Greedily, in a loop with fewer slots than inputs."""
  sizes = loaded.cache_config(
    num_pages=100, num_slots=2, page_size=4, max_length=20
  )
  kv = jax.tree.map(lambda leaf: leaf * jnp.nan, loaded.init_kv(sizes))
  state = rollout.init(
    jaxkv.init(sizes),
    kv,
    [[loaded.start_token]] * 3,
    [1] * 3,
    jax.random.key(0),
    rollout.RolloutConfig(max_new_tokens=_NEW, prefill_chunk=8),
    sampling=rollout.Sampling(temperature=0.0),
    encoder_inputs=_draw(19),
    encoder_lengths=_LENGTHS,
  )
  run = functools.partial(
    rollout.generate, model=loaded.forward, encode=loaded.encode_inputs
  )
  end = jax.jit(run)(loaded.params, state)
  return np.asarray(end.sequences.tokens)[:, 1:]


def test_unknown_keys_and_tensors(checkpoint, tmp_path):
  from safetensors import numpy as stored  # pyright: ignore

  place, _ = checkpoint

  def refused(message, inner=None, tensors=None, **outer):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    shutil.copytree(place, folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | outer
    values["encoder"] |= inner or {}
    path.write_text(json.dumps(values))
    if tensors is not None:
      path = folder / "model.safetensors"
      stored.save_file(tensors(stored.load_file(path)), path)
    with pytest.raises(ValueError, match=message):
      models.load(folder)

  refused("may change the result: `made_up`: 3", made_up=3)
  refused("`encoder` in .*config.json has keys", inner={"made_up": 3})
  refused("`attention_bias` in `encoder`", inner={"attention_bias": True})
  extra = {"model.encoder.layers.0.extra.weight": np.zeros(2, np.float32)}
  refused("not known: model.encoder.*extra", tensors=lambda all: all | extra)
  norm = "model.encoder.norm.weight"
  refused(
    f"lacks tensors: {norm}; ge",
    tensors=lambda all: {name: all[name] for name in all if name != norm},
  )
  other = ["T5Gemma2ForConditionalGeneration"]
  refused("`architectures` .* got \\['T5Gemma2", architectures=other)
