"""Sampling for SkyRL-tx, beside its own engine."""

import numpy as np
import pytest

from jaxkv.integrations import skyrl_tx
from tests.integrations import skyrl_setup as setup
from tests.tools.compiled_programs import num_compiled

pytestmark = pytest.mark.filterwarnings("ignore")

_OPTIONS = skyrl_tx.SamplingOptions(
  page_size=4, max_length=96, num_pages=400, num_samples=8, num_jobs=4
)
_PROMPTS = [setup.prompt(number, 3 + 9 * number) for number in range(4)]
_NAMES = ["LlamaForCausalLM", "Qwen3ForCausalLM"]


@pytest.fixture(scope="module", params=_NAMES)
def backend(request, tmp_path_factory):
  setup.module("tinker.backends.jax")
  folder = tmp_path_factory.mktemp("checkpoint")
  setup.write_checkpoint(folder, request.param)
  return setup.backend(folder)


class _Counted:
  """An engine that several tests use, and what it did in this one."""

  def __init__(self, sampler):
    self.sampler = sampler
    self.before = sampler.counters()

  def sample(self, backend, batch):
    return self.sampler.sample(backend, batch)

  def counters(self):
    return {
      name: value - self.before.get(name, 0)
      for name, value in self.sampler.counters().items()
      if isinstance(value, int)
    }


@pytest.fixture(scope="module")
def sampler(backend):
  return skyrl_tx.SkyrlSampler(backend, _OPTIONS)


@pytest.fixture
def fresh(sampler):
  """An engine that finds no page of before."""
  if sampler._engine is not None:
    sampler._engine.forget()
  return _Counted(sampler)


def _tokens(results):
  return {
    name: [seq.tokens for seq in out.sequences] for name, out in results.items()
  }


def _agree(actual, expected):
  assert actual.keys() == expected.keys()
  for name, out in actual.items():
    for seq, target in zip(
      out.sequences, expected[name].sequences, strict=True
    ):
      assert seq.tokens == target.tokens
      assert seq.stop_reason == target.stop_reason
      np.testing.assert_allclose(seq.logprobs, target.logprobs, atol=1e-5)


def test_greedy_rows_of_all_adapters(backend, fresh):
  """In one batch: the base model and two adapters."""
  batch = setup.request(_PROMPTS, adapters=["", "a", "b", "a"])
  expected = backend.sample(batch)
  _agree(fresh.sample(backend, batch), expected)
  base = backend.sample(setup.request(_PROMPTS))
  assert _tokens(base) != _tokens(expected)


def test_samples_are_computed_once(backend, fresh):
  batch = setup.request(_PROMPTS[3:], samples=8)
  _agree(fresh.sample(backend, batch), backend.sample(batch))
  counters = fresh.counters()
  assert counters["prefilled"] == len(_PROMPTS[3]) - 1
  assert counters["forked"] == 7


def test_adapters_share_no_page(backend, fresh):
  prompt = setup.prompt(7, 40)
  computed = 0
  for name in ("", "a", "b"):
    batch = setup.request([prompt], adapters=[name])
    _agree(fresh.sample(backend, batch), backend.sample(batch))
    computed += len(prompt) - 1
    assert fresh.counters()["prefilled"] == computed
  for name in ("b", "", "a"):
    batch = setup.request([prompt], adapters=[name])
    _agree(fresh.sample(backend, batch), backend.sample(batch))
  # Now all but the last tokens is found.
  assert fresh.counters()["prefilled"] <= computed + 3 * 4


def test_a_trained_adapter_loses_its_pages(backend, fresh):
  """It loses its pages; the other one keeps its own."""
  prompt = setup.prompt(8, 40)
  batches = {
    name: setup.request([prompt], adapters=[name]) for name in ("a", "b")
  }
  for batch in batches.values():
    fresh.sample(backend, batch)
  num_prefilled = fresh.counters()["prefilled"]
  setup.change(backend, "a", seed=9)
  _agree(fresh.sample(backend, batches["b"]), backend.sample(batches["b"]))
  assert fresh.counters()["prefilled"] <= num_prefilled + 4
  _agree(fresh.sample(backend, batches["a"]), backend.sample(batches["a"]))
  assert fresh.counters()["prefilled"] >= num_prefilled + len(prompt) - 1


def test_turns_compute_new_tokens_alone(backend, fresh):
  history = setup.prompt(5, 20)
  computed = 0
  for turn in range(4):
    batch = setup.request([history], adapters=["a"])
    out = fresh.sample(backend, batch)
    _agree(out, backend.sample(batch))
    counters = fresh.counters()
    num_computed = counters["prefilled"] + counters["recomputed"]
    assert num_computed - computed <= (20 if turn == 0 else 5 + 4)
    computed = num_computed
    history = history + out["0"].sequences[0].tokens + setup.prompt(turn, 5)


def test_limits_and_stops_of_each_row(backend, fresh):
  free = backend.sample(setup.request(_PROMPTS))
  stops = [[free[str(row)].sequences[0].tokens[5]] for row in range(4)]
  batch = setup.request(_PROMPTS, max_tokens=[1, 12, 2, 12], stop_tokens=stops)
  expected = backend.sample(batch)
  assert len({len(out.sequences[0].tokens) for out in expected.values()}) > 2
  assert expected["3"].sequences[0].stop_reason == "stop"
  _agree(fresh.sample(backend, batch), expected)


def test_stop_strings(backend, fresh):
  free = backend.sample(setup.request(_PROMPTS))
  strings = [[f"w{free[str(row)].sequences[0].tokens[4]}"] for row in range(4)]
  batch = setup.request(_PROMPTS, stop_strings=strings)
  expected = backend.sample(batch)
  assert expected["0"].sequences[0].stop_reason == "stop"
  _agree(fresh.sample(backend, batch), expected)


def test_prompt_log_probs(backend, fresh):
  batch = setup.request(_PROMPTS, adapters=["", "a", "b", "a"], log_probs=True)
  actual, expected = fresh.sample(backend, batch), backend.sample(batch)
  for name, out in actual.items():
    np.testing.assert_allclose(
      out.prompt_logprobs, expected[name].prompt_logprobs, atol=1e-5
    )


def test_seeds_of_each_row(backend, fresh):
  def drawn(seeds):
    batch = setup.request(_PROMPTS, seed=seeds, temperature=2.0)
    return _tokens(fresh.sample(backend, batch))

  tokens = drawn([1, 2, 3, 4])
  changed = drawn([1, 2, 3, 5])
  equal = [tokens[name] == changed[name] for name in "0123"]
  assert equal == [True, True, True, False]


@pytest.mark.parametrize(
  "filters",
  [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.5, "top_k": 8}],
  ids=str,
)
def test_draws_have_the_right_distribution(backend, fresh, filters):
  prompt = setup.prompt(3, 6)
  asked = {"temperature": 1.0, "top_k": -1, "top_p": 1.0} | filters
  batch = setup.request([prompt], samples=600, max_tokens=1, **asked)
  tokens = _tokens(fresh.sample(backend, batch))["0"]
  expected = setup.distribution(backend, prompt) ** (1 / asked["temperature"])
  expected /= expected.sum()
  order = np.argsort(-expected)
  keep = np.cumsum(expected[order]) - expected[order] < asked["top_p"]
  if asked["top_k"] > 0:
    keep &= np.arange(len(order)) < asked["top_k"]
  expected[order[~keep]] = 0
  expected /= expected.sum()
  counts = np.bincount(np.concatenate(tokens), minlength=len(expected))
  assert not counts[expected == 0].any()
  # Half of the absolute differences; some 0.13 of 64 tokens, by 600 draws.
  assert np.abs(counts / 600 - expected).sum() / 2 < 0.2


def test_filters_of_each_row_in_one_batch(backend, fresh):
  """Rows that may take one token alone are greedy, beside others."""
  batch = setup.request(
    _PROMPTS,
    temperature=[0.0, 1.0, 1.0, 3.0],
    top_k=[-1, 1, -1, -1],
    top_p=[1.0, 1.0, 0.001, 1.0],
  )
  tokens = _tokens(fresh.sample(backend, batch))
  greedy = _tokens(backend.sample(setup.request(_PROMPTS)))
  equal = [tokens[name] == greedy[name] for name in "0123"]
  assert equal == [True, True, True, False]


def test_install_replaces_sample_until_undone(backend):
  cls = setup.module("tinker.backends.jax").JaxBackendImpl
  batch = setup.request(_PROMPTS[:2], adapters=["a", "b"])
  expected = backend.sample(batch)
  original = cls.sample
  undo = skyrl_tx.install(_OPTIONS)
  try:
    _agree(backend.sample(batch), expected)
    assert backend.__dict__["_jaxkv_sampler"].counters()["generated"] == 24
    assert backend.sample(setup.request([])) == {}
  finally:
    undo()
    backend.__dict__.pop("_jaxkv_sampler", None)
  assert cls.sample is original


def test_compiles_once(backend, fresh):
  fresh.sample(backend, setup.request(_PROMPTS, adapters=["", "a", "b", "a"]))
  num_programs = num_compiled()
  for limit in (1, 5, 30):
    prompts = [setup.prompt(limit + row, 2 + limit) for row in range(3)]
    fresh.sample(
      backend,
      setup.request(
        prompts,
        adapters=["b", "b", ""],
        max_tokens=limit,
        temperature=0.7,
        stop_tokens=[[1, 2]] * 3,
      ),
    )
  assert num_compiled() == num_programs


def test_larger_requests_make_another_queue(backend):
  """More stop tokens, or longer sequences, make another queue."""
  fresh = skyrl_tx.SkyrlSampler(backend, _OPTIONS)
  batch = setup.request(
    _PROMPTS, stop_tokens=[list(range(40, 52))] * 4, max_tokens=80
  )
  _agree(fresh.sample(backend, batch), backend.sample(batch))


def test_unknown_models_are_refused():
  with pytest.raises(ValueError, match="Llama 3 or Qwen3, got object"):
    skyrl_tx.paged_module_of(object())
