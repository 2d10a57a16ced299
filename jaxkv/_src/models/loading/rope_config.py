"""Reads rotary settings from config.json, in the old or the new format."""

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


def rope_table(
  config: ConfigFile, default_base: float, default_fraction: float = 1.0
) -> Table:
  """Returns the rotary settings of config.json as one table.

  The new format is the table `rope_parameters`. The old format has the numbers
  `rope_theta` and `partial_rotary_factor`, and the table `rope_scaling`. The
  key `type` can replace `rope_type`. `default_base` and `default_fraction`
  replace a missing base and a missing fraction.
  """
  base = config.number("rope_theta", default_base)
  fraction = config.number("partial_rotary_factor", default_fraction)
  scaling = config.table("rope_scaling")
  table = {"rope_theta": base, "partial_rotary_factor": fraction, **scaling}
  # If a file has both formats, the new one takes precedence.
  table |= config.table("rope_parameters")
  if "type" in table:
    table.setdefault("rope_type", table["type"])
    del table["type"]
  table.setdefault("rope_type", "default")
  return table


def rope_of(
  table: Table, config: ConfigFile, head_dim: int, *, interleaved: bool = False
) -> Rope:
  """Converts a table, in the format of `rope_table`, to the `Rope` of a layer.

  `partial_rotary_factor` in the table is the fraction of the `head_dim`
  elements of a head that are rotated. `config` has the context length.
  """
  # A separate `ConfigFile` refuses unknown keys of the table.
  settings = ConfigFile(dict(table), f"the rope table of {config.file}")
  base = settings.number("rope_theta")
  dim = int(head_dim * settings.number("partial_rotary_factor", 1.0))
  settings.only("rope_type", "default", "linear", "llama3", "yarn")
  scaling = _scaling(settings, config)
  settings.check_all_read()
  return Rope(
    base=base,
    dim=None if dim == head_dim else dim,
    interleaved=interleaved,
    scaling=scaling,
  )


def llama3_table(
  divisors: np.ndarray, base: float, config: ConfigFile, head_dim: int
) -> Table:
  """Returns Llama 3's `rope_scaling` that divides frequencies by `divisors`."""
  # A GGUF file stores only the divisors. The settings except `factor` are the
  # same in all Llama 3 models. The check below refuses any other scaling.
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
      f"rope_freqs.weight in {config.file} must hold Llama 3's scaling; use "
      "a checkpoint in another format."
    )
  return table


def _scaling(settings: ConfigFile, config: ConfigFile) -> Scaling | None:
  """Reads the scaling of a table."""
  match settings.get("rope_type"):
    case "linear":
      # transformers writes this key, but it has no effect on linear scaling.
      settings.ignore("original_max_position_embeddings")
      return LinearScaling(factor=settings.number("factor"))
    case "llama3":
      return Llama3Scaling(
        factor=settings.number("factor"),
        low_frequency_factor=settings.number("low_freq_factor"),
        high_frequency_factor=settings.number("high_freq_factor"),
        original_length=_original_length(settings, config),
      )
    case "yarn":
      return _yarn(settings, config)
  return None


def _yarn(settings: ConfigFile, config: ConfigFile) -> Scaling:
  factor = settings.number("factor", None)
  length = _original_length(settings, config)
  if factor is None:
    factor = config.size("max_position_embeddings") / length
  # Without `attention_factor`, DeepSeek's keys `mscale` and `mscale_all_dim`
  # define the factor as a ratio. Without these keys, it is YaRN's default.
  mscale = settings.number("mscale", 0.0)
  all_dim = settings.number("mscale_all_dim", 0.0)
  attention = settings.number("attention_factor", None)
  if attention is None and mscale and all_dim:
    attention = magnitude(factor, mscale) / magnitude(factor, all_dim)
  elif attention is None:
    attention = magnitude(factor, 1.0)
  return YarnScaling(
    factor=factor,
    original_length=length,
    beta_fast=settings.number("beta_fast", 32.0),
    beta_slow=settings.number("beta_slow", 1.0),
    truncate=settings.flag("truncate", True),
    attention_factor=attention,
  )


def magnitude(factor: float, mscale: float) -> float:
  """Returns the factor by which YaRN multiplies queries and keys.

  `factor` is the new context length divided by the original one.
  """
  return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _original_length(settings: ConfigFile, config: ConfigFile) -> int:
  key = "original_max_position_embeddings"
  # Some files have the key in `config` instead of the rope table.
  length = settings.size(key, None)
  if length is None:
    length = config.size(key, None)
  return config.size("max_position_embeddings") if length is None else length
