"""`generate_texts`: texts in, texts out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from jaxkv import rollout
from jaxkv._src.commands import characters

pytestmark = pytest.mark.slow

_PROMPTS = ["1 is 1 mod", "12 is", "1 is 1 modulo s"]


def test_greedy_texts_equal_forward_passes(small_model):
  out = rollout.generate_texts(
    small_model,
    _PROMPTS,
    max_new_tokens=6,
    num_slots=2,
    sampling=rollout.Sampling(temperature=0),
  )
  forward = jax.jit(small_model.forward_uncached)
  assert [len(samples) for samples in out.texts] == [1] * 3
  for text, (sample,) in zip(_PROMPTS, out.texts, strict=True):
    tokens = small_model.tokenizer.encode(text).tolist()
    for _ in range(6):
      row = jnp.asarray([tokens], jnp.int32)
      positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
      logits = forward(small_model.params, row, positions)
      tokens.append(int(logits[0, -1].argmax()))
    assert text + sample == small_model.tokenizer.decode(np.asarray(tokens))


def test_samples_with_their_log_probs(small_model):
  """The results are aligned with the texts, and ready for a loss."""
  options = {"num_samples": 2, "max_new_tokens": 5, "raw_log_probs": True}
  tokens = [small_model.tokenizer.encode(text) for text in _PROMPTS]
  out = rollout.generate_texts(small_model, tokens, **options)
  from_texts = rollout.generate_texts(small_model, _PROMPTS, **options)
  assert out.texts == from_texts.texts  # of token ids, and of their texts
  groups = rollout.grouped(
    out.results, num_samples=2, prompt_columns=15, completion_columns=5
  )
  log_probs = small_model.grouped_log_probs(
    small_model.params,
    groups.prompts,
    groups.prompt_lengths,
    groups.completions,
    groups.completion_lengths,
  )
  np.testing.assert_allclose(
    np.where(groups.mask, groups.records.raw_log_probs, 0),
    np.where(groups.mask, log_probs, 0),
    atol=1e-5,
  )


def test_experts_are_recorded():
  layer = models.Layer(
    attention=models.Attention(num_heads=2, num_kv_heads=1, head_dim=8),
    mlp=models.Experts(num_experts=4, num_chosen=2, inner_dim=8),
  )
  config = models.Decoder(vocab_size=9, embed_dim=16, layers=(layer,) * 2)
  model = models.Pretrained(
    config=config,
    params=models.init_params(jax.random.key(0), config),
    max_length=20,
    stop_tokens=(),
    open_tokenizer=lambda: characters.Vocabulary("abcdefgh"),
  )
  out = rollout.generate_texts(
    model, ["abc"], max_new_tokens=2, record_experts=True
  )
  experts = out.results.experts
  assert experts is not None and experts.shape == (1, 5, 2, 2)
  assert (np.asarray(experts[0, :4]) >= 0).all()


def test_a_missing_tokenizer_is_an_error_before_the_loop(small_model):
  def open_tokenizer():
    raise ImportError("no tokenizers")

  model = dataclasses.replace(
    small_model, params=None, open_tokenizer=open_tokenizer
  )
  with pytest.raises(ImportError, match="no tokenizers"):
    rollout.generate_texts(model, [[1, 2]])


def test_equal_sizes_compile_once(small_model, caplog):
  """Prompts of other lengths, up to the next power of two."""
  options = {"max_new_tokens": 5, "num_slots": 2}
  num_loops = []
  for text in ("1 is 1 mod", "12 is 2 m"):
    caplog.clear()
    with jax.log_compiles():
      rollout.generate_texts(small_model, [text], **options)
    messages = [record.getMessage() for record in caplog.records]
    loops = [m for m in messages if "compilation of jit(_advance)" in m]
    num_loops.append(len(loops))
  assert num_loops == [1, 0]


class TestArguments:
  def test_names(self, small_model):
    for name, hint in (
      ("max_tokens", "write `max_new_tokens`"),
      ("temperature", r"write sampling=rollout.Sampling\(temperature="),
      ("xyz", "see help"),
    ):
      with pytest.raises(TypeError, match=rf"`{name}` is not an.*{hint}"):
        rollout.generate_texts(small_model, ["1 is"], **{name: 3})

  def test_types(self, small_model):
    with pytest.raises(TypeError, match=r"`model` .* got str; .*models\.load"):
      rollout.generate_texts("SmolLM2-135M", ["1 is"])
    with pytest.raises(TypeError, match=r"`sampling` .*Sampling, got dict"):
      rollout.generate_texts(small_model, ["1 is"], sampling={"top_k": 1})

  def test_prompts(self, small_model):
    with pytest.raises(ValueError, match="at least one prompt, got none"):
      rollout.generate_texts(small_model, [])
    with pytest.raises(TypeError, match=r"write \[prompt\] for one"):
      rollout.generate_texts(small_model, "1 is")
    with pytest.raises(ValueError, match=r"`prompts\[1\]` must have 1 to"):
      rollout.generate_texts(small_model, ["1 is", ""])
    with pytest.raises(TypeError, match=r"`prompts\[0\]` must hold integers"):
      rollout.generate_texts(small_model, [[1.7, 2.2]])
    for prompts, shape in (([3, 1, 4], r"\[\]"), ([[[3], [1]]], r"\[2, 1\]")):
      with pytest.raises(ValueError, match=rf"token ids, .* shape {shape}"):
        rollout.generate_texts(small_model, prompts)
    room = small_model.max_length - 8
    with pytest.raises(ValueError, match=rf"`prompts\[0\]` .* {room} tokens"):
      rollout.generate_texts(small_model, ["1" * (room + 1)], max_new_tokens=8)
    last_id = small_model.config.vocab_size - 1
    for ids in ([3, last_id + 1], [-1, 3]):
      with pytest.raises(ValueError, match=rf"ids from 0 to {last_id}, got"):
        rollout.generate_texts(small_model, [ids])
