"""Runs a decoder from tokens to logits, and checks its arguments."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._src.arrays import arguments
from jaxkv._src.models.decoder import stack
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.kv_access import Pools
from jaxkv._src.models.decoder.norms import rms_norm
from jaxkv._src.models.decoder.numerics import token_wise
from jaxkv._src.models.decoder.params import Params


def run(
  params: Params,
  tokens: jax.Array,
  positions: jax.Array,
  pools: Pools,
  access: Any,
  columns: jax.Array | None,
  config: Decoder,
) -> tuple[jax.Array, Pools]:
  """Returns logits float32[B, X, V] of X tokens per sequence, and the pools.

  `tokens` and `positions` are int32[B, T], `access` is a `PagedKV` or
  `UncachedKV`, and `columns` has the X tokens, int32[X] or int32[B, X]; None
  for all T.
  """
  check_params(params, config)
  x, pools = stack.run(params, tokens, positions, pools, access, config)
  # Tokens are selected before the head, because the head computes V logits for
  # each token.
  return head(params, _select(x, columns), config), pools


def head(params: Params, x: jax.Array, config: Decoder) -> jax.Array:
  """Computes logits float32[..., V] from the last layer's output [..., E].

  With exact numerics `x` must be [B, T, E].
  """
  unembed = params["embed"] if config.tied_embeddings else params["unembed"]
  weights = {"final_norm": params["final_norm"], "unembed": unembed}
  return token_wise(config)(functools.partial(_head, config), weights, x)


def _head(config: Decoder, weights: Params, x: jax.Array) -> jax.Array:
  x = rms_norm(x, weights["final_norm"], config.norm_eps, config.norm_offset)
  unembed = weights["unembed"]
  if config.tied_embeddings:
    # Exact numerics run this function in a loop. XLA could not fuse a transpose
    # outside of the loop with the product.
    unembed = unembed.T
  logits = jnp.einsum(
    "...e,ev->...v", x, unembed, preferred_element_type=jnp.float32
  )
  if config.logit_cap is not None:
    logits = config.logit_cap * jnp.tanh(logits / config.logit_cap)
  return logits


def _select(x: jax.Array, columns: jax.Array | None) -> jax.Array:
  """Selects the tokens that get logits: [B, T, E] to [B, X, E]."""
  if columns is None:
    return x
  if columns.ndim == 1:
    return x.at[:, columns].get(mode="clip")
  return jnp.take_along_axis(x, columns[..., None], axis=1, mode="clip")


def check_tokens(tokens: jax.Array, positions: jax.Array) -> None:
  """Raises an error unless tokens and positions are integers [B, T]."""
  arguments.check_integers("tokens", tokens)
  arguments.check_integers("positions", positions)
  if tokens.ndim != 2:
    raise ValueError(f"`tokens` must be [B, T], got shape {tokens.shape}.")
  if positions.shape != tokens.shape:
    raise ValueError(
      f"`positions` must have the shape of tokens, {tokens.shape}, got "
      f"{positions.shape}."
    )


def check_params(params: Params, config: Decoder) -> None:
  """Raises an error unless the embedding in `params` fits the decoder."""
  if not isinstance(params, Mapping) or "embed" not in params:
    description = type(params).__name__
    if isinstance(params, Mapping):
      description = f"a dict with {sorted(map(str, params))}"
    raise TypeError(
      f'`params` must be a dict with "embed", got {description}; pass the '
      "result of `init_params`, or `load(...).params`."
    )
  embed = (config.vocab_size, config.embed_dim)
  if params["embed"].shape != embed or params["embed"].dtype != config.dtype:
    raise ValueError(
      f'`params["embed"]` must be {config.dtype.name}{list(embed)}, as in '
      f"config, got {params['embed'].dtype.name}"
      f"{list(params['embed'].shape)}."
    )
