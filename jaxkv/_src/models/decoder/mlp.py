"""Gated MLPs, and mixtures of them.

Tokens are sorted by the expert that they chose, so that each expert multiplies
a stretch of rows (`jax.lax.ragged_dot`) and none is padded.
"""

import functools

import jax
import jax.numpy as jnp

from jaxkv._src.models.decoder.description import Activation
from jaxkv._src.models.decoder.description import Experts
from jaxkv._src.models.decoder.description import Mlp
from jaxkv._src.models.decoder.params import Params

_SLOPE = 1.702
"""Of the sigmoid in an expert with a limit; it makes silu about a gelu."""


def activate(x: jax.Array, activation: Activation) -> jax.Array:
  """Applies an activation by its name."""
  if activation == "silu":
    return jax.nn.silu(x)
  if activation == "relu":
    return jax.nn.relu(x)
  return jax.nn.gelu(x, approximate=activation == "gelu_tanh")


def gated(x: jax.Array, weights: Params, mlp: Mlp) -> jax.Array:
  """[B, T, E]: a gated MLP of [B, T, E]."""
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
  chosen: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """A mixture of gated MLPs.

  Args:
    x: [B, T, E].
    weights: of the layer.
    experts: how they are chosen.
    chosen: int32[B, T, k], experts to use instead; those below 0 are chosen
      here; of a token all or none are. None: all are. One that does not exist
      makes the output of its token NaN.

  Returns:
    [B, T, E]; int32[B, T, k], the experts that were used.
  """
  tokens = x.reshape(-1, x.shape[-1])
  given = None if chosen is None else chosen.reshape(tokens.shape[0], -1)
  used, factors = choose(tokens, weights, experts, given)
  out = _by_expert(tokens, used, factors, weights, experts).reshape(x.shape)
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
  return out, used.reshape(*x.shape[:2], -1)


def choose(
  x: jax.Array, weights: Params, experts: Experts, given: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """The experts of each token and their factors: int32 and float32[N, k].

  Args:
    x: [N, E].
    weights: of the layer.
    experts: how they are chosen.
    given: int32[N, k], see `mixture`.
  """
  scores = ranked = _scores(x, weights, experts)
  if experts.corrected:
    ranked = ranked + weights["correction"].astype(jnp.float32)[None]
  if experts.num_groups > 1:
    ranked = _in_best_groups(ranked, experts)
  used = jax.lax.top_k(ranked, experts.num_chosen)[1].astype(jnp.int32)
  if given is not None:
    used = jnp.where(given >= 0, given, used)
  factors = jnp.take_along_axis(scores, used, axis=-1, mode="fill")
  if experts.scores == "chosen_softmax":
    factors = jax.nn.softmax(factors, axis=-1)
  elif experts.normalized:
    total = jnp.sum(factors, axis=-1, keepdims=True)
    # Sigmoids may all be 0.
    factors = factors / (total + 1e-20)
  return used, factors * experts.scale


def _scores(x: jax.Array, weights: Params, experts: Experts) -> jax.Array:
  """float32[N, X]: what experts are chosen by, before corrections."""
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


def _in_best_groups(ranked: jax.Array, experts: Experts) -> jax.Array:
  """Scores of experts in groups that are chosen; lower than all for others."""
  grouped = ranked.reshape(ranked.shape[0], experts.num_groups, -1)
  count = 2 if experts.group_score == "best_two" else 1
  best = jnp.sum(jax.lax.top_k(grouped, count)[0], axis=-1)
  chosen = jax.lax.top_k(best, experts.num_chosen_groups)[1]
  group = jnp.arange(experts.num_groups, dtype=chosen.dtype)
  inside = jnp.any(chosen[:, :, None] == group[None, None], axis=1)
  kept = jnp.where(inside[:, :, None], grouped, -jnp.inf)
  return kept.reshape(ranked.shape)


def _by_expert(
  x: jax.Array,
  used: jax.Array,
  factors: jax.Array,
  weights: Params,
  experts: Experts,
) -> jax.Array:
  """[N, E]: the sum of what the experts of each token make of it."""
  count = used.shape[1]
  expert = used.reshape(-1)
  order = jnp.argsort(expert, stable=True).astype(jnp.int32)
  sizes = jnp.zeros((experts.num_experts,), jnp.int32).at[expert].add(1)
  rows = x[order // count]
  own = expert[order]
  product = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)

  def project(inputs: jax.Array, name: str) -> jax.Array:
    out = product(inputs, weights[name])
    return out + weights[f"{name}_bias"][own] if experts.biased else out

  gate, up = project(rows, "expert_gate"), project(rows, "expert_up")
  if experts.limit is None:
    inner = activate(gate, experts.activation) * up
  else:
    gate = jnp.minimum(gate, experts.limit)
    up = jnp.clip(up, -experts.limit, experts.limit)
    inner = (up + 1) * gate * jax.nn.sigmoid(gate * _SLOPE)
  out = project(inner, "expert_down")
  place = (
    jnp.zeros_like(order)
    .at[order]
    .set(jnp.arange(order.shape[0], dtype=jnp.int32))
  )
  parts = out[place].reshape(x.shape[0], count, -1)
  parts = parts * factors[:, :, None].astype(parts.dtype)
  return jnp.sum(parts, axis=1).astype(x.dtype)
