"""GRPO of tunix, unchanged, on the engine for tunix."""

import functools
import importlib
import threading

import jax
import numpy as np
import pytest

from tests.integrations import tunix_setup as setup
from tests.tools.compiled_programs import num_compiled

pytestmark = pytest.mark.filterwarnings("ignore")

_STEPS = 5


def _watched(steps):
  """The engine, which notes what a trainer asks of it."""
  setup.module("rl.rollout.base_rollout")
  client = importlib.import_module("jaxkv.integrations.tunix")

  class Watched(client.JaxkvRollout):
    def generate(self, prompts, rollout_config, **kwargs):
      num_programs = num_compiled()
      num_prefilled = self.counters().get("prefilled", 0)
      out = super().generate(prompts, rollout_config, **kwargs)
      steps.append(
        {
          "compiled": num_compiled() - num_programs,
          "prefilled": self.counters()["prefilled"] - num_prefilled,
          "out": out,
          "weights": jax.tree.leaves(self._params),
        }
      )
      return out

  return Watched


def _trained(steps, *, same_prompts=False, offload=False, lora=False):
  """A learner after five steps of GRPO, with four samples of two prompts."""
  learner = setup.module("rl.grpo.grpo_learner")
  model = setup.tiny("llama3", seed=4)
  if lora:
    model = _with_lora(model)
  config = setup.config(temperature=1.0, top_p=1.0, max_tokens_to_generate=20)
  cluster = setup.cluster(
    model,
    _watched(steps),
    config,
    max_steps=_STEPS,
    offload_to_cpu=offload,
    rate=1.0 if lora else 0.05,
  )
  trainer = learner.GRPOLearner(
    rl_cluster=cluster,
    reward_fns=setup.reward,
    algo_config=learner.GRPOConfig(num_generations=4, num_iterations=1),
  )
  trainer.train(
    [
      {
        "prompts": np.array(
          [
            setup.prompt(0 if same_prompts else 2 * step + row, 20 + step % 3)
            for row in range(2)
          ]
        )
      }
      for step in range(_STEPS)
    ]
  )
  return cluster


def _with_lora(model):
  qwix = pytest.importorskip("qwix", reason="needs qwix: pip install qwix")
  provider = qwix.LoraProvider(
    module_path=".*q_proj|.*gate_proj", rank=2, alpha=2.0
  )
  return qwix.apply_lora_to_model(model, provider, **model.get_model_input())


def _check(steps, cluster):
  """Nothing is compiled later, and each step had the weights of its time."""
  assert len(steps) == _STEPS
  assert [step["compiled"] for step in steps[1:]] == [0] * (_STEPS - 1)
  nnx = importlib.import_module("flax.nnx")
  ours = jax.tree.leaves(nnx.state(cluster.rollout.model(), nnx.Param))
  trained = jax.tree.leaves(nnx.state(cluster.actor_trainer.model, nnx.Param))
  for leaf, trained_leaf in zip(ours, trained, strict=True):
    np.testing.assert_array_equal(leaf, trained_leaf)


@pytest.mark.parametrize("offload", [False, True])
def test_grpo_computes_each_prompt_once(offload):
  steps = []
  cluster = _trained(steps, offload=offload)
  _check(steps, cluster)
  # Of each group a prompt is computed once.
  assert all(step["prefilled"] <= 2 * 24 for step in steps)


def test_new_weights_find_no_old_page():
  """The same prompt in each step; no page of it is found after training."""
  steps = []
  _check(steps, _trained(steps, same_prompts=True))
  assert all(step["prefilled"] >= 19 for step in steps)


def test_log_probs_in_training_are_the_trainers():
  """Log-probs of the last step are the trainer's with the weights before it."""
  common = setup.module("rl.common")
  nnx = importlib.import_module("flax.nnx")
  steps = []
  cluster = _trained(steps)
  out = steps[-1]["out"]
  weights = steps[-1]["weights"]
  graphdef, state = nnx.split(cluster.actor_trainer.model)
  state = jax.tree.unflatten(jax.tree.structure(state), weights)
  padded = np.full((len(out.tokens), 20), setup.PAD, np.int32)
  for row, tokens in enumerate(out.tokens):
    padded[row, : len(tokens)] = tokens
  scores = common.compute_per_token_logps(
    graphdef,
    state,
    prompt_tokens=out.left_padded_prompt_tokens,
    completion_tokens=padded,
    pad_id=setup.PAD,
    eos_id=setup.EOS,
  )
  for row, values in enumerate(out.logprobs):
    np.testing.assert_allclose(values, scores[row, : len(values)], atol=5e-6)


def test_lora_weights_reach_the_engine():
  steps = []
  _check(steps, _trained(steps, lora=True))


@pytest.mark.deep
def test_agents_in_threads():
  """Tunix's agentic learner: eight at once, four turns, each with a limit."""
  learner = setup.module("rl.agentic.agentic_grpo_learner")
  base = setup.module("rl.agentic.environments.base_environment")
  asked = []

  class Watched(_watched([])):
    def generate(self, prompts, rollout_config, **kwargs):
      out = super().generate(prompts, rollout_config, **kwargs)
      asked.append((prompts, threading.get_ident()))
      return out

  class Parser:
    assistant_token = ""

    def parse(self, messages, **_):
      return " ".join(x["content"] for x in messages if x["content"])

  class Turns(base.BaseTaskEnv):
    def __init__(self, single_example, **kwargs):
      super().__init__(task=single_example, max_steps=4, **kwargs)
      self.turn = 0

    def _initial_observation(self):
      return {"prompts": str(np.ravel(self.task["prompts"])[0])}

    def _step_impl(self, action):
      self.turn += 1
      return base.EnvStepResult(
        observation=setup.prompt(self.turn, 5),
        reward=0.1 * self.turn,
        done=self.turn == 4,
        info={},
      )

  config = setup.config(
    temperature=1.0,
    top_p=1.0,
    max_tokens_to_generate=100,
    kv_cache_size=256,
    eos_tokens=[2, 5, 8, 11, 14, 17, 20, 23],
  )
  cluster = setup.cluster(
    setup.tiny("llama3"),
    functools.partial(Watched, page_size=4, num_pages=600),
    config,
    max_steps=2,
  )
  trainer = learner.GRPOLearner(
    rl_cluster=cluster,
    reward_fns=setup.reward,
    algo_config=learner.GRPOConfig(
      num_generations=4, max_concurrency=8, max_response_length=100
    ),
    chat_parser=Parser(),
    env_class=Turns,
  )
  trainer.train(
    [
      {
        "prompts": np.array(
          [setup.prompt(2 * step + row, 20) for row in (0, 1)]
        )
      }
      for step in range(2)
    ]
  )
  assert len(asked) >= 2 * 8 * 3  # Some answer too much in fewer turns.
  assert all(isinstance(text, str) for text, _ in asked)
  assert len({thread for _, thread in asked}) > 2
  counters = cluster.rollout.counters()
  computed = counters["prefilled"] + counters["recomputed"]
  # A conversation computes its prompt, or finds another's, five tokens a turn,
  # and of each turn the page that was not full.
  assert computed <= 2 * 8 * (21 + 3 * 5 + 4 * 4)
  whole = sum(1 + len(text.split()) for text, _ in asked)
  assert computed < whole / 3
