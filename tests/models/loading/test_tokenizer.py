"""Tokenizers: those of folders, those of .gguf files, chats and bytes."""

import itertools
import json
import re

import numpy as np
import pytest

from jaxkv import guides
from jaxkv._src.models.loading import gguf_tokenizer
from jaxkv._src.models.loading import tokenizer as tokenizers_of
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.tokenizer import Tokenizer
from tests.models.loading.mixed_text import lines

tokenizers = pytest.importorskip("tokenizers", reason="it makes the tokens")


def _tokenizer(facts):
  return gguf_tokenizer.open_tokenizer(ConfigFile(facts, "m.gguf"))


def _byte_facts(pre="smollm"):
  """A vocabulary of all bytes and of what a short training adds."""
  model = tokenizers.Tokenizer(tokenizers.models.BPE())
  model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False)
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=600,
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
    show_progress=False,
  )
  model.train_from_iterator(lines(300), trainer)
  stored = json.loads(model.to_str())["model"]
  order = sorted(stored["vocab"], key=stored["vocab"].get)
  return {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": pre,
    "tokenizer.ggml.tokens": order,
    "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(order) - 3),
    "tokenizer.ggml.merges": [" ".join(pair) for pair in stored["merges"]],
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.chat_template": (
      "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' "
      "+ m['content'] + eos_token }}{% endfor %}"
      "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
  }


def _merged(word, ranks):
  """Byte pairs merged one after the other, the best pair first."""
  pieces = list(word)
  while len(pieces) > 1:
    pairs = list(itertools.pairwise(pieces))
    best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
    if best not in ranks:
      return pieces
    index = pairs.index(best)
    pieces[index : index + 2] = ["".join(best)]
  return pieces


class TestByteLevel:
  def test_pairs_are_merged_by_rank(self):
    facts = _byte_facts()
    tokenizer = _tokenizer(facts)
    tokens = facts["tokenizer.ggml.tokens"]
    ranks = {
      tuple(pair.split(" ")): rank
      for rank, pair in enumerate(facts["tokenizer.ggml.merges"])
    }
    for word in ("quick", "return", "comment", "clock"):
      pieces = [tokens[i] for i in tokenizer.encode(word)]
      assert pieces == _merged(word, ranks)

  def test_digits_stand_alone_or_in_threes(self):
    for pre, lengths in (
      ("smollm", {1}),
      ("qwen2", {1}),
      ("llama-bpe", {1, 3}),
    ):
      facts = _byte_facts(pre)
      facts["tokenizer.ggml.tokens"] += ["12", "123", "1234"]
      facts["tokenizer.ggml.token_type"] += [1, 1, 1]
      facts["tokenizer.ggml.merges"] += ["1 2", "12 3", "123 4"]
      facts["tokenizer.ggml.add_bos_token"] = False
      tokenizer = _tokenizer(facts)
      pieces = [tokenizer.decode([i]) for i in tokenizer.encode("1234")]
      assert {len(piece) for piece in pieces} == lengths, pre

  def test_decoding_inverts_encoding(self):
    tokenizer = _tokenizer(_byte_facts("gpt-2"))
    for line in lines(200):
      assert tokenizer.decode(tokenizer.encode(line), special=True) == line

  def test_bytes_of_tokens(self):
    tokenizer = _tokenizer(_byte_facts("gpt-2"))
    pieces = tokenizer.token_bytes()
    assert pieces[:3] == [b"", b"", b""]
    for line in lines(50):
      tokens = tokenizer.encode(line).tolist()
      plain = re.sub(r"<\|im_(start|end)\|>", "", line)
      assert b"".join(pieces[i] for i in tokens) == plain.encode()
    assert guides.token_bytes(pieces).vocab_size == len(pieces)

  def test_bytes_of_added_tokens(self):
    """Only a decoder that turns the block into a space does so in the bytes."""
    tokenizer = _tokenizer(_byte_facts("gpt-2"))
    tokenizer.core.add_tokens(["<tool▁calls>", "[é]"])
    added = tokenizer.encode("<tool▁calls>[é]").tolist()
    assert len(added) == 2
    joined = b"".join(tokenizer.token_bytes()[i] for i in added)
    assert joined.decode(errors="replace") == tokenizer.decode(added)

  def test_chat(self):
    own = _tokenizer(_byte_facts())
    pytest.importorskip("jinja2", reason="it renders templates")
    messages = [{"role": "user", "content": "hi"}]
    text = own.chat(messages)
    assert text == "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n"
    tokens = own.encode_chat(messages)
    assert (tokens.dtype, tokens[0]) == (np.int32, 1)
    assert own.chat(messages, answer=False).endswith("<|im_end|>")
    refusing = Tokenizer(own.core, template="{{ raise_exception('no') }}")
    with pytest.raises(ValueError, match="refuses the conversation: no"):
      refusing.chat(messages)
    damaged = Tokenizer(own.core, template="{% for %}")
    with pytest.raises(ValueError, match="cannot be rendered"):
      damaged.chat(messages)
    with pytest.raises(ValueError, match="no chat template"):
      Tokenizer(own.core).chat(messages)
    marked = "a {%- generation -%} b{% endgeneration %}\n{{ 'c' }}"
    assert Tokenizer(own.core, template=marked).chat(messages) == "abc"

  def test_a_lone_surrogate_is_refused(self):
    tokenizer = _tokenizer(_byte_facts())
    with pytest.raises(
      ValueError, match=r"got '\\ud83d' at position 2; remove"
    ):
      tokenizer.encode("a \ud83d")


class TestSentencePieces:
  _TOKENS = (
    "<unk> <s> </s> <0x0A> <0xC3> <0xA9> ▁ a b c ab abc ▁a ▁ab bc".split()
  )

  def _facts(self):
    scores = [0.0] * 6 + [-9.0] * 4 + [-2.0, -1.0, -3.0, -4.0, -5.0]
    kinds = [2, 3, 3, 6, 6, 6] + [1] * 9
    return {
      "tokenizer.ggml.model": "llama",
      "tokenizer.ggml.tokens": list(self._TOKENS),
      "tokenizer.ggml.scores": scores,
      "tokenizer.ggml.token_type": kinds,
      "tokenizer.ggml.bos_token_id": 1,
      "tokenizer.ggml.eos_token_id": 2,
      "tokenizer.ggml.unknown_token_id": 0,
    }

  def test_the_best_score_is_merged_first(self):
    tokenizer = _tokenizer(self._facts())
    pieces = [self._TOKENS[i] for i in tokenizer.encode("abc ab")]
    assert pieces == ["<s>", "▁", "abc", "▁ab"]
    assert tokenizer.decode(tokenizer.encode("abc ab")) == "abc ab"

  def test_templates_have_the_names_of_transformers(self):
    facts = self._facts() | {"tokenizer.ggml.padding_token_id": 2}
    own = _tokenizer(facts)
    assert own.variables["unk_token"] == "<unk>"
    assert own.variables["pad_token"] == "</s>"

  def test_bytes_are_the_last_resort(self):
    tokenizer = _tokenizer(self._facts())
    pieces = [self._TOKENS[i] for i in tokenizer.encode("é", special=False)]
    assert pieces == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.token_bytes()[3:8] == [b"\n", b"\xc3", b"\xa9", b" ", b"a"]

  def test_only_two_digits_are_a_byte(self):
    tokenizer = _tokenizer(self._facts())
    tokenizer.core.add_tokens(["<0xZZ>"])
    assert tokenizer.token_bytes()[-1] == b"<0xZZ>"

  def test_no_space_is_added_before_a_text(self):
    facts = self._facts() | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = _tokenizer(facts)
    assert tokenizer.encode("ab", special=False).tolist() == [10]


class TestRefused:
  def test_unknown_models_are_refused(self):
    with pytest.raises(ValueError, match=r"model` in m\.gguf must be 'gpt2'"):
      _tokenizer({"tokenizer.ggml.model": "rwkv"})
    for pre in ("other", "default"):
      facts = _byte_facts() | {"tokenizer.ggml.pre": pre}
      with pytest.raises(
        ValueError, match=rf"ggml\.pre` in m\.gguf must be .*'{pre}'"
      ):
        _tokenizer(facts)

  @pytest.mark.parametrize("key", ["model", "tokens", "merges", "pre"])
  def test_missing_facts_are_named(self, key):
    facts = _byte_facts()
    del facts[f"tokenizer.ggml.{key}"]
    with pytest.raises(ValueError, match=rf"m\.gguf lacks `.*\.{key}`"):
      _tokenizer(facts)

  def test_a_token_id_out_of_range_is_refused(self):
    facts = _byte_facts() | {"tokenizer.ggml.bos_token_id": 9999}
    with pytest.raises(ValueError, match=r"bos_token_id` in m\.gguf must be"):
      _tokenizer(facts)

  def test_a_damaged_file_is_refused(self, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
      tokenizers_of.from_folder(tmp_path)


def test_tokens_of_a_folder_are_those_of_the_library(tmp_path):
  """Its options for padding and truncation are for training, and left out."""
  core = _tokenizer(_byte_facts()).core
  core.enable_truncation(4)
  core.enable_padding(length=8)
  core.save(str(tmp_path / "tokenizer.json"))
  config = {
    "eos_token": {"content": "<|im_end|>"},
    "bos_token": None,
    "add_bos_token": True,
    "chat_template": "x",
  }
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
  template = "{{ bos_token }}{{ eos_token }}{{ add_bos_token }}"
  (tmp_path / "chat_template.jinja").write_text(template)
  tokenizer = tokenizers_of.from_folder(tmp_path)
  core.no_truncation()
  core.no_padding()
  for line in lines(10_000):
    assert tokenizer.encode(line).tolist() == core.encode(line).ids
  pytest.importorskip("jinja2", reason="it renders templates")
  messages = [{"role": "user", "content": "hi"}]
  assert tokenizer.chat(messages) == "<|im_end|>"
