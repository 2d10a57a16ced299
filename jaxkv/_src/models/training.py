"""Next-token training of a decoder: adamw in jitted spans of steps."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm

from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.forward import forward_uncached
from jaxkv._src.models.decoder.params import Params
from jaxkv._src.models.decoder.params import init_params

_SPAN = 25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
  """Steps of one shape.

  Attributes:
    share: its part of all steps, relative to the other phases' shares.
    context: T, tokens of a sequence.
    batch_size: B, sequences of a step.
  """

  share: int
  context: int
  batch_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """How a model is trained; recipe and tokens determine the weights.

  Attributes:
    steps: number of optimiser steps, all phases together.
    phases: run in order; short sequences first, which are cheap, and long ones
      last, which teach long distances.
    learning_rate: the peak.
    warmup: steps of linear warmup.
    weight_decay: of adamw.
    max_norm: global norm that gradients are clipped to.
    seed: of the initial weights and of the order of the data.
  """

  steps: int
  phases: tuple[Phase, ...]
  learning_rate: float
  warmup: int
  weight_decay: float
  max_norm: float
  seed: int

  def __post_init__(self) -> None:
    if self.steps < 1:
      raise ValueError(f"`steps` must be at least 1, got {self.steps}.")
    if not self.phases or min(phase.share for phase in self.phases) < 1:
      raise ValueError(
        f"`phases` must have shares of at least 1, got {self.phases}."
      )


def train(
  tokens: np.ndarray,
  config: Decoder,
  recipe: Recipe,
  *,
  progress: bool = True,
) -> tuple[Params, np.ndarray]:
  """Trains fresh parameters on random stretches of one token stream.

  Args:
    tokens: int32[N], longer than every phase's context.
    config: the decoder's sizes.
    recipe: steps, shapes and optimiser.
    progress: whether to show a progress bar with the loss on stderr.

  Returns:
    (params, losses): losses float32[steps], nats a token, each measured before
    the step's update.
  """
  longest = max(phase.context for phase in recipe.phases)
  if len(tokens) <= longest:
    raise ValueError(
      f"tokens holds {len(tokens)}; a context of {longest} needs at least "
      f"{longest + 1}."
    )
  params = init_params(jax.random.key(recipe.seed), config)
  state = (params, _optimizer(recipe).init(params))
  data, losses = jnp.asarray(tokens, jnp.int32), []
  with tqdm.tqdm(
    total=recipe.steps, desc="training", unit="step", disable=not progress
  ) as bar:
    for phase, first, last in _spans(recipe):
      state, span_losses = _run_span(
        state,
        data,
        jnp.arange(first, last, dtype=jnp.int32),
        config=config,
        recipe=recipe,
        phase=phase,
      )
      losses.append(np.asarray(span_losses))
      bar.set_postfix_str(f"{losses[-1].mean():.2f} nats", refresh=False)
      bar.update(last - first)
  return state[0], np.concatenate(losses)


def mean_loss(
  params: Params, tokens: jax.Array, *, config: Decoder
) -> jax.Array:
  """Mean cross entropy of each next token, in nats.

  Args:
    params: the decoder's.
    tokens: int32[B, T + 1].
    config: static; the decoder.

  Returns:
    float32[].
  """
  return jnp.mean(token_losses(params, tokens, config=config))


@functools.partial(jax.jit, static_argnames="config")
def token_losses(
  params: Params, tokens: jax.Array, *, config: Decoder
) -> jax.Array:
  """Cross entropy of each next token, in nats, from sequence starts.

  Args:
    params: the decoder's.
    tokens: int32[B, T + 1].
    config: static; the decoder.

  Returns:
    float32[B, T]; element t is the loss of token t + 1 given those before.
  """
  inputs, targets = tokens[:, :-1], tokens[:, 1:]
  steps = jnp.arange(inputs.shape[1], dtype=jnp.int32)
  positions = jnp.broadcast_to(steps[None], inputs.shape)
  logits = forward_uncached(params, inputs, positions, config=config)
  return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def _spans(recipe: Recipe) -> list[tuple[Phase, int, int]]:
  """(phase, first step, last step + 1) of each span of `_SPAN` steps.

  A span belongs to the phase of its first step. Only the last span may be
  shorter than the others: every length and shape costs a compilation.
  """
  ends = np.cumsum([phase.share for phase in recipe.phases])
  firsts = np.arange(0, recipe.steps, _SPAN)
  picks = np.searchsorted(ends, firsts * ends[-1] / recipe.steps, "right")
  return [
    (recipe.phases[pick], first, min(first + _SPAN, recipe.steps))
    for pick, first in zip(picks.tolist(), firsts.tolist(), strict=True)
  ]


def _optimizer(recipe: Recipe) -> optax.GradientTransformation:
  schedule = optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=recipe.learning_rate,
    warmup_steps=min(recipe.warmup, recipe.steps // 2),
    decay_steps=recipe.steps,
    end_value=0.05 * recipe.learning_rate,
  )
  return optax.chain(
    optax.clip_by_global_norm(recipe.max_norm),
    optax.adamw(schedule, b2=0.99, weight_decay=recipe.weight_decay),
  )


@functools.partial(
  jax.jit, static_argnames=("config", "recipe", "phase"), donate_argnums=0
)
def _run_span(
  state: Any,
  data: jax.Array,
  steps: jax.Array,
  *,
  config: Decoder,
  recipe: Recipe,
  phase: Phase,
) -> tuple[Any, jax.Array]:
  """One optimiser step for each number in `steps`, int32[X]."""
  optimizer = _optimizer(recipe)
  base_key = jax.random.key(recipe.seed + 1)

  def step(state: Any, number: jax.Array) -> tuple[Any, jax.Array]:
    params, memory = state
    starts = jax.random.randint(
      jax.random.fold_in(base_key, number),
      (phase.batch_size,),
      0,
      data.size - phase.context,
      jnp.int32,
    )
    offsets = jnp.arange(phase.context + 1, dtype=jnp.int32)
    batch = data.at[starts[:, None] + offsets[None]].get(mode="fill")
    loss, gradients = jax.value_and_grad(mean_loss)(
      params, batch, config=config
    )
    # adamw mixes a Python float with an int32 count, which a caller's strict
    # promotion would refuse.
    with jax.numpy_dtype_promotion("standard"):
      updates, memory = optimizer.update(gradients, memory, params)
    return (optax.apply_updates(params, updates), memory), loss

  return jax.lax.scan(step, state, steps)
