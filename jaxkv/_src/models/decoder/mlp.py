"""Gated MLPs and mixtures of experts.

Letters: E embedding width, F inner width, X experts, k experts per token.
"""

import functools

import jax
import jax.numpy as jnp

from jaxkv._src.arrays import arguments
from jaxkv._src.models.decoder.description import Activation
from jaxkv._src.models.decoder.description import Experts
from jaxkv._src.models.decoder.description import Mlp
from jaxkv._src.models.decoder.params import Params

_SLOPE = 1.702
"""The factor in x * sigmoid(_SLOPE * x), gpt-oss's approximation of GELU."""


def activate(x: jax.Array, activation: Activation) -> jax.Array:
  """Applies an activation to x."""
  if activation == "silu":
    return jax.nn.silu(x)
  if activation == "relu":
    return jax.nn.relu(x)
  return jax.nn.gelu(x, approximate=activation == "gelu_tanh")


def gated(x: jax.Array, weights: Params, mlp: Mlp) -> jax.Array:
  """Applies a gated MLP to x [B, T, E]."""
  return _gated(
    x, weights["gate"], weights["up"], weights["down"], mlp.activation
  )


def _gated(
  x: jax.Array,
  gate: jax.Array,
  up: jax.Array,
  down: jax.Array,
  activation: Activation,
) -> jax.Array:
  inner = activate(jnp.einsum("bte,ef->btf", x, gate), activation)
  inner = inner * jnp.einsum("bte,ef->btf", x, up)
  return jnp.einsum("btf,fe->bte", inner, down)


def mixture(
  x: jax.Array,
  weights: Params,
  experts: Experts,
  replay: jax.Array | None = None,
  axis: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Applies a mixture of experts to x [B, T, E].

  `replay`, int32[B, T, k], has experts to use in place of the router's choice.
  The router chooses if all k ids of a token are negative, or if `replay` is
  None. An id out of range makes the output of its token NaN. If `axis` is not
  None, the experts are distributed over this mesh axis.

  Returns:
    The output [B, T, E] and the experts that each token used, int32[B, T, k].
  """
  tokens = x.reshape(-1, x.shape[-1])
  if replay is not None:
    replay = replay.reshape(tokens.shape[0], -1)
  choice, factors = route(tokens, weights, experts, replay)
  if axis is None:
    out = _run_experts(tokens, choice, factors, weights, experts)
  else:
    out = _run_distributed(tokens, choice, factors, weights, experts, axis)
  out = out.reshape(x.shape)
  if experts.shared_dim is not None:
    shared = _gated(
      x,
      weights["shared_gate"],
      weights["shared_up"],
      weights["shared_down"],
      experts.activation,
    )
    if experts.shared_gated:
      switch = jnp.einsum("bte,eo->bto", x, weights["shared_switch"])
      shared = jax.nn.sigmoid(switch) * shared
    out = out + shared
  return out, choice.reshape(*x.shape[:2], -1)


def route(
  x: jax.Array, weights: Params, experts: Experts, replay: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """Routes tokens [N, E] to experts int32[N, k], with factors float32[N, k]."""
  # Corrections and groups change only which experts are chosen. The factors
  # come from the original scores.
  scores = ranking = _scores(x, weights, experts)
  if experts.corrected:
    ranking = ranking + weights["correction"].astype(jnp.float32)[None]
  if experts.num_groups > 1:
    ranking = _in_best_groups(ranking, experts)
  choice = jax.lax.top_k(ranking, experts.num_chosen)[1].astype(jnp.int32)
  if replay is not None:
    choice = jnp.where(replay >= 0, replay, choice)
  # "fill" gives NaN for an id out of range, and not another expert's score.
  factors = jnp.take_along_axis(scores, choice, axis=-1, mode="fill")
  if experts.scores == "chosen_softmax":
    factors = jax.nn.softmax(factors, axis=-1)
  elif experts.normalized:
    factor_sum = jnp.sum(factors, axis=-1, keepdims=True)
    # Sigmoids of all chosen experts can underflow to 0, and 0 / 0 is NaN.
    factors = factors / (factor_sum + 1e-20)
  return choice, factors * experts.scale


def _scores(x: jax.Array, weights: Params, experts: Experts) -> jax.Array:
  """Computes the router's scores float32[N, X], before the correction."""
  # Logits are float32, because bfloat16 could not distinguish close scores.
  logits = jnp.einsum(
    "ne,ex->nx", x, weights["router"], preferred_element_type=jnp.float32
  )
  if experts.router_biased:
    logits = logits + weights["router_bias"].astype(jnp.float32)[None]
  if experts.scores == "sigmoid":
    return jax.nn.sigmoid(logits)
  if experts.scores == "softmax":
    return jax.nn.softmax(logits, axis=-1)
  return logits


def _in_best_groups(ranking: jax.Array, experts: Experts) -> jax.Array:
  """Replaces scores by -inf for experts outside a token's best groups."""
  by_group = ranking.reshape(ranking.shape[0], experts.num_groups, -1)
  count = 2 if experts.group_score == "best_two" else 1
  best = jnp.sum(jax.lax.top_k(by_group, count)[0], axis=-1)
  best_groups = jax.lax.top_k(best, experts.num_chosen_groups)[1]
  group = jnp.arange(experts.num_groups, dtype=best_groups.dtype)
  inside = jnp.any(best_groups[:, :, None] == group[None, None], axis=1)
  scores = jnp.where(inside[:, :, None], by_group, -jnp.inf)
  return scores.reshape(ranking.shape)


def check_experts(weights: Params, experts: Experts, axis: str | None) -> None:
  """Raises ValueError unless `weights` has this device's number of experts."""
  num_local = weights["expert_gate"].shape[0]
  num_devices = 1 if axis is None else jax.lax.axis_size(axis)
  if num_local * num_devices != experts.num_experts:
    arguments.refuse(
      ValueError,
      'params["layers"][...]["expert_gate"]',
      f"an array with {experts.num_experts} experts on {num_devices} devices",
      f"{num_local} experts on each",
      "pass `expert_axis` to models.forward if `MeshAxes.experts` is set"
      if axis is None
      else "set `MeshAxes.experts`, and place `params` with param_shardings",
    )


def _run_distributed(
  x: jax.Array,
  choice: jax.Array,
  factors: jax.Array,
  weights: Params,
  experts: Experts,
  axis: str,
) -> jax.Array:
  """Implements `_run_experts` for experts on several devices.

  Each device gathers the tokens of all devices and runs its own experts on
  them. A reduce-scatter returns to each device the sums of its own tokens.
  No token is dropped, however many tokens choose the same expert.
  """
  x, choice, factors = jax.lax.all_gather(
    (x, choice, factors), axis, tiled=True
  )
  num_local = weights["expert_gate"].shape[0]
  choice = choice - jax.lax.axis_index(axis) * num_local
  is_local = (choice >= 0) & (choice < num_local)
  choice = jnp.where(is_local, choice, num_local)
  out = _run_experts(x, choice, factors, weights, experts, is_local)
  return jax.lax.psum_scatter(out, axis, tiled=True)


def _run_experts(
  x: jax.Array,
  choice: jax.Array,
  factors: jax.Array,
  weights: Params,
  experts: Experts,
  is_local: jax.Array | None = None,
) -> jax.Array:
  """Returns the weighted sum of the outputs of each token's experts, [N, E].

  If `is_local` bool[N, k] is given, `weights` has only some experts, and the
  sum has only the chosen experts that `is_local` marks.
  """
  num_chosen = choice.shape[1]
  num_experts = weights["expert_gate"].shape[0]
  expert = choice.reshape(-1)
  # A row is a pair of a token and one of its experts. Rows are sorted by
  # expert, because `ragged_dot` requires contiguous rows for each expert.
  order = jnp.argsort(expert, stable=True).astype(jnp.int32)
  group_sizes = jnp.zeros((num_experts,), jnp.int32).at[expert].add(1)
  rows = x[order // num_chosen]
  expert_of_row = expert[order]
  product = functools.partial(jax.lax.ragged_dot, group_sizes=group_sizes)

  def project(inputs: jax.Array, name: str) -> jax.Array:
    out = product(inputs, weights[name])
    return (
      out + weights[f"{name}_bias"][expert_of_row] if experts.biased else out
    )

  gate = project(rows, "expert_gate")
  up = project(rows, "expert_up")
  if experts.limit is None:
    inner = activate(gate, experts.activation) * up
  else:
    gate = jnp.minimum(gate, experts.limit)
    up = jnp.clip(up, -experts.limit, experts.limit)
    inner = (up + 1) * gate * jax.nn.sigmoid(gate * _SLOPE)
  out = project(inner, "expert_down")
  # The inverse permutation puts the k rows of a token side by side, so that
  # they are summed in a fixed order. On a GPU a scatter-add has no fixed order.
  inverse = (
    jnp.zeros_like(order)
    .at[order]
    .set(jnp.arange(order.shape[0], dtype=jnp.int32))
  )
  parts = out[inverse].reshape(x.shape[0], num_chosen, -1)
  if is_local is not None:
    # The output of `ragged_dot` is undefined for rows that belong to no expert.
    parts = jnp.where(is_local[:, :, None], parts, 0)
  parts = parts * factors[:, :, None].astype(parts.dtype)
  return jnp.sum(parts, axis=1).astype(x.dtype)
