"""`python -m jaxkv grpo`, and its program, which is that of a notebook."""

import functools
import json
import pathlib
import re

import jax
import numpy as np
import pytest

from jaxkv import __main__ as command_line
from jaxkv import models
from jaxkv._src.commands import grpo
from tests import as_users

pytestmark = pytest.mark.slow
_NOTEBOOK = (
  pathlib.Path(__file__).parents[2] / "notebooks" / "08_grpo_in_one_program.py"
)
_ROUNDS = 3


@pytest.fixture(scope="module")
def program():
  """A round as users compile it."""
  model = grpo.decoder("exact")
  key = jax.random.key(0)
  carry = jax.eval_shape(lambda: grpo.begin(model, key))
  call = functools.partial(grpo.grpo_round, model=model)
  jitted = as_users.jit(call, donate_argnums=0)
  return jitted.lower(carry, key).compile()


def _figures(program):
  """Returns the figures of the first rounds of `grpo --seed 0`."""
  init_key, round_keys = jax.random.split(jax.random.key(0))
  carry = grpo.begin(grpo.decoder("exact"), init_key)
  rounds = []
  for key in jax.random.split(round_keys, _ROUNDS):
    carry, figures = program(carry, key)
    rounds.append(figures)
  return jax.tree.map(lambda *some: np.stack(some), *rounds)


def _weights(key):
  return models.init_params(key, grpo.decoder("exact"))


class TestProgram:
  @pytest.mark.deep
  def test_an_update_begins_with_the_numbers_of_the_rollout(self, program):
    figures = _figures(program)
    assert (figures.mismatch == 0).all()
    assert 0 < figures.reward[0] < 0.1

  def test_no_key_is_used_twice(self, monkeypatch):
    """Neither for weights and rounds, nor for prompts and their answers."""
    captured = {}

    def spy(cache, kv, requests, key, config):
      del cache, kv, config
      captured.update(prompts=requests.tokens, key=key)
      raise InterruptedError

    model, key = grpo.decoder("exact"), jax.random.key(0)
    carry = grpo.begin(model, key)
    monkeypatch.setattr(grpo.rollout, "init", spy)
    with pytest.raises(InterruptedError):
      grpo.grpo_round(carry, key, model=model)
    shape = captured["prompts"].shape
    for used in (key, captured["key"]):
      prompts = jax.random.randint(used, shape, 0, grpo.VOCABULARY, np.int32)
      assert not (captured["prompts"] == prompts).all()
    assert not (carry.params["embed"] == _weights(key)["embed"]).all()

  def test_a_prompt_is_computed_once(self, program):
    counted = vars(_figures(program).counters)
    counters = {name: np.asarray(count) for name, count in counted.items()}
    num_prompt_tokens = grpo.PROMPTS * (grpo.TOKENS - 1)
    assert (counters["prefilled"] <= num_prompt_tokens).all()
    answers = grpo.PROMPTS * grpo.SAMPLES
    assert (counters["generated"] == answers * grpo.TOKENS).all()
    assert (counters["recomputed"] == 0).all()

  def test_the_carry_is_updated_in_place(self, program):
    carry = jax.eval_shape(
      lambda: grpo.begin(grpo.decoder("exact"), jax.random.key(0))
    )
    leaves = jax.tree.leaves(carry)
    aliases = re.search(
      r"input_output_alias=\{(.*?)\}, entry", program.as_text()
    )
    assert aliases
    assert len(re.findall(r"-alias\)", aliases[1])) == len(leaves)

  def test_rollout_and_update_share_the_weights(self, program):
    """No array as large as a weight is copied outside of a loop.

    So the rollout's loop reads the arrays that the loop of updates writes.
    Inside of an update XLA copies what its inner loops read and what is not
    stacked: the output projection and the last norm.
    """
    model = grpo.decoder("exact")
    params = jax.eval_shape(lambda: grpo.begin(model, jax.random.key(0)).params)
    shapes = {
      ",".join(map(str, leaf.shape)): jax.tree_util.keystr(path)
      for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    copied = {True: [], False: []}
    text = program.as_text()
    entry = False
    for line in text.splitlines():
      entry = line.startswith("ENTRY") or (entry and line != "}")
      match = re.search(r"= f32\[([\d,]+)\]\S* copy\(%(get-tuple|param)", line)
      if match and match[1] in shapes:
        copied[entry].append(shapes[match[1]])
    assert copied[True] == []
    assert set(copied[False]) <= {"['unembed']", "['final_norm']"}
    assert len(copied[False]) <= 2

  @pytest.mark.deep
  def test_the_notebook_has_equal_figures(self, program):
    text = _NOTEBOOK.read_text("utf-8")
    cells = [
      cell.partition("\n")[2] for cell in re.split(r"^# %%", text, flags=re.M)
    ]
    names: dict = {}
    for cell in cells:
      if re.search(r"^(import|PROMPTS|def draw|def begin)", cell, re.M):
        source = cell.partition("\nstart = ")[0]
        with jax.numpy_dtype_promotion("standard"):
          exec(compile(source, _NOTEBOOK.name, "exec"), names)
      if "def draw" in cell:
        assert sum(bool(line.strip()) for line in cell.splitlines()) <= 45
    init_key, round_keys = jax.random.split(jax.random.key(0))
    carry = names["begin"](names["EXACT"], init_key)
    call = as_users.jit(
      names["grpo_round"].__wrapped__,
      static_argnums=5,
      donate_argnums=(0, 1, 2, 3),
    )
    rewards = []
    for key in jax.random.split(round_keys, _ROUNDS):
      with jax.numpy_dtype_promotion("standard"):
        carry, figures = call(*carry, key, names["EXACT"])
      rewards.append(float(figures["reward"]))
      assert figures["mismatch"][0] == 0
    assert call._cache_size() == 1
    np.testing.assert_array_equal(rewards, _figures(program).reward)


class TestCommand:
  def test_writes_what_it_prints(self, tmp_path, capsys):
    target = tmp_path / "out.json"
    words = ["grpo", "--rounds", str(_ROUNDS), "--numerics", "fast"]
    assert command_line.main([*words, "--json", str(target)]) == 0
    result = json.loads(target.read_text("utf-8"))
    assert len(result["rewards"]) == _ROUNDS
    assert result["reward_before"] == result["rewards"][0] < 0.1
    assert result["reward_after"] == pytest.approx(np.mean(result["rewards"]))
    # Rounding, and no more.
    assert 0 < result["largest_mismatch"] < 1e-4
    assert result["prefilled_tokens"] <= result["prompt_tokens"]
    printed = capsys.readouterr()
    assert f"{result['reward_after']:.3f} in the last {_ROUNDS}" in printed.out
    assert "grpo: 100%" in printed.err
