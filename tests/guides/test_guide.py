"""Guides: every text that is drawn under one is of its grammar."""

import functools
import json
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest

from jaxkv import guides
from tests.guides import small_vocabulary
from tests.guides.tool_schemas import TOOLS
from tests.tools.draws import sample
from tests.tools.tiers import slow_except
from tests.tools.transforms import TRANSFORMS
from tests.tools.transforms import check_under


class DrawnRows(NamedTuple):
  counts: jax.Array
  last_tokens: jax.Array


_TOKENS = [b"", b"a", b"b", b"ab", b"ba", b"c", b""]
_END, _A, _B, _AB, _BA, _C, _NONE = range(len(_TOKENS))


def _guide(grammars, stop_token=_END):
  return guides.guide(grammars, guides.token_bytes(_TOKENS), stop_token)


def _step(guide, extra, counts, last_tokens, logits=None):
  """The tokens allowed in each row, and the states."""
  counts = jnp.asarray(counts, jnp.int32)
  if logits is None:
    logits = jnp.zeros((counts.shape[0], len(_TOKENS)))
  rows = DrawnRows(counts, jnp.asarray(last_tokens, jnp.int32))
  logits, extra = jax.jit(guides.Guide.process)(guide, logits, rows, extra)
  allowed = np.asarray(logits) > -np.inf
  return [np.flatnonzero(row).tolist() for row in allowed], extra


class TestByHand:
  def test_tokens_allowed_along_a_text(self):
    guide = _guide("ab*c")
    extra = guide.init(1)
    allowed, extra = _step(guide, extra, [0], [_BA])
    assert allowed == [[_A, _AB]]
    allowed, extra = _step(guide, extra, [1], [_AB])
    assert allowed == [[_B, _C]]
    allowed, extra = _step(guide, extra, [2], [_B])
    assert allowed == [[_B, _C]]
    allowed, extra = _step(guide, extra, [3], [_C])
    assert allowed == [[_END]]

  def test_a_new_turn_restarts_the_grammar(self):
    guide = _guide("ab*c")
    extra = guide.init(2)
    _, extra = _step(guide, extra, [0, 0], [0, 0])
    _, extra = _step(guide, extra, [1, 1], [_A, _A])
    allowed, extra = _step(guide, extra, [2, 0], [_B, _B])
    assert allowed == [[_B, _C], [_A, _AB]]

  def test_a_forbidden_token_leaves_the_stop_token_alone(self):
    guide = _guide("ab*c")
    allowed, extra = _step(guide, guide.init(1), [1], [_BA])
    assert allowed == [[_END]]
    assert _step(guide, extra, [2], [_A])[0] == [[_END]]
    assert _step(guide, extra, [0], [_A])[0] == [[_A, _AB]]

  def test_texts_end_within_the_tokens_left(self):
    guide = _guide("(ab)*c")
    extra = guide.init(3, max_tokens=[2, 3, 4])
    allowed, extra = _step(guide, extra, [0] * 3, [0] * 3)
    assert allowed == [[_C], [_AB, _C], [_A, _AB, _C]]
    allowed, extra = _step(guide, extra, [1] * 3, [_C, _AB, _A])
    assert allowed == [[_END], [_C], [_B, _BA][:1]]

  def test_one_limit_is_broadcast_to_all_rows(self):
    guide = _guide("(ab)*c")
    extra = guide.init(2, max_tokens=3)
    assert extra.limit.tolist() == [3, 3]
    assert _step(guide, extra, [0, 0], [0, 0])[0] == [[_AB, _C]] * 2

  def test_logits_of_allowed_tokens_are_unchanged(self):
    guide = _guide("a|c")
    rows = DrawnRows(jnp.zeros((1,), jnp.int32), jnp.zeros((1,), jnp.int32))
    logits = jnp.arange(7, dtype=jnp.float32)[None]
    masked, _ = guide.process(logits, rows, guide.init(1))
    inf = np.inf
    assert masked.tolist() == [[-inf, 1.0, -inf, -inf, -inf, 5.0, -inf]]

  def test_a_grammar_and_bytes(self):
    for grammar in (guides.regex("a") + guides.regex("c"), b"ac"):
      guide = _guide(grammar)
      assert _step(guide, guide.init(1), [1], [_A])[0] == [[_C]]

  def test_several_stop_tokens(self):
    guide = _guide("a", stop_token=[_END, _NONE])
    assert _step(guide, guide.init(1), [1], [_A])[0] == [[_END, _NONE]]

  def test_max_bytes_of_the_longest_text(self):
    assert _guide("a{3}b?").max_bytes == 4
    assert _guide("ab*").max_bytes is None
    assert _guide(["a", "ab"]).max_bytes == 2
    assert _guide(["a", None]).max_bytes is None


class TestSeveralGrammars:
  def test_sequences_have_different_grammars(self):
    guide = _guide(["ab", "cb*", "a"])
    extra = guide.init(4, grammars=[2, 0, 1, 0])
    allowed, extra = _step(guide, extra, [0] * 4, [0] * 4)
    assert allowed == [[_A], [_A, _AB], [_C], [_A, _AB]]
    allowed, extra = _step(guide, extra, [1] * 4, [_A, _A, _C, _AB])
    assert allowed == [[_END], [_B], [_END, _B], [_END]]
    allowed, extra = _step(guide, extra, [0] * 4, [0] * 4)
    assert allowed == [[_A], [_A, _AB], [_C], [_A, _AB]]

  def test_rows_in_any_order(self):
    guide = _guide(["ab", "cb*"])
    extra = guide.init(3, grammars=[0, 1, 1])
    rows = jax.tree.map(lambda x: x[jnp.array([2, 0])], extra)
    allowed, _ = _step(guide, rows, [0, 0], [0, 0])
    assert allowed == [[_C], [_A, _AB]]

  def test_a_new_turn_revives_a_dead_row(self):
    guide = _guide(["ab", "cb*"])
    extra = guide.init(2, grammars=[1, 0])
    _, extra = _step(guide, extra, [1, 1], [_A, _C])
    allowed, extra = _step(guide, extra, [0, 0], [0, 0])
    assert allowed == [[_C], [_A, _AB]]

  def test_none_leaves_a_sequence_free(self):
    guide = _guide(["ab", None])
    every = [*range(len(_TOKENS))]
    extra = guide.init(2, grammars=[1, 0], max_tokens=3)
    for count in range(4):
      allowed, extra = _step(guide, extra, [count] * 2, [_A] * 2)
      assert allowed[0] == every and allowed[1] != every


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transformed(transform):
  def check(process):
    guide = _guide(["ab*c", "(ab)*c"])
    extra = guide.init(2, grammars=[0, 1], max_tokens=[9, 4])
    ones = jnp.ones((2,), jnp.int32)
    rows = DrawnRows(ones, _A * ones)
    logits = jnp.zeros((2, len(_TOKENS)), jnp.float32)
    logits, extra = process(guide, logits, rows, extra)
    allowed = [np.flatnonzero(row == 0).tolist() for row in np.asarray(logits)]
    assert allowed == [[_B, _C], [_B]]
    assert logits.dtype == jnp.float32
    assert extra.state.dtype == extra.limit.dtype == jnp.int32

  check_under(transform, check, guides.Guide.process, shared=1)


class TestWrongArguments:
  @pytest.mark.parametrize(
    ("grammars", "stop_token", "error", "message"),
    [
      (3, 0, TypeError, "`grammars` must be a regular expression or a grammar"),
      (["a", 3], 0, TypeError, "got int; see `regex` and `json_schema`"),
      ([], 0, ValueError, "`grammars` must be one grammar or more, got none"),
      ("x", 0, ValueError, "`tokens` must spell a text of each grammar.*'x'"),
      ("a", 7, ValueError, "`stop_token` must be a token, 0 .. 6, got 7"),
      ("a", -1, ValueError, "`stop_token` must be a token, 0 .. 6, got -1"),
      ("a", [], ValueError, "`stop_token` must be one token or more"),
      ("a", 0.5, TypeError, "`stop_token` must hold integers"),
    ],
  )
  def test_wrong_arguments_of_guide(self, grammars, stop_token, error, message):
    with pytest.raises(error, match=message):
      _guide(grammars, stop_token)

  @pytest.mark.parametrize(
    ("options", "message"),
    [
      ({}, "`grammars` must be the index of one of 2 grammars for"),
      ({"grammars": [0]}, r"`grammars` must have the shape \[2\]"),
      ({"grammars": [0, 2]}, r"`grammars\[1\]` must be 0 .. 1, got 2"),
      ({"grammars": [0, 0], "max_tokens": [1]}, r"must have the shape \[2\]"),
      (
        {"grammars": [0, 1], "max_tokens": 3},
        "`max_tokens` must be at least 4, .*, got 3 for sequence 1",
      ),
    ],
  )
  def test_wrong_arguments_of_init(self, options, message):
    with pytest.raises(ValueError, match=message):
      _guide(["a", "ccc"]).init(2, **options)

  def test_wrong_arguments_of_process(self):
    guide = _guide("a")
    with pytest.raises(ValueError, match=r"the shape \[R, 7\].*got \[1, 8\]"):
      _step(guide, guide.init(1), [0], [0], jnp.zeros((1, 8)))


class Drawn(NamedTuple):
  """Texts of tokens drawn from random logits; Q sequences of T tokens.

  Attributes:
    tokens: int32[Q, T], 0 after the stop token.
    lengths: int32[Q], tokens with the stop token; T + 1 without one.
  """

  tokens: np.ndarray
  lengths: np.ndarray


@functools.partial(jax.jit, static_argnums=2)
def _draw(guide, extra, steps, key, temperature):
  """int32[T, Q] tokens, of a loop that goes on after the stop token."""
  num_rows, vocab_size = extra.state.shape[0], guide.tokens.vocab_size
  keys = jax.random.split(key, num_rows)

  def step(carry, count):
    extra, last_tokens = carry
    counts = jnp.full((num_rows,), count)
    logits = jax.random.normal(
      jax.random.fold_in(key, count), (num_rows, vocab_size)
    )
    logits, extra = guide.process(logits, DrawnRows(counts, last_tokens), extra)
    tokens, _ = sample(keys, counts, logits, temperature)
    return (extra, tokens), tokens

  carry = extra, jnp.zeros((num_rows,), jnp.int32)
  counts = jnp.arange(steps, dtype=jnp.int32)
  return jax.lax.scan(step, carry, counts)[1]


def draw(guide, extra, steps, stop_token, seed=0, temperature=2.0) -> Drawn:
  columns = _draw(
    guide, extra, steps, jax.random.key(seed), jnp.float32(temperature)
  )
  tokens = np.asarray(columns).T
  stops = tokens == stop_token
  lengths = np.where(stops.any(axis=1), stops.argmax(axis=1) + 1, steps + 1)
  is_padding = np.arange(steps)[None] >= lengths[:, None]
  return Drawn(np.where(is_padding, 0, tokens), lengths)


def texts_of(samples: Drawn, tokens) -> list[bytes]:
  return [
    b"".join(tokens[token] for token in row[: length - 1])
    for row, length in zip(
      samples.tokens.tolist(), samples.lengths.tolist(), strict=True
    )
  ]


def check_json(schema, tokens, stop_token, limit, count=1000):
  """All samples at temperature 2 end in time, and are valid.

  Returns:
    The texts, and which of them took all tokens of the limit, bool[count].
  """
  guide = guides.guide(
    guides.json_schema(schema), guides.token_bytes(tokens), stop_token
  )
  extra = guide.init(count, max_tokens=limit)
  samples = draw(guide, extra, limit, stop_token)
  assert samples.lengths.max() <= limit
  texts = texts_of(samples, tokens)
  validator = jsonschema.Draft202012Validator(schema)
  for text in texts:
    validator.validate(json.loads(text.decode()))
  return texts, samples.lengths == limit


class TestJson:
  @pytest.mark.slow
  def test_a_thousand_samples_at_temperature_2_parse(self):
    tokens = small_vocabulary.tokens()
    texts, full = check_json({"type": "object"}, tokens, 0, limit=32)
    # Much is drawn, and what would go on for long ends in time.
    assert len(set(texts)) > 500 and full.sum() > 300

  @slow_except("tool", TOOLS, "create_issue")
  @pytest.mark.parametrize("tool", TOOLS)
  def test_calls_of_tools(self, tool):
    tokens = small_vocabulary.tokens()
    texts, _ = check_json(TOOLS[tool], tokens, 0, limit=120, count=200)
    assert len(set(texts)) > 100

  @pytest.mark.slow
  def test_the_shortest_limit(self):
    tokens = small_vocabulary.tokens()
    texts, _ = check_json({}, tokens, 0, limit=3, count=200)
    kinds = {type(json.loads(text)) for text in texts}
    assert kinds >= {int, str, list, dict}


def test_samples_of_a_regular_expression_match_it():
  tokens = small_vocabulary.tokens()
  pattern = r'(Name|Titel): [A-Zé][\w ]{2,20}(, "[^"\n]*")?\.'
  guide = guides.guide(pattern, guides.token_bytes(tokens), 0)
  samples = draw(guide, guide.init(100, max_tokens=30), 30, 0)
  for text in texts_of(samples, tokens):
    assert re.fullmatch(pattern, text.decode(), re.ASCII)
