"""Decoders of tunix, unchanged, in the loop of rollouts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import rollout
from jaxkv.integrations import nnx as paged
from jaxkv.integrations.tunix import paged_module_of
from tests.integrations import tunix_setup as setup

pytestmark = pytest.mark.filterwarnings("ignore")

_LENGTHS = (30, 4, 1, 17)
_TEXTS = [setup.prompt(number, size) for number, size in enumerate(_LENGTHS)]


def _tokens(text):
  return [setup.BOS, *(int(word[1:]) for word in text.split())]


def _until_pad(tokens):
  """Returns the number of tokens before the first pad token of tunix."""
  return int(np.argmax(np.append(np.asarray(tokens) == setup.PAD, True)))


def _rolled_out(decoder, page_size=4, num_pages=200, steps=24):
  """Greedy answers, and the rollout."""
  prompts = [_tokens(text) for text in _TEXTS]
  width = max(map(len, prompts))
  cache_config = decoder.cache_config(
    num_pages=num_pages,
    page_size=page_size,
    num_slots=4,
    max_length=16 * page_size,
    prefill_chunk=16,
  )
  state = rollout.init(
    jaxkv.init(cache_config),
    decoder.init_kv(cache_config),
    rollout.Requests(
      np.array([row + [0] * (width - len(row)) for row in prompts], np.int32),
      [len(row) for row in prompts],
      sampling=rollout.Sampling(temperature=0),
    ),
    jax.random.key(0),
    rollout.RolloutConfig(
      max_new_tokens=steps, stop_token=setup.EOS, prefill_chunk=16
    ),
  )
  run = jax.jit(functools.partial(rollout.generate, model=decoder.model))
  state = run(decoder.params, state)
  out = rollout.generated(state)
  answers = []
  for row in range(4):
    start = int(out.prompt_lengths[row])
    stop_column = int(out.lengths[row])
    if out.finish[row] == rollout.Finish.STOP_TOKEN:
      stop_column -= 1
    answers.append(
      (
        np.asarray(out.tokens[row, start:stop_column]),
        np.asarray(out.log_probs[row, start:stop_column]),
      )
    )
  return answers, state


@pytest.mark.parametrize(
  ("name", "layers", "seed"),
  [("llama3", 2, 0), ("qwen2", 2, 0), ("qwen3", 2, 2), ("gemma3", 6, 0)],
)
def test_greedy_tokens_are_those_of_tunix(name, layers, seed):
  model = setup.tiny(name, seed=seed, num_layers=layers)
  expected = setup.vanilla(model).generate(_TEXTS, setup.config())
  answers, _ = _rolled_out(paged_module_of(model))
  compared = 0
  for (tokens, scores), target, log_probs in zip(
    answers, expected.tokens, expected.logprobs, strict=True
  ):
    count = _until_pad(target)
    compared += count
    np.testing.assert_array_equal(tokens[:count], target[:count])
    # Sums in another order.
    np.testing.assert_allclose(scores[:count], log_probs[:count], atol=1e-5)
  assert compared == 4 * 24, "choose a seed that draws no pad token"


def test_experts_draw_the_tokens_of_tunix():
  model = setup.tiny("qwen3", seed=1, num_experts=4, num_experts_per_tok=2)
  expected = setup.vanilla(model).generate(_TEXTS, setup.config())
  answers, _ = _rolled_out(paged_module_of(model))
  for (tokens, _), target in zip(answers, expected.tokens, strict=True):
    count = _until_pad(target)
    np.testing.assert_array_equal(tokens[:count], target[:count])


@pytest.mark.parametrize("how", ["BLOCK", "DECODER"])
def test_rematerialization_is_disabled(how):
  """It is for training; the memory of a trace cannot pass through it."""
  llama = setup.module("models.llama3.model")
  plain = _rolled_out(paged_module_of(setup.tiny("llama3")))[0]
  model = setup.tiny("llama3", remat_config=llama.RematConfig[how])
  for (tokens, _), (plain_tokens, _) in zip(
    _rolled_out(paged_module_of(model))[0], plain, strict=True
  ):
    np.testing.assert_array_equal(tokens, plain_tokens)


def test_local_layers_recycle_pages():
  decoder = paged_module_of(setup.tiny("gemma3", num_layers=6))
  # Five local layers and a full one.
  assert decoder.plan.groups.num_layers == (5, 1)
  _, state = _rolled_out(decoder, num_pages=400)
  tokens = sum(int(length) for length in state.queue.length)
  pages = int(state.counters.peak_pages.sum())
  # Window 8 in pages of 4: at most 3 pages of each group, and a chunk of 16.
  assert pages <= -(-tokens // 4) + 4 + 4 * (3 + 4)


def test_the_model_is_not_changed():
  model = setup.tiny("llama3")
  types = [type(layer.attn) for layer in model.layers]
  _rolled_out(paged_module_of(model))
  assert [type(layer.attn) for layer in model.layers] == types


def test_logits_are_computed_for_sampled_columns_alone():
  """The output layer sees no other columns."""
  model = setup.tiny("llama3")
  decoder = paged_module_of(model)
  widths = []
  llama = setup.module("models.llama3.model")

  def head(layer, memory, x):
    widths.append(x.shape[1])
    return super(type(layer), layer).decode(x)

  methods = dict(decoder.methods) | {(llama.Embedder, "decode"): head}
  _rolled_out(
    paged.paged_module(
      setup.tiny("llama3", weight_tying=True),
      call=decoder.call,
      methods=methods,
      windows=decoder.plan.windows,
      num_kv_heads=decoder.num_kv_heads,
      head_dim=decoder.head_dim,
      dtype=jnp.float32,
    )
  )
  assert set(widths) == {4}


def _toy():
  """Somebody's decoder of one layer, in which nothing is named as elsewhere."""
  nnx = pytest.importorskip("flax.nnx", reason="needs flax")

  class Mixer(nnx.Module):
    def __init__(self, rngs):
      self.qkv = nnx.Linear(8, 24, rngs=rngs)

    def __call__(self, x, mask):
      q, k, v = jnp.split(self.qkv(x), 3, axis=-1)
      weights = jnp.where(mask, q @ k.swapaxes(1, 2) / jnp.sqrt(8.0), -1e9)
      return jax.nn.softmax(weights) @ v

  class Toy(nnx.Module):
    def __init__(self, rngs):
      self.words = nnx.Embed(11, 8, rngs=rngs)
      self.mixer = Mixer(rngs)

    def __call__(self, tokens, mask):
      x = self.words(tokens)
      return self.words.attend(x + self.mixer(x, mask))

  return Toy(nnx.Rngs(3)), Mixer


def _paged_toy(windows=(None,)):
  toy, mixer = _toy()

  def attention(layer, memory, x, mask):
    q, k, v = jnp.split(layer.qkv(x)[:, :, None], 3, axis=-1)
    return memory.attend(q, k, v)[:, :, 0]

  def call(module, memory, tokens, positions):
    return module(tokens, None)

  decoder = paged.paged_module(
    toy,
    call=call,
    methods={mixer: attention},
    windows=windows,
    num_kv_heads=1,
    head_dim=8,
    dtype=jnp.float32,
  )
  return toy, decoder


def _run_toy(decoder):
  cache_config = decoder.cache_config(
    num_pages=32, page_size=4, num_slots=2, max_length=16
  )
  state = rollout.init(
    jaxkv.init(cache_config),
    decoder.init_kv(cache_config),
    rollout.Requests(
      [[1, 2, 3], [4, 5, 0]], [3, 2], sampling=rollout.Sampling(temperature=0)
    ),
    jax.random.key(0),
    rollout.RolloutConfig(max_new_tokens=8),
  )
  return rollout.generate(decoder.params, state, model=decoder.model)


def test_a_custom_decoder_is_paged():
  toy, decoder = _paged_toy()
  out = rollout.generated(_run_toy(decoder))
  for row in range(2):
    tokens = out.tokens[row, : out.lengths[row]][None]
    length = tokens.shape[1]
    logits = toy(tokens, jnp.tril(jnp.ones((1, length, length), bool)))
    best = jnp.argmax(logits[0, :-1], axis=-1)
    is_drawn = out.mask[row, 1:length]
    np.testing.assert_array_equal(best[is_drawn], tokens[0, 1:][is_drawn])


@pytest.mark.parametrize("windows", [(None, None), (None, 4)])
def test_too_many_windows_are_refused(windows):
  with pytest.raises(ValueError, match="got 2 for 1 calls of `attend`"):
    _run_toy(_paged_toy(windows)[1])


def test_unknown_layers_are_refused():
  toy, _ = _toy()
  with pytest.raises(ValueError, match="`methods` must name layers"):
    paged.paged_module(
      toy,
      call=print,
      methods={"no.such.path": print},
      windows=[None],
      num_kv_heads=1,
      head_dim=8,
    )


def test_unknown_models_are_refused():
  with pytest.raises(ValueError, match="one of tunix's"):
    paged_module_of(_toy()[0])
