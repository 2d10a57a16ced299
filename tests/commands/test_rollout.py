"""`python -m jaxkv rollout`, and the command line itself."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import pytest
import tqdm

import jaxkv
from jaxkv import __main__ as command_line
from jaxkv import models
from jaxkv import rollout
from jaxkv._src.commands import characters
from jaxkv._src.commands import rollout as command
from jaxkv._src.commands.output import CommandError
from tests.models import small_model as texts
from tests.models import tiny_decoders as tiny

_PARAGRAPHS = "\n\n".join(
  texts.TEXT[begin : begin + 250].replace("\n\n", " ")
  for begin in range(0, 3000, 250)
)
_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %} is"


@pytest.fixture
def main(small_model, monkeypatch):
  """The command line with a model that is trained in seconds."""
  monkeypatch.setattr(characters, "character_model", lambda: small_model)
  monkeypatch.setattr(characters, "reference_text", lambda: _PARAGRAPHS)
  return command_line.main


@pytest.fixture
def pretrained(small_model, monkeypatch):
  """`--model M` is the small model, with a chat template."""
  tokenizer = characters.Vocabulary(small_model.tokenizer.characters)
  model = dataclasses.replace(small_model, open_tokenizer=lambda: tokenizer)

  def load(source, **_):
    assert source == "M"
    return model

  tokenizer.template = _TEMPLATE
  monkeypatch.setattr(models, "load", load)
  return model


def _status(main, *arguments):
  try:
    return main(["rollout", *map(str, arguments)])
  except SystemExit as end:  # argparse
    return end.code


def _last_line(capsys):
  return capsys.readouterr().err.replace("\r", "\n").splitlines()[-1]


def _texts(path):
  return json.loads(path.read_text("utf-8"))["texts"]


class TestRollout:
  @pytest.mark.slow
  def test_writes_what_it_prints(self, main, tmp_path, capsys):
    path, target = tmp_path / "prompts.txt", tmp_path / "out.json"
    # Blank lines are no prompts.
    lines = ("10 is 3 modulo", "", "10 is 3 modulo seven", "  ", "7", "")
    path.write_text("\n".join(lines), "utf-8")
    arguments = ["--prompts", path, "--samples", 2, "--slots", 2]
    arguments += ["--pages", 40, "--page-size", 4, "--max-tokens", 12]
    assert _status(main, *arguments, "--json", target) == 0
    result = json.loads(target.read_text("utf-8"))
    assert 0 < result["largest_difference"] < command.CLOSE
    assert result["sequences"] == 6
    assert result["hit_tokens"] > 0
    assert 16 <= result["prefilled"] < result["prompt_tokens"]
    samples = [
      (text["prompt_number"], text["sample"]) for text in result["texts"]
    ]
    assert samples == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    for text in result["texts"]:
      assert len(text["tokens"]) == len(text["log_probs"]) <= 12
      assert max(text["log_probs"]) <= 0
    printed = capsys.readouterr()
    assert "equals uncached   yes" in printed.out
    assert f"[{result['texts'][0]['text']}]" in printed.out
    assert "rollout: 100%" in printed.err

  @pytest.mark.slow
  def test_a_wrong_forward_pass_gives_status_1(self, main, monkeypatch, capsys):
    """Status 1 if the loop computes something else than the model does."""
    right = models.Pretrained.forward.fget
    assert right is not None

    def with_a_bug(model):
      def forward(*arguments, **keywords):
        logits, kv = right(model)(*arguments, **keywords)
        return 1.1 * logits, kv

      return forward

    monkeypatch.setattr(models.Pretrained, "forward", property(with_a_bug))
    assert _status(main, "--prompt", "7 is", "--max-tokens", 4) == 1
    assert "equals uncached   NO" in capsys.readouterr().out

  @pytest.mark.slow
  def test_the_progress_bar_advances_often(self, main, monkeypatch):
    """A span of steps is short beside the whole rollout."""
    updates = []

    class Bar(tqdm.tqdm):
      def update(self, n=1):
        updates.append(n)
        return super().update(n)

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    assert _status(main) == 0
    assert len(updates) >= 4
    assert updates[0] < sum(updates) / 8

  def test_bytes_are_those_of_the_pages_of_each_pool(self):
    decoder = tiny.llama(num_layers=3, head_dim=8, windows=(4, 4, None))
    config = models.cache_config(decoder, num_slots=2, max_length=32)
    state = rollout.init(
      jaxkv.init(config),
      models.init_kv(decoder, config),
      rollout.Requests([[1, 2, 3]], [3]),
      jax.random.key(0),
      rollout.RolloutConfig(max_new_tokens=4),
    )
    peaks = jnp.asarray([3, 2], jnp.int32)
    counters = dataclasses.replace(state.counters, peak_pages=peaks)
    state = dataclasses.replace(state, counters=counters)
    metrics = command._metrics(state)
    assert metrics["pages"] == config.num_pages
    assert metrics["peak_pages"] == [3, 2]
    # A token of a layer has a key and a value of 8 numbers in float32.
    num_bytes = (3 * 2 + 2 * 1) * 16 * 64
    table = dict(command._rows(metrics | {"seconds": 1, "compile_seconds": 1}))
    assert table["K/V bytes used"] == f"{num_bytes:,} at the peak of each pool"

  def test_default_prompts_share_a_preamble(self):
    prompts = command.default_prompts(_PARAGRAPHS).values()
    assert len(set(prompts)) == len(prompts) > 8
    assert all(prompt.startswith(_PARAGRAPHS[:200]) for prompt in prompts)

  @pytest.mark.parametrize(
    ("content", "message"),
    [
      (None, r"cannot read .*prompts.txt: No such file"),
      ("", r"has no prompt; write one a line"),
      ("\n \n", r"has no prompt; write one a line"),
      ("10 is\n7 §\n", r"line 2: .*'§'.*; remove it"),
      ("10 is\f7\n", r"line 1: .*'\\x0c' at position 5"),
      (b"10 is\xff\n", r"not UTF-8 text: .* at byte 5; save it as UTF-8"),
      ("10 is\n" + "1" * 600 + "\n", r"line 2: a prompt must have 1 to 416"),
    ],
  )
  def test_invalid_prompts_are_refused(
    self, main, tmp_path, capsys, content, message
  ):
    path, target = tmp_path / "prompts.txt", tmp_path / "out.json"
    content = content.encode() if isinstance(content, str) else content
    if content is not None:
      path.write_bytes(content)
    assert _status(main, "--prompts", path, "--json", target) == 2
    error = _last_line(capsys)
    assert error.startswith("error: ")
    assert re.search(message, error)
    assert not target.exists()

  @pytest.mark.parametrize(
    ("arguments", "message"),
    [
      (["--samples", "0"], "--samples: must be a whole number in 1 .. 4194304"),
      (["--slots", "9223372036854775808"], "--slots: must be a whole number"),
      (["--pages", "1"], "--pages: must be a whole number in 2 .. 4194304"),
      (["--pages", "many"], "not many"),
      (["--seed", "-1"], "--seed: must be a whole number in 0 .. 4294967295"),
      (["--max-tokens", "9000"], "--max-tokens must be below 512, .* not 9000"),
      (["--temperature", "nan"], "temperature.* got nan"),
      (["--temperature", "-1"], "temperature.* got -1.0"),
      (["--pages", "8"], r"pages"),
      (["--json", "/no/such/folder/x.json"], "cannot write /no/such/folder"),
      (["--chat"], "default prompt 0: .* no chat template"),
      (["--prompt", ""], "--prompt 1: a prompt must have 1 to 416 tokens"),
      (["--prompts", "one\ntwo"], r"cannot read one\\ntwo: No such file"),
      (["--model", "no_such_model"], "--model: source must be a folder"),
    ],
  )
  def test_invalid_arguments_are_refused(
    self, main, capsys, arguments, message
  ):
    assert _status(main, *arguments) == 2
    error = _last_line(capsys)
    assert "error: " in error
    assert re.search(message, error)

  @pytest.mark.parametrize("index", [0, 1])
  def test_only_process_0_needs_the_folder(
    self, main, monkeypatch, capsys, index
  ):
    def start(_):
      raise CommandError("no other process")

    monkeypatch.setattr(command.processes, "start", start)
    words = ["--json", "/no/such/folder/x.json"]
    assert _status(main, *words, "--processes", f"host:1,2,{index}") == 2
    message = "no other process" if index else "cannot write"
    assert message in _last_line(capsys)

  def test_a_folder_that_cannot_keep_the_model(
    self, tmp_path, monkeypatch, capsys
  ):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXKV_CACHE", str(tmp_path / "file" / "folder"))
    assert command_line.main(["rollout"]) == 2
    assert re.search(r"error: .*file.*; set JAXKV_CACHE", _last_line(capsys))


class TestPretrained:
  @pytest.mark.slow
  def test_answers(self, main, pretrained, tmp_path):
    target = tmp_path / "out.json"
    arguments = ["--model", "M", "--temperature", 0, "--max-tokens", 9]
    arguments += ["--prompt", "10", "--prompt", "12", "--json", target]
    assert _status(main, *arguments, "--chat") == 0
    answers = _texts(target)
    assert [answer["prompt"] for answer in answers] == ["10", "12"]
    for answer in answers:
      tokens = pretrained.tokenizer.encode(f"{answer['prompt']} is").tolist()
      tokens += answer["tokens"]
      logits = models.forward_uncached(
        pretrained.params,
        jnp.asarray(tokens, jnp.int32)[None],
        jnp.arange(len(tokens), dtype=jnp.int32)[None],
        config=pretrained.config,
      )
      best = jnp.argmax(logits[0], axis=-1).tolist()
      assert best[-1 - len(answer["tokens"]) : -1] == answer["tokens"]

  def test_a_template_that_raises(self, main, pretrained, capsys):
    pretrained.tokenizer.template = "{{ 1 // 0 }}"
    arguments = ("--model", "M", "--chat", "--prompt", "10")
    assert _status(main, *arguments) == 2
    error = _last_line(capsys)
    assert error.startswith("error: --prompt 1: ")
    assert "ZeroDivisionError" in error


class TestCommandLine:
  def test_a_missing_command_is_refused(self, capsys):
    with pytest.raises(SystemExit) as exit_:
      command_line.main([])
    assert exit_.value.code == 2
    assert "COMMAND" in capsys.readouterr().err

  def test_help_names_every_option(self, capsys):
    options = (
      "model prompt prompts chat samples max-tokens temperature seed slots "
      "pages page-size json processes"
    )
    with pytest.raises(SystemExit) as exit_:
      command_line.main(["rollout", "--help"])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    options_of_help = re.findall(r"^  --([a-z-]+)", printed, re.MULTILINE)
    assert sorted(options_of_help) == sorted(options.split())

  @pytest.mark.parametrize(
    ("raised", "message"),
    [
      (MemoryError(), "error: out of memory; lower --pages"),
      (
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
        "error: out of memory; lower --pages",
      ),
      (CommandError("a\r\nb\x1b[0m"), r"error: a\\r\\nb\\x1b\[0m$"),
    ],
  )
  def test_errors_are_reported_in_one_line(
    self, monkeypatch, capsys, raised, message
  ):
    def run(_):
      raise raised

    monkeypatch.setattr(command, "run", run)
    assert command_line.main(["rollout"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error.strip())

  def test_a_bug_is_not_reported_as_a_mistake(self, monkeypatch):
    def run(_):
      raise jax.errors.JaxRuntimeError("INTERNAL: no")

    monkeypatch.setattr(command, "run", run)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
      command_line.main(["rollout"])
