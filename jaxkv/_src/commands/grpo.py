"""`python -m jaxkv grpo`: trains a model by GRPO in one compiled program.

A small model with random weights learns to repeat its prompt. One jitted
program draws answers, rewards them and updates the weights. Weights, optimizer
state and cache are donated to it. With `--numerics exact`, the first update of
a round computes the same log-probs as the rollout, bit for bit. With `fast`
they differ by rounding.

Each answer token has a reward: 1 if it equals the prompt token at the same
index, else 0. The mean reward is about 1 / `VOCABULARY` before training. The
notebook `08_grpo_in_one_program` explains this program.
"""

import argparse
import dataclasses
import functools
import sys
import time
from typing import Any
from typing import Literal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm

import jaxkv
from jaxkv import models
from jaxkv import rl
from jaxkv import rollout
from jaxkv._src.commands import output

VOCABULARY = 12
PROMPTS = 32
SAMPLES = 8
TOKENS = 4
"""Length of each prompt and of each answer, in tokens."""
INNER_STEPS = 4
"""Weight updates in each round."""

_OPTIMIZER = optax.adam(2e-3)
_FINAL_ROUNDS = 10
"""Number of last rounds of which the mean reward is reported."""


class Carry(NamedTuple):
  """The state that a round passes to the next round.

  Attributes:
    params: the weights.
    moments: the state of the optimizer.
    cache: the state of the cache, such as its page table.
    kv: the keys and values of the pages.
  """

  params: Any
  moments: Any
  cache: jaxkv.CacheState
  kv: Any


class RoundFigures(NamedTuple):
  """The measurements of a round.

  Attributes:
    reward: the mean reward of all answer tokens.
    counters: the counters of the rollout.
    mismatch: the largest absolute difference between a token's log-prob in the
      rollout and its log-prob in the first update.
  """

  reward: jax.Array  # float32[]
  counters: rollout.Counters
  mismatch: jax.Array  # float32[]


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the command's arguments to its parser."""
  add, default = parser.add_argument, "(default: %(default)s)"
  rounds = output.whole_number(2, 100_000)
  seed = output.whole_number(0, 2**32 - 1)
  numerics, dtypes = ("exact", "fast"), ("float32", "bfloat16")
  add("--rounds", metavar="N", type=rounds, default=120, help=default)
  add("--numerics", choices=numerics, default="exact", help=default)
  add("--dtype", choices=dtypes, default="float32", help=default)
  add("--seed", metavar="I", type=seed, default=1, help=default)
  add("--json", metavar="FILE", help="also write figures of all rounds here")


def run(args: argparse.Namespace) -> int:
  """Trains and prints a table, and returns the exit status, 0.

  Raises:
    CommandError: the file `--json` cannot be written.
  """
  output.check_writable(args.json)
  model = decoder(args.numerics, jnp.dtype(args.dtype))
  program = jax.jit(
    functools.partial(grpo_round, model=model), donate_argnums=0
  )
  init_key, round_key = jax.random.split(jax.random.key(args.seed))
  # Compiles ahead of time, so that no measured round includes a compilation.
  carry = begin(model, init_key)
  keys = list(jax.random.split(round_key, args.rounds))
  print("compiling a round ...", file=sys.stderr, flush=True)
  begin_time = time.perf_counter()
  compiled = program.lower(carry, keys[0]).compile()
  compile_seconds = time.perf_counter() - begin_time
  rounds, seconds = [], []
  with tqdm.tqdm(total=args.rounds, desc="grpo", unit="round") as bar:
    for key in keys:
      begin_time = time.perf_counter()
      carry, figures = jax.block_until_ready(compiled(carry, key))
      seconds.append(time.perf_counter() - begin_time)
      rounds.append(jax.tree.map(np.asarray, figures))
      bar.set_postfix_str(f"reward {figures.reward:.2f}", refresh=False)
      bar.update()
  result = _summary(jax.tree.map(lambda *x: np.stack(x), *rounds)) | {
    "compile_seconds": compile_seconds,
    "seconds_a_round": float(np.median(seconds)),
  }
  output.write_json(args.json, result)
  output.print_table(*_rows(result))
  return 0


def decoder(
  numerics: Literal["exact", "fast"], dtype: Any = jnp.float32
) -> models.Decoder:
  """Returns the model to train: 2 layers, about 84,000 parameters."""
  fast = models.llama(
    vocab_size=VOCABULARY,
    num_layers=2,
    embed_dim=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    mlp_dim=128,
    tied_embeddings=False,
    dtype=dtype,
  )
  return dataclasses.replace(fast, numerics=numerics)


def begin(model: models.Decoder, key: jax.Array) -> Carry:
  """Returns the initial state: random weights and an empty cache.

  Args:
    model: the decoder.
    key: key[], which must differ from the keys of the rounds.
  """
  params_key, secret = jax.random.split(key)
  sizes = jaxkv.CacheConfig(
    num_pages=1024,
    page_size=2,
    num_slots=PROMPTS * SAMPLES,
    pages_per_slot=-(-2 * TOKENS // 2),
  )
  params = models.init_params(params_key, model)
  cache = jaxkv.init(sizes, secret)
  return Carry(
    params, _OPTIMIZER.init(params), cache, models.init_kv(model, sizes)
  )


def grpo_round(
  carry: Carry, key: jax.Array, *, model: models.Decoder
) -> tuple[Carry, RoundFigures]:
  """Draws answers, rewards them, and updates the weights.

  Args:
    carry: from `begin` or the previous round.
    key: key[], the key of the round.
    model: the decoder, static.
  """
  params, moments, cache, kv = carry
  prompt_key, rollout_key = jax.random.split(key)
  prompts = jax.random.randint(
    prompt_key, (PROMPTS, TOKENS), 0, VOCABULARY, jnp.int32
  )
  lengths = jnp.full((PROMPTS,), TOKENS, jnp.int32)
  config = rollout.RolloutConfig(
    num_samples=SAMPLES,
    max_new_tokens=TOKENS,
    prefill_chunk=32,
    # These limits let every sequence get a slot in the first step.
    admissions=PROMPTS * SAMPLES,
    window=PROMPTS * SAMPLES,
    max_overtaken=PROMPTS * SAMPLES,
    numerics=model.numerics,
  )
  state = rollout.init(
    cache, kv, rollout.Requests(prompts, lengths), rollout_key, config
  )
  forward = functools.partial(models.forward, config=model)
  state = rollout.generate(params, state, model=forward)
  drawn = rollout.grouped(rollout.generated(state))
  # Rewards are normalized over the samples of a prompt, for each position
  # separately.
  is_right = jnp.swapaxes(drawn.completions == drawn.prompts[:, None], 1, 2)
  advantages = rl.group_normalized(is_right.ravel(), num_samples=SAMPLES)
  advantages = jnp.swapaxes(advantages.reshape(is_right.shape), 1, 2)

  def loss(params: Any) -> tuple[jax.Array, jax.Array]:
    new = models.grouped_log_probs(
      params,
      drawn.prompts,
      drawn.prompt_lengths,
      drawn.completions,
      drawn.completion_lengths,
      config=model,
    )
    value, _ = rl.grpo_loss(
      new,
      drawn.log_probs,
      advantages,
      drawn.mask,
      clip=(0.2, 0.3),
      mean="token",
    )
    difference = jnp.where(drawn.mask, new - drawn.log_probs, 0)
    return value, jnp.max(jnp.abs(difference))

  def update(carry: tuple[Any, Any], _: None) -> tuple[Any, Any]:
    params, moments = carry
    gradient, mismatch = jax.grad(loss, has_aux=True)(params)
    # optax mixes dtypes, which raises if the caller has set strict promotion.
    with jax.numpy_dtype_promotion("standard"):
      updates, moments = _OPTIMIZER.update(gradient, moments)
      params = optax.apply_updates(params, updates)
    return (params, moments), mismatch

  (params, moments), mismatches = jax.lax.scan(
    update, (params, moments), length=INNER_STEPS
  )
  state = rollout.update_weights(state)
  # Only the first update has the same weights as the rollout.
  figures = RoundFigures(jnp.mean(is_right), state.counters, mismatches[0])
  return Carry(params, moments, state.memory.cache, state.memory.kv), figures


def _summary(figures: RoundFigures) -> dict[str, Any]:
  """Returns the reward of each round, and totals over all rounds."""
  counters = figures.counters
  return {
    "rewards": figures.reward.astype(float).tolist(),
    "reward_before": float(figures.reward[0]),
    "reward_after": float(np.mean(figures.reward[-_FINAL_ROUNDS:])),
    "largest_mismatch": float(np.max(figures.mismatch)),
    "prefilled_tokens": int(np.sum(counters.prefilled)),
    # Excludes the last token of each prompt, as `prefilled` does, because an
    # answer token is sampled from its logits.
    "prompt_tokens": len(figures.reward) * PROMPTS * (TOKENS - 1),
    "generated_tokens": int(np.sum(counters.generated)),
    "computed_rows": int(np.sum(counters.rows)),
  }


def _rows(f: dict[str, Any]) -> list[tuple[str, str]]:
  """Returns the rows of the printed table, pairs of name and value."""
  return [
    (
      "reward",
      f"{f['reward_before']:.3f} in the first round, {f['reward_after']:.3f} "
      f"in the last {min(_FINAL_ROUNDS, len(f['rewards']))}",
    ),
    (
      "mismatch",
      f"{f['largest_mismatch']:.3g} at most, between a token's log-probs when "
      "drawn and when trained",
    ),
    (
      "prompt tokens",
      f"{f['prefilled_tokens']:,} computed; {SAMPLES} samples of each prompt "
      f"have {SAMPLES * f['prompt_tokens']:,}",
    ),
    (
      "answer tokens",
      f"{f['generated_tokens']:,} in {f['computed_rows']:,} rows of the model",
    ),
    (
      "seconds",
      f"{f['seconds_a_round']:.3f} a round, {f['compile_seconds']:.1f} to "
      "compile",
    ),
  ]
