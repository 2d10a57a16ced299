"""Random calls of a rollout, of which some export and import sequences."""

import jaxkv
from jaxkv import rollout
from tests.rollout.random_calls import Calls


class MovingCalls(Calls):
  """A rollout whose sequences also leave it and return."""

  names = (*Calls.names, "move", "move")

  def _move(self) -> None:
    """Exports sequences and imports them again, some of them twice."""
    ids, mask = self._ids(3), self._mask(3)
    codes = [
      jaxkv.Status.OK if code is None else code
      for code in self._codes_of(ids, mask)
    ]
    max_pages = None if self._rng.random() < 0.8 else 5
    self.state, exported = rollout.export(
      self.state, ids, mask=mask, max_pages=max_pages
    )
    self._codes("export", exported.code, codes)
    for code in (jaxkv.Status.OK, jaxkv.Status.BAD_SEQUENCE):
      self.state, out = rollout.import_sequences(self.state, exported)
      expected = [
        code if done == jaxkv.Status.OK else jaxkv.Status.SKIPPED
        for done in codes
      ]
      self._codes("import", out.code, expected)
