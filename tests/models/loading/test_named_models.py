"""SmolLM2 and Gemma 3 themselves, against what is known of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv import rollout
from jaxkv._src.models.loading import gguf_header
from jaxkv._src.models.loading import gguf_tokenizer
from jaxkv._src.models.loading import named
from tests.models.loading.slow_byte_pairs import SlowBytePairs
from tests.models.loading.test_tokenizer import lines

pytestmark = pytest.mark.deep

_SENTENCE = (
  "The quick brown fox jumps over the lazy dog. Paris is the capital and most "
  "populous city of France, situated on the river Seine."
)


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def model(request):
  pytest.importorskip("gguf", reason="it unpacks the weights")
  pytest.importorskip("tokenizers", reason="it makes the tokens")
  return request.param, models.load(request.param, dtype=jnp.float32)


def _log_probs(model, tokens):
  positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
  logits = models.forward_uncached(
    model.params, jnp.asarray(tokens)[None], positions, config=model.config
  )
  return np.asarray(jax.nn.log_softmax(logits[0], axis=-1))


def test_perplexity_of_a_sentence(model):
  name, model = model
  wanted, within = {
    "smollm2": (18.956, 0.01),
    "gemma3-270m": (13.08, 0.02),
  }[name]
  tokens = model.tokenizer.encode(_SENTENCE)
  assert len(tokens) == 28
  scores = _log_probs(model, tokens)[np.arange(27), tokens[1:]]
  assert abs(np.exp(-scores.mean()) - wanted) < within


def test_tokens_of_smollm2_are_those_of_plain_python():
  pytest.importorskip("tokenizers", reason="it makes the tokens")
  path = named.fetch("smollm2")
  slow = SlowBytePairs(gguf_header.read_gguf_header(path).facts)
  own = gguf_tokenizer.from_file(path)
  for line in lines(10_000):
    assert own.encode(line).tolist() == slow.encode(line)


def test_both_precisions_have_one_tokenizer(model):
  name, model = model
  kept = models.load(name)
  assert kept.config.dtype == jnp.bfloat16
  assert kept.stop_tokens == model.stop_tokens
  for text in (_SENTENCE, "e\u0301 \n\n  12345 👩‍👩‍👧 <|im_start|>"):
    np.testing.assert_array_equal(
      kept.tokenizer.encode(text), model.tokenizer.encode(text)
    )
  wide = np.asarray(model.params["embed"]).astype(jnp.bfloat16)
  np.testing.assert_array_equal(np.asarray(kept.params["embed"]), wide)


def test_greedy_tokens_are_those_without_a_cache(model):
  _, model = model
  texts = [f"{number} things to know about the sea:" for number in range(4)]
  encoded = [model.tokenizer.encode(text) for text in texts]
  lengths = np.asarray([len(tokens) for tokens in encoded], np.int32)
  prompts = np.zeros((4, lengths.max()), np.int32)
  for row, tokens in zip(prompts, encoded, strict=True):
    row[: len(tokens)] = tokens
  sizes = model.cache_config(num_pages=200, num_slots=3, max_length=64)
  state = rollout.init(
    jaxkv.init(sizes),
    model.init_kv(sizes),
    prompts,
    lengths,
    jax.random.key(0),
    rollout.RolloutConfig(max_new_tokens=32, prefill_chunk=16),
    sampling=rollout.Sampling(temperature=0.0),
  )
  end = jax.jit(rollout.generate, static_argnames="model")(
    model.params, state, model=_Once(model.forward)
  )
  done = rollout.generated(end)
  for row, length in zip(
    np.asarray(done.tokens), np.asarray(done.lengths), strict=True
  ):
    scores = _log_probs(model, row[:length])
    begin = int(length) - 32
    drawn = row[begin:length]
    best = scores[begin - 1 : length - 1].max(axis=-1)
    own = scores[np.arange(begin - 1, length - 1), drawn]
    np.testing.assert_allclose(own, best, rtol=0, atol=1e-4)


class _Once:
  """A function that is its own key."""

  def __init__(self, function):
    self._function = function

  def __call__(self, *inputs):
    return self._function(*inputs)
