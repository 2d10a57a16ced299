"""Rotary positions as config.json describes them, in its old and new form."""

import math
from typing import Any

import numpy as np

from jaxkv._src.models.decoder.rope import LinearScaling
from jaxkv._src.models.decoder.rope import Llama3Scaling
from jaxkv._src.models.decoder.rope import Rope
from jaxkv._src.models.decoder.rope import Scaling
from jaxkv._src.models.decoder.rope import YarnScaling
from jaxkv._src.models.decoder.rope import frequencies
from jaxkv._src.models.loading.config_file import ConfigFile

Table = dict[str, Any]


def rope_table(config: ConfigFile, default_base: float) -> Table:
  """What config.json says of rotary positions, base included.

  The new form is `rope_parameters`; the old one is `rope_theta` and
  `rope_scaling`, whose `rope_type` may be called `type`.
  """
  base = config.number("rope_theta", default_base)
  fraction = config.number("partial_rotary_factor", 1.0)
  old = config.table("rope_scaling")
  table = {"rope_theta": base, "partial_rotary_factor": fraction, **old}
  table |= config.table("rope_parameters")
  if "type" in table:
    table.setdefault("rope_type", table["type"])
    del table["type"]
  table.setdefault("rope_type", "default")
  return table


def rope_of(
  table: Table, config: ConfigFile, head_dim: int, *, interleaved: bool = False
) -> Rope:
  """The rotation of a layer.

  Args:
    table: from `rope_table`.
    config: for messages, and for the length of the context.
    head_dim: elements that could be turned.
    interleaved: how they are paired.

  Raises:
    ValueError: the type of scaling is not built, or a key is not known.
  """
  own = ConfigFile(dict(table), f"the rope table of {config.where}")
  base = own.number("rope_theta")
  dim = int(head_dim * own.number("partial_rotary_factor", 1.0))
  own.only("rope_type", "default", "linear", "llama3", "yarn")
  scaling = _SCALINGS[own.get("rope_type")](own, config)
  own.check_all_read()
  return Rope(
    base=base,
    dim=None if dim == head_dim else dim,
    interleaved=interleaved,
    scaling=scaling,
  )


def llama3_table(
  divisors: np.ndarray, base: float, config: ConfigFile, head_dim: int
) -> Table:
  """Llama 3's `rope_scaling`, by which frequencies have these divisors.

  Raises:
    ValueError: they are those of another scaling.
  """
  table = {
    "rope_type": "llama3",
    "factor": float(divisors.max(initial=1.0)),
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
  }
  rope = rope_of({"rope_theta": base, **table}, config, head_dim)
  plain, scaled = (frequencies(r, head_dim) for r in (Rope(base=base), rope))
  expected = plain / scaled
  if divisors.shape != expected.shape or not np.allclose(
    divisors, expected, rtol=1e-4
  ):
    raise ValueError(
      f"rope_freqs.weight in {config.where} must hold Llama 3's scaling; use "
      "a checkpoint in another format."
    )
  return table


def _none(own: ConfigFile, config: ConfigFile) -> Scaling | None:
  del own, config
  return None


def _linear(own: ConfigFile, config: ConfigFile) -> Scaling:
  del config
  own.ignore("original_max_position_embeddings")
  return LinearScaling(factor=own.number("factor"))


def _llama3(own: ConfigFile, config: ConfigFile) -> Scaling:
  return Llama3Scaling(
    factor=own.number("factor"),
    low_frequency_factor=own.number("low_freq_factor"),
    high_frequency_factor=own.number("high_freq_factor"),
    original_length=_original(own, config),
  )


def _yarn(own: ConfigFile, config: ConfigFile) -> Scaling:
  factor, length = own.number("factor", None), _original(own, config)
  if factor is None:
    factor = config.size("max_position_embeddings") / length
  mscale = own.number("mscale", 0.0)
  all_dim = own.number("mscale_all_dim", 0.0)
  attention = own.number("attention_factor", None)
  if attention is None and mscale and all_dim:
    attention = magnitude(factor, mscale) / magnitude(factor, all_dim)
  elif attention is None:
    attention = magnitude(factor, 1.0)
  return YarnScaling(
    factor=factor,
    original_length=length,
    beta_fast=own.number("beta_fast", 32.0),
    beta_slow=own.number("beta_slow", 1.0),
    truncate=own.flag("truncate", True),
    attention_factor=attention,
  )


def magnitude(factor: float, mscale: float) -> float:
  """YaRN's growth of the logits' scale with the length of the context."""
  return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _original(own: ConfigFile, config: ConfigFile) -> int:
  key = "original_max_position_embeddings"
  length = own.size(key, None)
  if length is None:
    length = config.size(key, None)
  return config.size("max_position_embeddings") if length is None else length


_SCALINGS = {
  "default": _none,
  "linear": _linear,
  "llama3": _llama3,
  "yarn": _yarn,
}
