"""Detects new weights, by the identity of arrays or by their contents."""

import weakref
from typing import Any

import jax

from jaxkv._src.arrays.digest import digest


class WeightWatch:
  """Remembers the last weights and reports a change.

  A trainer that keeps its weights on the host between calls passes new arrays
  with equal contents. To compare contents, the object stores a 64-bit digest of
  each array, not a copy.
  """

  def __init__(self):
    self._leaves: list[weakref.ref] = []
    self._digest: tuple[int, ...] | None = None

  def has_changed(self, tree: Any, *, by_contents: bool) -> bool:
    """Returns True if the weights differ from those of the last call.

    With `by_contents`, new arrays with equal contents are not a change. This
    requires that `by_contents` was True for the last weights, too. The first
    call returns True.
    """
    leaves = jax.tree.leaves(tree)
    is_same = len(leaves) == len(self._leaves) and all(
      reference() is leaf
      for reference, leaf in zip(self._leaves, leaves, strict=True)
    )
    if is_same and not (by_contents and self._digest is None):
      return False
    last_digest = self._digest
    self._digest = None
    if by_contents:
      self._digest = digest(leaves)
    # Weak references let old weights be freed. A dead reference returns None,
    # so it differs from any new leaf.
    self._leaves = [weakref.ref(leaf) for leaf in leaves]
    return not is_same and (last_digest is None or last_digest != self._digest)
