"""Imports eSurge's manager and scheduler from EasyDeL's sources.

Their packages import much that neither needs. So the parent packages are empty
modules here, and imports of other libraries are replaced.
"""

import dataclasses
import importlib
import logging
import os
import pathlib
import sys
import types
from typing import Any

import pytest

VARIABLE = "JAXKV_EASYDEL"
_ESURGE = "easydel.inference.esurge"


@dataclasses.dataclass
class SamplingParams:
  """The sampling parameters that a scheduler reads."""

  max_tokens: int | None = 16
  ignore_eos: bool = False
  stop_token_ids: tuple[int, ...] = ()
  prompt_logprobs: int | None = None
  extra_args: dict[str, Any] | None = None
  guided_decoding: Any = None


class Struct:
  """A class of keyword-only fields."""

  def __init_subclass__(cls, **_: Any):
    dataclasses.dataclass(kw_only=True)(cls)


def sources() -> pathlib.Path | None:
  """Returns the folder of the package `easydel`, or None."""
  path = os.environ.get(VARIABLE)
  if not path:
    return None
  root = pathlib.Path(path)
  for folder in (root, root / "src"):
    if (folder / "easydel" / "inference" / "esurge" / "core").is_dir():
      return folder / "easydel"
  raise FileNotFoundError(
    f"`{VARIABLE}` must name a checkout of EasyDeL, got {path}."
  )


needed = pytest.mark.skipif(
  not os.environ.get(VARIABLE),
  reason=f"{VARIABLE} does not name a checkout of EasyDeL",
)


def _package(name: str, folder: pathlib.Path) -> None:
  package = types.ModuleType(name)
  package.__path__ = [str(folder)]
  sys.modules[name] = package


def _stub(name: str, **members: Any) -> None:
  module = types.ModuleType(name)
  vars(module).update(members)
  sys.modules[name] = module


def module(name: str) -> Any:
  """A module of eSurge, such as `core.manager`."""
  folder = sources()
  assert folder is not None
  if _ESURGE not in sys.modules:
    _package("easydel", folder)
    _package("easydel.inference", folder / "inference")
    _package(_ESURGE, folder / "inference" / "esurge")
    sampling = "easydel.inference.sampling_params"
    _stub(sampling, SamplingParams=SamplingParams)
    _stub("eformer", __path__=[])
    _stub("eformer.loggings", get_logger=_quiet)
    _stub("msgspec", Struct=Struct, field=dataclasses.field)
  return importlib.import_module(f"{_ESURGE}.{name}")


def _quiet(name: str, *_: Any, **__: Any) -> logging.Logger:
  logger = logging.getLogger(name)
  logger.setLevel(logging.CRITICAL)
  return logger
