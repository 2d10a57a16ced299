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

  A rollout packs the tokens of all sequences into one row, so B is 1 and T is
  C, the number of packed columns. Other loops can use one row for each
  sequence.

  Attributes:
    tokens: the tokens.  # int32[B, T]
    positions: the position of each token in its sequence.  # int32[B, T]
    views: one view for each layer group of the cache; a `PackedView` in a
      rollout.
    columns: the X packed columns that need logits; None for all.  # int32[X]
    rows: a `jaxkv.rollout.Rows` that gives the sequence of each packed column;
      None outside of a rollout.
  """

  tokens: jax.Array
  positions: jax.Array
  views: tuple[View | PackedView, ...]
  columns: jax.Array | None = None
  rows: Any = None
