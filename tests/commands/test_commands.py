"""`python -m jaxkv rollout`, and the command line itself."""

import io
import json
import os
import re
import signal
import sys
import time

import jax
import numpy as np
import pytest

from jaxkv import __main__ as command_line
from jaxkv import models
from jaxkv._src.commands import prompts as prompt_files
from jaxkv._src.commands import results
from jaxkv._src.commands import rollout as command
from jaxkv._src.commands.errors import CommandError
from tests.models import small_model as texts

_PARAGRAPHS = "\n\n".join(
  texts.TEXT[begin : begin + 250].replace("\n\n", " ")
  for begin in range(0, 3000, 250)
)


class _Failing(io.StringIO):
  """A stream that takes text and then cannot pass it on."""

  def __init__(self, error):
    super().__init__()
    self.error = error

  def flush(self):
    raise self.error


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
    assert main([*arguments, "--arrival"]) == 0
    result = json.loads(target.read_text("utf-8"))
    assert result["equals_dense"] is True
    # Of two prompts with a common beginning, each is looked up in its turn.
    assert 0 < result["arrival_hit_rate"] < 1
    assert result["arrival_prefilled_tokens"] >= 16
    assert result["sequences"] == 6
    assert result["hit_tokens"] > 0
    # 14 and 20 tokens, the first ones in common: three pages of 4, then 1 and 3
    # tokens. What the second one has besides, the first one generates.
    assert result["least_prefilled_tokens"] == 16
    assert 16 <= result["prefilled_tokens"] < result["prompt_tokens"]
    assert result["kv_bytes_used"] < result["kv_bytes_dense"]
    assert [text["prompt_number"] for text in result["texts"]] == [
      0, 0, 1, 1, 2, 2,
    ]  # fmt: skip
    for text in result["texts"]:
      assert len(text["tokens"]) == len(text["log_probs"]) <= 12
      assert max(text["log_probs"]) <= 0
    printed = capsys.readouterr()
    assert "yes, token by token" in printed.out
    assert printed.out.count("in the order of arrival") == 2
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
      ("10 is\n7 §\n", r"line 2: .*'§'.*; remove it"),
      ("10 is\f7\n", r"line 1: .*'\\x0c' at position 5"),
      ("10 is\x007\n", r"line 1: .*'\\x00' at position 5"),
      ("10 is\u20287\n", r"line 1: .*'\\u2028' at position 5"),
      (b"10 is\xff\n", r"not UTF-8 text: .* at byte 5; save it as UTF-8"),
      ("10 is\n" + "1" * 600 + "\n", r"line 2: a prompt of 600 tokens"),
    ],
  )
  def test_prompts_that_cannot_be_used(
    self, main, tmp_path, capsys, content, message
  ):
    path = tmp_path / "prompts.txt"
    if isinstance(content, str):
      content = content.encode()
    if content is not None:
      path.write_bytes(content)
    target = tmp_path / "out.json"
    arguments = ["rollout", "--prompts", str(path), "--json", str(target)]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert _matches(message, error)
    assert [*tmp_path.iterdir()] == ([] if content is None else [path])

  @pytest.mark.parametrize(
    ("arguments", "message"),
    [
      (["--samples", "0"], "--samples must be 1 .. 65536, not 0"),
      (["--samples", "9223372036854775808"], "--samples must be 1 .. 65536"),
      (["--samples", "1000000000000"], "--samples must be 1 .. 65536"),
      (["--samples", "50000"], "50000 of 12 prompts .* lower --samples"),
      (["--slots", "-3"], "--slots must be 1 .. 8192, not -3"),
      (["--slots", "10000000"], "--slots must be 1 .. 8192"),
      (["--pages", "1"], "--pages must be 2 .. 4194304, not 1"),
      (["--pages", "9223372036854775808"], "--pages must be 2 .. 4194304"),
      (["--pages", "1000000000000"], "--pages must be 2 .. 4194304"),
      (["--pages", "300000"], "--pages must be at most 262144 with --page-s"),
      (["--page-size", "0"], "--page-size must be 1 .. 512, not 0"),
      (["--page-size", "513"], "--page-size must be 1 .. 512"),
      (["--max-tokens", "512"], "--max-tokens must be 1 .. 511"),
      (["--seed", "-1"], "--seed must be 0 .. 4294967295"),
      (["--seed", "4294967296"], "--seed must be 0 .. 4294967295"),
      (["--span", "1099511627776"], "--span must be 0 .. 2147483647"),
      (["--temperature", "nan"], "--temperature: .* must be 0, or .* got nan"),
      (["--temperature", "inf"], "--temperature: .* finite float32 .* got inf"),
      (["--temperature", "-1"], "--temperature: .* got -1.0"),
      (["--temperature", "1e39"], r"--temperature: .* got 1e\+39"),
      (["--temperature", "1e-46"], "--temperature: .* got 1e-46; use 0 for"),
      (["--pages", "8"], r"needs \d+ pages of 16 and --pages 8 leaves 7"),
      (["--json", "/no/such/folder/x.json"], "cannot write /no/such/folder"),
      (["--json", ""], "folder; name another file for --json"),
      (["--prompts", "one\ntwo"], r"cannot read one\\ntwo: No such file"),
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

  def test_lines_end_as_on_any_system(self, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"10 is\r\n7\r\n12 is")
    known = models.Vocabulary("0127 is")
    read = prompt_files.read(str(path), known)
    assert [known.decode(one) for one in read] == ["10 is", "7", "12 is"]
    path.write_bytes(b"10 is\f7\n")
    with pytest.raises(CommandError, match="line 1"):
      prompt_files.read(str(path), known)

  def test_a_folder_that_cannot_keep_the_model(
    self, tmp_path, monkeypatch, capsys
  ):
    """Told before the training, which would take a minute."""
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("JAXKV_CACHE", str(blocker / "folder"))
    assert command_line.main(["rollout"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert _matches(r"error: .*\(Not a directory\); set JAXKV_CACHE", error)


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
    options += ("max-tokens", "seed", "temperature", "span", "arrival", "json")
    for option in options:
      assert f"--{option}" in printed

  @pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
      (KeyboardInterrupt(), 130, "error: interrupted; run it again"),
      (MemoryError(), 2, "error: out of memory; lower --pages"),
      (
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
        2,
        "error: out of memory; lower --pages",
      ),
      (CommandError("a\r\nb\x1b[0m"), 2, r"error: a\\r\\nb\\x1b\[0m$"),
    ],
  )
  def test_one_line_tells_what_ended_it(
    self, monkeypatch, capsys, raised, code, message
  ):
    def run(_):
      raise raised

    monkeypatch.setattr(command, "run", run)
    assert command_line.main(["rollout"]) == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert _matches(message, error.strip())

  def test_a_bug_is_not_reported_as_a_mistake(self, monkeypatch):
    def run(_):
      raise jax.errors.JaxRuntimeError("INTERNAL: no")

    monkeypatch.setattr(command, "run", run)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
      command_line.main(["rollout"])

  def test_sigterm_unwinds(self, monkeypatch, capsys):
    left = []

    def run(_):
      try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
      finally:
        left.append("cleaned up")

    monkeypatch.setattr(command, "run", run)
    assert command_line.main(["rollout"]) == 143
    assert left == ["cleaned up"]
    assert capsys.readouterr().err == "error: terminated; run it again\n"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

  @pytest.mark.parametrize(
    ("output", "message"),
    [
      (None, "standard output is closed; send it to a file"),
      (_Failing(BrokenPipeError(32, "Broken pipe")), "Broken pipe; send"),
      (io.TextIOWrapper(io.BytesIO(), "ascii"), "in ascii; set PYTHONIOENCOD"),
    ],
  )
  def test_output_that_cannot_be_printed(
    self, monkeypatch, capsys, output, message
  ):
    def run(_):
      with results.printed():
        print("\N{RIGHT SINGLE QUOTATION MARK}")
      return 0

    monkeypatch.setattr(command, "run", run)
    with monkeypatch.context() as patch:
      patch.setattr(sys, "stdout", output)
      assert command_line.main(["rollout"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: cannot print the result")
    assert error.count("\n") == 1
    assert message in error


def test_padding():
  rows = prompt_files.padded(
    [np.asarray([1, 2], np.int32), np.asarray([3], np.int32)], 4, None
  )
  assert rows.tokens.tolist() == [[1, 2, 0, 0], [3, 0, 0, 0]]
  assert rows.lengths.tolist() == [2, 1]
  assert rows.tokens.shape[1] + 96 < command.SLOT_TOKENS


def _matches(pattern: str, text: str) -> bool:
  return re.search(pattern, text) is not None
