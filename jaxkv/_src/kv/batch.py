"""The tokens of one call of a model."""

import dataclasses
from typing import Any

import jax

from jaxkv._src.kv.view import PackedView
from jaxkv._src.kv.view import View


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
  """The tokens of one call of a model, and their pages.

  A rollout packs the tokens of all sequences into one row of C columns, and B
  is 1. A loop of your own can have a row for each sequence.

  Attributes:
    tokens: the tokens.  # int32[B, T], in a rollout [1, C]
    positions: the position of each token in its sequence.  # int32[B, T]
    views: a view for each layer group of the cache, in a rollout a
      `PackedView`.
    columns: the columns of a packed call that need logits; None for all.
      # int32[X]
    rows: the sequence of each column, a `jaxkv.rollout.Rows` of C rows; None
      outside of a rollout.
  """

  tokens: jax.Array
  positions: jax.Array
  views: tuple[View | PackedView, ...]
  columns: jax.Array | None = None
  rows: Any = None
