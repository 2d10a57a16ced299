"""All of a decoder: from tokens to the logits of those that are wanted."""

import functools
from collections.abc import Mapping
from typing import Any
from typing import Literal

import jax
import jax.numpy as jnp

from jaxkv._src.arrays import arguments
from jaxkv._src.models.decoder import blocks
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.norms import rms_norm
from jaxkv._src.models.decoder.numerics import token_wise
from jaxkv._src.models.decoder.params import Params

Wanted = Literal["all", "last", "none"]


def run(
  params: Params,
  tokens: jax.Array,
  positions: jax.Array,
  memory: blocks.Memory,
  keep: Any,
  counts: jax.Array | None,
  wanted: Wanted | jax.Array,
  config: Decoder,
) -> tuple[jax.Array, blocks.Memory]:
  """Runs all layers: (float32[B, P, V] logits, memory).

  Args:
    params: of the decoder.
    tokens: int32[B, T].
    positions: int32[B, T].
    memory: what `keep` keeps.
    keep: one of `memories`.
    counts: int32[B], tokens of each row, for "last".
    wanted: which tokens get logits, see `forward`; or their columns int32[P].
    config: static.

  Raises:
    ValueError: an argument has another shape than the decoder's.
  """
  _check_wanted(tokens, counts, wanted)
  check_params(params, config)
  x, memory = blocks.run(params, tokens, positions, memory, keep, config)
  return head(params, _pick(x, counts, wanted), config), memory


def head(params: Params, x: jax.Array, config: Decoder) -> jax.Array:
  """float32[..., V] logits of what the last layer gives, [..., E].

  Exact numerics take [B, T, E] alone.
  """
  unembed = params["embed"] if config.tied_embeddings else params["unembed"]
  weights = {"final_norm": params["final_norm"], "unembed": unembed}
  return token_wise(config)(functools.partial(_head, config), weights, x)


def _head(config: Decoder, weights: Params, x: jax.Array) -> jax.Array:
  x = rms_norm(x, weights["final_norm"], config.norm_eps, config.norm_offset)
  unembed = weights["unembed"]
  if config.tied_embeddings:
    unembed = unembed.T
  logits = jnp.einsum(
    "...e,ev->...v", x, unembed, preferred_element_type=jnp.float32
  )
  if config.logit_cap is not None:
    logits = config.logit_cap * jnp.tanh(logits / config.logit_cap)
  return logits


def _pick(
  x: jax.Array, counts: jax.Array | None, wanted: Wanted | jax.Array
) -> jax.Array:
  """[B, T, E] to [B, P, E]: the tokens that get logits."""
  if not isinstance(wanted, str):
    return x.at[:, wanted].get(mode="clip")
  if wanted == "all":
    return x
  if wanted == "none":
    return x[:, :0]
  if counts is None:
    raise ValueError(
      '`logits` must be "all" or "none" with a PackedView, got "last"; give '
      "`columns`."
    )
  last = jnp.maximum(counts - 1, 0)[:, None, None]
  return jnp.take_along_axis(x, last, axis=1, mode="fill")


def check_tokens(tokens: jax.Array, positions: jax.Array) -> None:
  """Raises unless both are integers [B, T]."""
  arguments.check_integers("tokens", tokens)
  arguments.check_integers("positions", positions)
  if tokens.ndim != 2:
    raise ValueError(f"`tokens` must be [B, T], got shape {tokens.shape}.")
  if positions.shape != tokens.shape:
    raise ValueError(
      f"`positions` must have the shape of tokens, {tokens.shape}, got "
      f"{positions.shape}."
    )


def _check_wanted(
  tokens: jax.Array, counts: jax.Array | None, wanted: Wanted | jax.Array
) -> None:
  if counts is not None and counts.shape != tokens.shape[:1]:
    raise ValueError(
      f"`counts` must have shape {tokens.shape[:1]}, got {counts.shape}."
    )
  if isinstance(wanted, str) and wanted not in ("all", "last", "none"):
    raise ValueError(
      f'`logits` must be "all", "last" or "none", got {wanted!r}.'
    )


def check_params(params: Params, config: Decoder) -> None:
  """Raises unless there is an embedding, and it is that of the decoder.

  Raises:
    TypeError: they are no dict with an embedding.
    ValueError: it has another dtype or shape.
  """
  if not isinstance(params, Mapping) or "embed" not in params:
    found = type(params).__name__
    if isinstance(params, Mapping):
      found = f"one of {sorted(map(str, params))}"
    raise TypeError(
      f'`params` must be a dict with "embed", got {found}; pass what '
      "`init_params` or `load` returns."
    )
  embed = (config.vocab_size, config.embed_dim)
  if params["embed"].shape != embed or params["embed"].dtype != config.dtype:
    raise ValueError(
      f'`params["embed"]` must be {config.dtype.name}{list(embed)}, as in '
      f"config, got {params['embed'].dtype.name}"
      f"{list(params['embed'].shape)}."
    )
