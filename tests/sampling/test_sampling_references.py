"""The distributions of other libraries: transformers, and vLLM's penalties.

Theirs are computed in float64, ours in float32. vLLM's order of the parts is
used for both libraries.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv._src.sampling.penalties import adjust
from tests.sampling import by_definition
from tests.sampling.by_definition import Row
from tests.tools.draws import probabilities

_CASES = 1000
_BATCH = 100
_STOP_TOKEN = 3


def _imported(name: str) -> Any:
  """Another library, whatever it warns of."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    return pytest.importorskip(name)


def _row(
  rng: np.random.Generator, vocab_size: int, fields: tuple[str, ...]
) -> Row:
  """Returns a sequence that uses about half of the fields."""

  def token() -> int:
    return int(rng.integers(vocab_size))

  def tokens(max_length: int, min_length: int = 0) -> list[int]:
    return [token() for _ in range(rng.integers(min_length, max_length + 1))]

  sampled_tokens = tokens(12)
  settings = {
    "temperature": float(rng.uniform(0.3, 2)),
    "top_k": int(rng.integers(1, max(2, vocab_size // 2))),
    "top_p": float(np.float32(rng.uniform(0.05, 0.999))),
    "min_p": float(np.float32(rng.uniform(0.001, 0.5))),
    "presence_penalty": float(np.float32(rng.uniform(-2, 2))),
    "frequency_penalty": float(np.float32(rng.uniform(-2, 2))),
    "repetition_penalty": float(np.float32(rng.uniform(0.5, 2))),
    "min_tokens": int(rng.integers(0, 12)),
    "stop_tokens": tokens(2),
    "logit_bias": {token(): float(rng.integers(-3, 4)) for _ in range(3)},
    "bad_words": [[*sampled_tokens[-1:], token()], [token()], tokens(3, 1)],
  }
  chosen = {name: settings[name] for name in fields if rng.random() < 0.6}
  return Row(prompt=tokens(12, 1), drawn=sampled_tokens, **chosen)


def _cases(vocab_size: int, fields: tuple[str, ...]):
  """Returns rows, their logits and the distributions of this library."""
  rng = np.random.default_rng(vocab_size)
  rows = [_row(rng, vocab_size, fields) for _ in range(_BATCH)]
  logits = (3 * rng.normal(size=(_BATCH, vocab_size))).astype(np.float32)
  sampling = by_definition.sampling_of(rows)
  history = by_definition.history_of(rows, sampling, vocab_size, _STOP_TOKEN)

  def run(logits, sampling, history):
    return probabilities(adjust(logits, sampling, history), sampling)

  distributions = jax.jit(run)(jnp.asarray(logits), sampling, history)
  return rows, logits, np.asarray(distributions)


def _processors(row: Row) -> list[Any]:
  """Returns the processors of transformers for the settings of a row."""
  torch = _imported("torch")
  module = _imported("transformers.generation.logits_process")

  def biases(bias):
    return [[[token], value] for token, value in bias.items()]

  processors = [
    row.logit_bias
    and module.SequenceBiasLogitsProcessor(biases(row.logit_bias)),
    row.min_tokens
    and module.MinNewTokensLengthLogitsProcessor(
      len(row.prompt),
      row.min_tokens,
      torch.tensor([*row.stop_tokens, _STOP_TOKEN]),
    ),
    row.bad_words
    and module.NoBadWordsLogitsProcessor([list(w) for w in row.bad_words]),
    row.repetition_penalty != 1
    and module.RepetitionPenaltyLogitsProcessor(row.repetition_penalty),
    row.temperature != 1
    and module.TemperatureLogitsWarper(float(np.float32(row.temperature))),
    row.min_p and module.MinPLogitsWarper(row.min_p),
    row.top_k and module.TopKLogitsWarper(row.top_k),
    row.top_p < 1 and module.TopPLogitsWarper(row.top_p),
  ]
  return [processor for processor in processors if processor]


_SIZES = np.linspace(5, 600, _CASES // _BATCH).astype(int).tolist()


@pytest.mark.parametrize("vocab_size", _SIZES)
def test_transformers(vocab_size):
  """Compares all but presence and frequency penalties, which it lacks."""
  torch = _imported("torch")
  _imported("transformers.generation.logits_process")
  rows, logits, distributions = _cases(
    vocab_size,
    (
      *("temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
      *("min_tokens", "stop_tokens", "logit_bias", "bad_words"),
    ),
  )
  for i, row in enumerate(rows):
    scores = torch.tensor(logits[i : i + 1], dtype=torch.float64)
    text = torch.tensor([[*row.prompt, *row.drawn]])
    for processor in _processors(row):
      scores = processor(text, scores)
    expected = scores.softmax(dim=-1)[0].numpy()
    if np.isnan(expected).any():
      # Each token is banned.
      assert np.isnan(distributions[i]).any()
      continue
    np.testing.assert_allclose(distributions[i], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("vocab_size", _SIZES)
def test_vllm(vocab_size):
  """Compares the three penalties and the filters after them."""
  torch = _imported("torch")
  layers = _imported("vllm.model_executor.layers.utils")
  filters = _imported("vllm.v1.sample.ops.topk_topp_sampler")
  rows, logits, distributions = _cases(
    vocab_size,
    (
      *("presence_penalty", "frequency_penalty", "repetition_penalty"),
      *("temperature", "top_k", "top_p"),
    ),
  )

  def padded(name):
    lists = [getattr(row, name) for row in rows]
    width = max(map(len, lists))
    return torch.tensor(
      [[*tokens, *[vocab_size] * (width - len(tokens))] for tokens in lists]
    )

  def column(name):
    return torch.tensor([getattr(row, name) for row in rows])

  scores = layers.apply_penalties(
    torch.tensor(logits),
    padded("prompt"),
    padded("drawn"),
    column("presence_penalty"),
    column("frequency_penalty"),
    column("repetition_penalty"),
  )
  scores = (scores / column("temperature")[:, None]).double()
  k = torch.tensor([min(row.top_k or vocab_size, vocab_size) for row in rows])
  scores = filters.apply_top_k_top_p_pytorch(
    scores, k, column("top_p").double()
  )
  expected = scores.softmax(dim=-1).numpy()
  np.testing.assert_allclose(distributions, expected, atol=1e-6, rtol=0)
