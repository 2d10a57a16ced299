"""`python -m jaxkv rollout`, and the command line itself."""

import json
import re

import numpy as np
import pytest

from jaxkv import __main__ as command_line
from jaxkv import models
from jaxkv._src.commands import prompts as prompt_files
from jaxkv._src.commands import rollout as command
from tests.models import small_model as texts

_PARAGRAPHS = "\n\n".join(
  texts.TEXT[begin : begin + 250].replace("\n\n", " ")
  for begin in range(0, 3000, 250)
)


@pytest.fixture
def main(small_model, monkeypatch):
  """The command line with a model that is trained in seconds."""
  monkeypatch.setattr(models, "character_model", lambda: small_model)
  monkeypatch.setattr(models, "reference_text", lambda: _PARAGRAPHS)
  return command_line.main


@pytest.fixture
def prompts(tmp_path):
  path = tmp_path / "prompts.txt"
  path.write_text("10 is 3 modulo\n10 is 3 modulo seven\n7\n", "utf-8")
  return path


class TestRollout:
  def test_writes_what_it_prints(self, main, prompts, tmp_path, capsys):
    target = tmp_path / "out.json"
    arguments = ["rollout", "--prompts", str(prompts), "--samples", "2"]
    arguments += ["--slots", "2", "--pages", "40", "--page-size", "4"]
    arguments += ["--max-tokens", "12", "--span", "5", "--json", str(target)]
    assert main(arguments) == 0
    result = json.loads(target.read_text("utf-8"))
    assert result["equals_dense"] is True
    assert result["sequences"] == 6
    assert result["hit_tokens"] > 0
    assert result["kv_bytes_used"] < result["kv_bytes_dense"]
    assert [text["prompt_number"] for text in result["texts"]] == [
      0, 0, 1, 1, 2, 2,
    ]  # fmt: skip
    for text in result["texts"]:
      assert len(text["tokens"]) == len(text["log_probs"]) <= 12
      assert max(text["log_probs"]) <= 0
    printed = capsys.readouterr()
    assert "yes, token by token" in printed.out
    assert result["texts"][0]["completion"] in printed.out
    assert "rollout: 100%" in printed.err

  def test_default_prompts_share_a_preamble(self, small_model):
    prompts = prompt_files.default(_PARAGRAPHS, small_model.vocabulary)
    text = _PARAGRAPHS[:200]
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts) > 8
    for prompt in prompts:
      assert small_model.vocabulary.decode(prompt).startswith(text)

  @pytest.mark.parametrize(
    ("content", "message"),
    [
      (None, r"cannot read .*prompts.txt: No such file"),
      ("", r"is empty: it needs one prompt a line"),
      ("10 is\n\n7\n", r"line 2: an empty prompt"),
      ("10 is\n7 §\n", r"line 2: .*'§'"),
      ("10 is\n" + "1" * 600 + "\n", r"line 2: a prompt of 600 tokens"),
    ],
  )
  def test_prompts_that_cannot_be_used(
    self, main, tmp_path, capsys, content, message
  ):
    path = tmp_path / "prompts.txt"
    if content is not None:
      path.write_text(content, "utf-8")
    target = tmp_path / "out.json"
    arguments = ["rollout", "--prompts", str(path), "--json", str(target)]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert _matches(message, error)
    assert not target.exists()
    assert list(tmp_path.glob(".out*")) == []

  @pytest.mark.parametrize(
    ("arguments", "message"),
    [
      (["--samples", "0"], "--samples must be at least 1, not 0"),
      (["--slots", "-3"], "--slots must be at least 1, not -3"),
      (["--pages", "1"], "--pages must be at least 2, not 1"),
      (["--page-size", "0"], "--page-size must be at least 1, not 0"),
      (["--page-size", "513"], "--page-size must be at most 512"),
      (["--max-tokens", "512"], "--max-tokens must be below 512"),
      (["--seed", "-1"], "--seed must be at least 0"),
      (["--seed", "4294967296"], "--seed must be below"),
      (["--temperature", "nan"], "--temperature must be at least 0, not nan"),
      (["--temperature", "inf"], "--temperature must be finite"),
      (["--pages", "8"], r"needs \d+ pages of 16 and --pages 8 leaves 7"),
      (["--json", "/no/such/folder/x.json"], "cannot write /no/such/folder"),
    ],
  )
  def test_arguments_that_cannot_be_used(
    self, main, capsys, arguments, message
  ):
    assert main(["rollout", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert _matches(message, error)


class TestCommandLine:
  def test_no_command(self, capsys):
    with pytest.raises(SystemExit) as exit_:
      command_line.main([])
    assert exit_.value.code == 2
    assert "COMMAND" in capsys.readouterr().err

  def test_help_names_every_option(self, capsys):
    with pytest.raises(SystemExit) as exit_:
      command_line.main(["rollout", "--help"])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    options = ("prompts", "samples", "slots", "pages", "page-size")
    options += ("max-tokens", "seed", "temperature", "span", "json")
    for option in options:
      assert f"--{option}" in printed


def test_padding():
  rows = prompt_files.padded(
    [np.asarray([1, 2], np.int32), np.asarray([3], np.int32)], 4, None
  )
  assert rows.tokens.tolist() == [[1, 2, 0, 0], [3, 0, 0, 0]]
  assert rows.lengths.tolist() == [2, 1]
  assert rows.tokens.shape[1] + 96 < command.SLOT_TOKENS


def _matches(pattern: str, text: str) -> bool:
  return re.search(pattern, text) is not None
