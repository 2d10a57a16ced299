"""What every attention backend is told besides its arrays."""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """Options of one attention call, checked, with defaults filled in.

  Attributes:
    page_offset: added to every page id. int32[]
    scale: factor of every logit, before the soft cap. float or float32[]
    soft_cap: c of c * tanh(logit / c), or None for no cap.
    window: keys a query sees, itself included; None for all. int or int32[]
    sinks: a logit per head with no value, or None. float[H]
  """

  page_offset: jax.Array
  scale: jax.Array | float
  soft_cap: float | None
  window: jax.Array | int | None
  sinks: jax.Array | None
