"""Runs a decoder from tokens to logits, and checks its arguments."""

import functools
from collections.abc import Mapping
from typing import Any
from typing import Literal

import jax
import jax.numpy as jnp

from jaxkv._src.arrays import arguments
from jaxkv._src.models.decoder import stack
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.kv_access import Pools
from jaxkv._src.models.decoder.norms import rms_norm
from jaxkv._src.models.decoder.numerics import token_wise
from jaxkv._src.models.decoder.params import Params

LogitSelection = Literal["all", "last", "none"]


def run(
  params: Params,
  tokens: jax.Array,
  positions: jax.Array,
  pools: Pools,
  access: Any,
  num_tokens: jax.Array | None,
  selection: LogitSelection | jax.Array,
  config: Decoder,
) -> tuple[jax.Array, Pools]:
  """Returns logits float32[B, P, V] of P tokens per sequence, and the pools.

  `tokens` and `positions` are int32[B, T], `access` is a `PagedKV` or
  `UncachedKV`, and `selection` has the P tokens by name or as columns int32[P].
  Only "last" needs `num_tokens`, int32[B].
  """
  _check_selection(tokens, num_tokens, selection)
  check_params(params, config)
  x, pools = stack.run(params, tokens, positions, pools, access, config)
  # Tokens are selected before the head, because the head computes V logits for
  # each token.
  return head(params, _select(x, num_tokens, selection), config), pools


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


def _select(
  x: jax.Array,
  num_tokens: jax.Array | None,
  selection: LogitSelection | jax.Array,
) -> jax.Array:
  """Selects the tokens that get logits: [B, T, E] to [B, P, E]."""
  if not isinstance(selection, str):
    return x.at[:, selection].get(mode="clip")
  if selection == "all":
    return x
  if selection == "none":
    return x[:, :0]
  if num_tokens is None:
    raise ValueError(
      '`logits` must be "all" or "none" with a PackedView, got "last"; set '
      "`batch.columns`."
    )
  # A row without tokens reads column 0, because -1 would be the last column.
  last_column = jnp.maximum(num_tokens - 1, 0)[:, None, None]
  return jnp.take_along_axis(x, last_column, axis=1, mode="fill")


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


def _check_selection(
  tokens: jax.Array,
  num_tokens: jax.Array | None,
  selection: LogitSelection | jax.Array,
) -> None:
  if num_tokens is not None and num_tokens.shape != tokens.shape[:1]:
    raise ValueError(
      f"`num_tokens` must have the shape {list(tokens.shape[:1])}, got "
      f"{list(num_tokens.shape)}."
    )
  if isinstance(selection, str) and selection not in ("all", "last", "none"):
    raise ValueError(
      f'`logits` must be "all", "last" or "none", got {selection!r}.'
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
