"""The engine for tunix, beside tunix's own."""

import concurrent.futures
import dataclasses
import importlib

import jax
import numpy as np
import pytest

from tests.integrations import tunix_setup as setup
from tests.tools.compiled_programs import num_compiled

pytestmark = pytest.mark.filterwarnings("ignore")

_GROUPS = [setup.prompt(number, 5 + 8 * number) for number in range(4)]
_TEXTS = [text for text in _GROUPS for _ in range(4)]


@pytest.fixture(scope="module")
def model():
  return setup.tiny("llama3", seed=4)


def _same(left, right):
  return all(
    np.array_equal(a, b) for a, b in zip(left.tokens, right.tokens, strict=True)
  )


def test_is_an_engine_of_tunix():
  base = setup.module("rl.rollout.base_rollout")
  client = importlib.import_module("jaxkv.integrations.tunix")
  assert issubclass(client.JaxkvRollout, base.BaseRollout)
  assert client.JaxkvRollout is client.JaxkvRollout


def test_greedy_equals_vanilla(model):
  """4 prompts, 4 samples, 24 tokens; half of the memory."""
  config = setup.config()
  expected = setup.vanilla(model).generate(_TEXTS, config)
  assert not any(setup.PAD in row for row in expected.tokens), "another seed"
  engine = setup.ours(model)
  out = engine.generate(_TEXTS, config)
  assert _same(out, expected)
  assert out.text == expected.text
  np.testing.assert_array_equal(
    out.left_padded_prompt_tokens, expected.left_padded_prompt_tokens
  )
  for scores, target in zip(out.logprobs, expected.logprobs, strict=True):
    np.testing.assert_allclose(scores, target, atol=5e-6)
  tokens = len(_TEXTS) * config.kv_cache_size
  dense = 2 * 4 * tokens * 2 * setup.HEADS * setup.HEAD_DIM
  assert engine.num_bytes() <= dense / 2
  # A prompt is computed once, not four times; last tokens count as drawn.
  assert engine.counters()["prefilled"] <= sum(
    len(text.split()) for text in _GROUPS
  )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.8}])
def test_log_probs_are_the_trainers(model, temperature, filters):
  common = setup.module("rl.common")
  nnx = importlib.import_module("flax.nnx")
  config = setup.config(
    **({"top_p": 1.0, "temperature": temperature} | filters)
  )
  engine = setup.ours(model)
  out = engine.generate(_TEXTS, config)
  padded = np.full((len(_TEXTS), 24), setup.PAD, np.int32)
  for row, tokens in enumerate(out.tokens):
    padded[row, : len(tokens)] = tokens
  scores = common.compute_per_token_logps(
    *nnx.split(model),
    prompt_tokens=out.left_padded_prompt_tokens,
    completion_tokens=padded,
    pad_id=setup.PAD,
    eos_id=setup.EOS,
    temperature=temperature,
  )
  for row, values in enumerate(out.logprobs):
    np.testing.assert_allclose(values, scores[row, : len(values)], atol=5e-6)
  if temperature == 1:
    ours = engine.get_per_token_logps(out.left_padded_prompt_tokens, padded)
    np.testing.assert_array_equal(ours, scores)


def test_compiles_once(model):
  """Whatever lengths, limits, temperatures, prompts and weights come."""
  engine = setup.ours(model, mesh=setup.one_device())
  usual = setup.config(top_p=1.0)
  # Prompts enter in programs for 1, 2, 4, ... of them.
  for count in (16, 9, 2):
    engine.generate(_TEXTS[:count], usual)
  engine.generate(_TEXTS * 2, usual)  # More than the queue holds.
  nnx = importlib.import_module("flax.nnx")
  new_weights = nnx.state(setup.tiny("llama3", seed=5), nnx.Param)
  elsewhere = jax.device_put(new_weights, jax.devices()[-1])
  num_programs = num_compiled()
  for limit, temperature, count in ((3, 1.0, 16), (17, 0.3, 9), (24, 1.7, 2)):
    options = {"max_tokens_to_generate": limit, "temperature": temperature}
    out = engine.generate(_TEXTS[:count], dataclasses.replace(usual, **options))
    assert max(map(len, out.tokens)) <= limit
  engine.generate(_TEXTS[:1], dataclasses.replace(usual, seed=3))
  engine.generate(_TEXTS * 2, usual)
  for weights in (new_weights, elsewhere):
    engine.update_params(weights, (nnx.Param,))
    engine.generate(_TEXTS, usual)
  assert num_compiled() == num_programs


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
def test_greedy_on_a_mesh_equals_vanilla(model, shape):
  """Weights keep their shardings; pages are split by heads over "tp"."""
  mesh = jax.sharding.Mesh(
    np.asarray(jax.devices()[:4]).reshape(shape), ("fsdp", "tp")
  )
  reshard = setup.module("rl.reshard")
  engine = setup.ours(reshard.reshard_model_to_mesh(model, mesh), mesh=mesh)
  config = setup.config()
  expected = setup.vanilla(model).generate(_TEXTS, config)
  for _ in range(2):
    assert _same(engine.generate(_TEXTS, config), expected)


def test_pad_is_not_drawn():
  model = setup.tiny("llama3", seed=4)
  out = setup.ours(model).generate(
    [setup.prompt(i, 3) for i in range(16)],
    setup.config(temperature=50.0, top_p=1.0),
  )
  tokens = np.concatenate(out.tokens)
  assert setup.PAD not in tokens
  assert len(set(tokens.tolist())) > 20
  assert setup.EOS not in tokens  # As in tunix, it is left out.


def test_eos_is_kept_if_asked():
  model = setup.tiny("llama3", seed=4)
  config = setup.config(temperature=50.0, top_p=1.0, eos_tokens=[5, 7])
  texts = [setup.prompt(i, 3) for i in range(16)]
  out = setup.ours(model, keep_eos=True).generate(texts, config)
  ended = [tokens for tokens in out.tokens if len(tokens) < 24]
  assert ended
  assert all(tokens[-1] in (5, 7) for tokens in ended)
  assert not any(np.isin(tokens[:-1], (5, 7)).any() for tokens in out.tokens)


def test_equal_seeds_draw_equal_tokens(model):
  engine = setup.ours(model)
  config = setup.config(top_p=1.0, temperature=2.0)
  out, next_out = (engine.generate(_TEXTS, config) for _ in range(2))
  assert not _same(out, next_out)
  seeded = dataclasses.replace(config, seed=jax.random.PRNGKey(3))
  out, next_out = (engine.generate(_TEXTS, seeded) for _ in range(2))
  assert _same(out, next_out)
  group = {tuple(tokens) for tokens in out.tokens[:4]}
  assert len(group) == 4


def test_new_weights_hit_no_old_page(model):
  nnx = importlib.import_module("flax.nnx")
  new_model = setup.tiny("llama3", seed=9)
  config = setup.config()
  engine = setup.ours(model, page_size=4)
  engine.generate(_TEXTS, config)
  num_prefilled = engine.counters()["prefilled"]
  engine.generate(_TEXTS, config)
  # Cached; of each prompt the last page at most is computed.
  assert engine.counters()["prefilled"] - num_prefilled <= 4 * 4
  num_prefilled = engine.counters()["prefilled"]
  params = nnx.state(new_model, nnx.Param)
  guards = (
    jax.transfer_guard_device_to_host("disallow_explicit"),
    jax.transfer_guard_host_to_device("disallow_explicit"),
  )
  with guards[0], guards[1]:  # As tunix does it on a CPU.
    engine.update_params(params, (nnx.Param,))
  out = engine.generate(_TEXTS, config)
  tokens = sum(len(text.split()) for text in _GROUPS)
  assert engine.counters()["prefilled"] - num_prefilled >= tokens - 4
  assert _same(out, setup.ours(new_model).generate(_TEXTS, config))


def test_a_model_that_is_trained_in_place():
  """A trainer on the same mesh shares its variables, and says nothing."""
  model = setup.tiny("llama3", seed=4)
  nnx = importlib.import_module("flax.nnx")
  engine = setup.ours(model, page_size=4)
  engine.generate(_TEXTS, setup.config())
  nnx.update(model, nnx.state(setup.tiny("llama3", seed=9)))
  out = engine.generate(_TEXTS, setup.config())
  fresh = setup.ours(setup.tiny("llama3", seed=9))
  assert _same(out, fresh.generate(_TEXTS, setup.config()))


def test_weights_that_only_moved_keep_their_pages(model):
  nnx = importlib.import_module("flax.nnx")
  engine = setup.ours(model, page_size=4)

  def moved():
    copies = jax.tree.map(lambda leaf: leaf + 0, nnx.state(engine.model()))
    engine.update_params(copies)

  moved()
  engine.generate(_TEXTS, setup.config())
  moved()
  num_prefilled = engine.counters()["prefilled"]
  moved()
  engine.generate(_TEXTS, setup.config())
  assert engine.counters()["prefilled"] - num_prefilled <= 4 * 4


def test_weights_of_another_model_are_refused(model):
  nnx = importlib.import_module("flax.nnx")
  engine = setup.ours(model)
  params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  shorter = jax.tree.map(lambda leaf: leaf[:1], params)
  for wrong_params, text in (
    ({"model": params}, r"`params\['model'\].* no variable, got"),
    (shorter, r"policy's variable, \(32, 32\), got \(1, 32\)"),
  ):
    with pytest.raises(ValueError, match=text):
      engine.update_params(wrong_params)


def test_config_by_mode(model):
  rl = setup.module("rl.rl_cluster")
  small, large = setup.config(), setup.config(kv_cache_size=128)
  configs = {rl.Mode.TRAIN: small, rl.Mode.EVAL: large}
  engine = setup.ours(model, configs)
  text = setup.prompt(1, 90)
  assert len(engine.generate([text], large).tokens[0]) <= 24
  # Known from the call alone: another queue is made for it.
  engine = setup.ours(model, small)
  engine.generate(_TEXTS, small)
  assert _same(
    engine.generate([text], large),
    setup.ours(model, large).generate([text], large),
  )


def test_a_prompt_that_is_too_long_is_refused(model):
  engine = setup.ours(model)
  with pytest.raises(
    ValueError, match="leave room for 24 tokens in 64, got 61"
  ):
    engine.generate([setup.prompt(1, 60)], setup.config())
  engine.generate(_TEXTS, setup.config())  # It still works.


def test_a_call_that_fails_keeps_no_weights(model):
  """Between calls, the trainer decides where the weights are."""
  engine = setup.ours(model)
  with pytest.raises(ValueError, match="must leave room"):
    engine.generate([setup.prompt(1, 60)], setup.config())
  assert engine._engine._weights.is_released
  engine.generate([setup.prompt(1, 5)], setup.config())
  assert engine._engine._weights.is_released


def test_a_failed_engine_changes_nothing(model):
  engine = setup.ours(model, page_size=4)
  engine.generate(_TEXTS, setup.config())
  num_prefilled = engine.counters()["prefilled"]
  num_bytes = engine.num_bytes()
  with pytest.raises(ValueError, match="`max_length"):
    engine.generate(_TEXTS[:1], setup.config(kv_cache_size=2**40))
  engine.generate(_TEXTS[:1], setup.config())
  assert engine.num_bytes() == num_bytes
  assert engine.counters()["prefilled"] - num_prefilled <= 4


def test_an_impossible_call_fails_without_the_others(model):
  """In one batch with the call of another thread."""
  engine = setup.ours(model)
  config = setup.config()
  large = setup.config(kv_cache_size=2**40)
  samples = engine._samples([engine._tokens(_TEXTS[0])], config)
  results = engine._serve([(samples, config), (samples, large)])
  assert len(results[0]) == 1 and "`max_length" in str(results[1])


def test_an_empty_batch_is_refused(model):
  with pytest.raises(ValueError, match="at least one prompt, got none"):
    setup.ours(model).generate([], setup.config())


def test_one_text_is_a_batch_of_one(model):
  engine = setup.ours(model)
  out = engine.generate(_GROUPS[1], setup.config())
  assert len(out.tokens) == 1
  assert _same(out, setup.ours(model).generate([_GROUPS[1]], setup.config()))


def test_turns_from_threads_compute_new_tokens_alone(model):
  """Eight conversations of four turns compute what is new."""
  page = 4
  engine = setup.ours(
    model, setup.config(kv_cache_size=128), page_size=page, num_pages=400
  )
  # Greedy, because the order of threads decides which seed a call gets.
  config = setup.config(kv_cache_size=128, max_tokens_to_generate=8)
  system = setup.prompt(99, 20)

  def talk(index):
    history, new = system, 0
    for turn in range(4):
      message = setup.prompt(10 * index + turn, 6)
      history = f"{history} {message}"
      out = engine.generate(history, config)
      history = f"{history} {setup.text(out.tokens[0])}".strip()
      new += 6
    return history, new

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    talks = list(pool.map(talk, range(8)))
  counters = engine.counters()
  new = sum(count for _, count in talks)
  computed = counters["prefilled"] + counters["recomputed"]
  # What is new, the system prompt once or, where several begin at once, for
  # each of these; and of each turn the page that was not full.
  assert computed <= new + 21 * 8 + 8 * 4 * page
  dense = 8 * sum(21 + 6 * (turn + 1) + 8 * turn for turn in range(4))
  assert computed < dense / 3
  for history, _ in talks[:2]:
    words = history.split()
    greedy = setup.config(kv_cache_size=128, max_tokens_to_generate=4)
    text = " ".join(words[:40])
    assert _same(
      engine.generate(text, greedy),
      setup.vanilla(model, 128).generate([text], greedy),
    )


def test_an_error_reaches_its_caller(model):
  engine = setup.ours(model, num_pages=8, page_size=4)
  config = setup.config(kv_cache_size=64)
  with pytest.raises(ValueError, match="num_pages` must be at least 15"):
    engine.generate([setup.prompt(0, 30)], config)
  nnx = importlib.import_module("flax.nnx")
  params = jax.tree.map(lambda leaf: leaf * np.nan, nnx.state(model, nnx.Param))
  engine = setup.ours(model)
  engine.generate(_TEXTS, config)
  engine.update_params(params, (nnx.Param,))
  with pytest.raises(RuntimeError, match="could not be drawn: BAD_LOGITS"):
    engine.generate(_TEXTS, config)
