"""`rollout.Engine` with stop strings: where samples and texts end."""

import functools

import jax
import pytest

from jaxkv import guides
from jaxkv import models
from jaxkv import rollout
from tests.models import tiny_decoders

_DECODER = tiny_decoders.llama(vocab_size=32)


class _Letters:
  """A tokenizer of single letters."""

  def encode(self, text):
    return [ord(letter) - 65 for letter in text]

  def decode(self, tokens):
    return "".join(chr(65 + token) for token in tokens)


def _engine() -> rollout.Engine:
  return rollout.Engine(
    models.init_params(jax.random.key(0), _DECODER),
    functools.partial(models.forward, config=_DECODER),
    models.cache_config(_DECODER, num_slots=3, max_length=32, page_size=2),
    rollout.RolloutConfig(num_samples=2, max_new_tokens=5, prefill_chunk=8),
    tokenizer=_Letters(),
  )


def _strings(*lists):
  tokens = guides.token_bytes([bytes([65 + token]) for token in range(32)])
  return rollout.stop_strings(list(lists), tokens)


@pytest.mark.slow
def test_texts_end_before_their_stop_string():
  """The strings are the sample's own; tokens and masks keep them."""
  sampling = rollout.Sampling(seed=[3, 4])
  with _engine() as engine:
    texts = engine.generate(["FDFDB"], sampling=sampling).texts
    assert texts is not None
    (plain,) = texts
    strings = _strings([plain[0][2:4]], [plain[1][4:], plain[1][1:3]])
    sampling = rollout.Sampling(seed=[3, 4], stop_strings=strings)
    out = engine.generate(["FDFDB"], sampling=sampling)
    assert out.texts == [[plain[0][:2], plain[1][:1]]]
    assert out.results.mask.sum(axis=1).tolist() == [4, 3]


@pytest.mark.slow
def test_texts_keep_strings_that_did_not_end_them():
  """Before `min_tokens`, a stop string ends nothing."""
  with _engine() as engine:
    plain = engine.generate(["FDFDB"], sampling=rollout.Sampling(seed=3)).texts
    assert plain is not None
    text = plain[0][0]
    strings = _strings(*[list(set(text))] * 2)
    sampling = rollout.Sampling(seed=3, stop_strings=strings, min_tokens=4)
    out = engine.generate(["FDFDB"], sampling=sampling)
    assert out.texts is not None and out.texts[0][0] == text[:4]


@pytest.mark.slow
def test_other_stop_strings_are_not_ignored():
  """Lists whose automata differ only in which strings end where."""
  with _engine() as engine:
    prompt = [5, 3, 5, 3, 1]
    seeds = rollout.Sampling(seed=3)
    plain = engine.generate([prompt], num_samples=1, sampling=seeds)
    new_tokens = plain.results.tokens[0][plain.results.mask[0]]
    text = "".join(chr(65 + token) for token in new_tokens)
    for strings, length in (([text[:3]], 3), ([text[:3], text[:2]], 2)):
      sampling = rollout.Sampling(seed=3, stop_strings=_strings(*strings))
      out = engine.generate([prompt], num_samples=1, sampling=sampling)
      assert out.results.mask.sum() == length
