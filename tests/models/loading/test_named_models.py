"""SmolLM2 and Gemma 3 themselves, against what is known of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from jaxkv._src.models.loading import gguf_checkpoint
from tests.models.loading.mixed_text import lines
from tests.tools import named_models

pytestmark = pytest.mark.deep

_SENTENCE = (
  "The quick brown fox jumps over the lazy dog. Paris is the capital and most "
  "populous city of France, situated on the river Seine."
)


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def model(request):
  pytest.importorskip("gguf", reason="it unpacks the weights")
  pytest.importorskip("tokenizers", reason="it makes the tokens")
  path = named_models.fetch(request.param)
  return request.param, models.load(path, dtype=jnp.float32)


def _log_probs(model, tokens):
  positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
  logits = models.forward_uncached(
    model.params, jnp.asarray(tokens)[None], positions, config=model.config
  )
  return np.asarray(jax.nn.log_softmax(logits[0], axis=-1))


def test_perplexity_of_a_sentence(model):
  name, model = model
  perplexity, tolerance = {
    "smollm2": (18.956, 0.01),
    "gemma3-270m": (13.08, 0.02),
  }[name]
  tokens = model.tokenizer.encode(_SENTENCE)
  assert len(tokens) == 28
  scores = _log_probs(model, tokens)[np.arange(27), tokens[1:]]
  assert abs(np.exp(-scores.mean()) - perplexity) < tolerance


def _facts(path):
  gguf = pytest.importorskip("gguf", reason="it reads the file")
  fields = gguf.GGUFReader(path).fields
  return {key: field.contents() for key, field in fields.items()}


def _tokenizer(path):
  pytest.importorskip("tokenizers", reason="it makes the tokens")
  return gguf_checkpoint.open_checkpoint(path).open_tokenizer()


def test_tokens_of_gemma_are_those_of_sentencepiece():
  """The library itself, given the pieces and scores of the file."""
  library = pytest.importorskip("sentencepiece", reason="it is the reference")
  from sentencepiece import sentencepiece_model_pb2 as protobuf  # pyright: ignore

  path = named_models.fetch("gemma3-270m")
  facts = _facts(path)
  proto = protobuf.ModelProto()
  for piece, score, piece_type in zip(
    *(facts[f"tokenizer.ggml.{name}"] for name in _PIECES), strict=True
  ):
    # The file has spaces where SentencePiece has this mark for them.
    piece = piece.replace(" ", "\u2581")
    proto.pieces.add(piece=piece, score=float(score), type=int(piece_type))
  proto.trainer_spec.model_type = protobuf.TrainerSpec.BPE
  proto.trainer_spec.byte_fallback = True
  proto.trainer_spec.unk_id = int(facts["tokenizer.ggml.unknown_token_id"])
  proto.normalizer_spec.add_dummy_prefix = bool(
    facts.get("tokenizer.ggml.add_space_prefix", True)
  )
  proto.normalizer_spec.remove_extra_whitespaces = False
  reference = library.SentencePieceProcessor(
    model_proto=proto.SerializeToString()
  )
  tokenizer = _tokenizer(path)
  for line in lines(10_000):
    assert tokenizer.encode(line, special=False).tolist() == reference.encode(
      line
    )


_PIECES = ("tokens", "scores", "token_type")
