"""The command line and the report file of all benchmarks."""

import argparse
import json
import os
import pathlib
import platform
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import jax


def run(
  description: str | None,
  measured: Callable[..., dict[str, Any]],
  *,
  rounds: int,
  quick_rounds: int,
  not_measured: str,
  arguments: Mapping[str, dict[str, Any]] | None = None,
) -> None:
  """Runs a benchmark with the options `[--quick] [--json FILE]` and others.

  Prints the machine, calls `measured`, and writes the report with `--json`.

  Args:
    description: the help text.
    measured: `(quick, rounds, **options) -> rows by table`. Prints the tables.
    rounds: the number of samples of each row.
    quick_rounds: the number of samples with `--quick`.
    not_measured: the last line of the output.
    arguments: further options by flag, as `add_argument` takes them.
  """
  parser = argparse.ArgumentParser(
    description=description,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
  parser.add_argument("--quick", action="store_true", help="fewer rows, rounds")
  for flag, settings in (arguments or {}).items():
    parser.add_argument(flag, **settings)
  options = vars(parser.parse_args())
  file, quick = options.pop("json"), options.pop("quick")
  rounds = quick_rounds if quick else rounds
  device = jax.devices()[0]
  # The load is printed, because timings are useless if other processes are
  # busy.
  start_load = os.getloadavg()
  print(
    f"{device.device_kind} ({device.platform}), {platform.machine()},"
    f" {os.cpu_count()} cores, jax {jax.__version__}, {rounds} rounds, load"
    f" average {start_load[0]:.1f}"
  )
  rows = measured(quick, rounds, **options)
  end_load = os.getloadavg()
  print(f"\nload average now {end_load[0]:.1f}\nnot measured: {not_measured}")
  report = {
    "device": device.device_kind,
    "jax": jax.__version__,
    "rounds": rounds,
    "load_average": [start_load, end_load],
    **rows,
  }
  write(file, report)


def _text(report: dict[str, Any]) -> str:
  """Formats a report as JSON with one row on each line."""

  def dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False)

  def field(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
      return "[\n" + ",\n".join(map(dump, value)) + "\n]"
    if isinstance(value, dict) and value:
      rows = (f"{dump(key)}: {dump(row)}" for key, row in value.items())
      return "{\n" + ",\n".join(rows) + "\n}"
    return dump(value)

  fields = (f"{dump(key)}: {field(value)}" for key, value in report.items())
  return "{\n" + ",\n".join(fields) + "\n}\n"


def write(path: pathlib.Path | None, report: dict[str, Any]) -> None:
  """Writes a report as JSON if there is a file, atomically if it is regular."""
  if path is None:
    return
  text = _text(report)
  if path.is_symlink() or (path.exists() and not path.is_file()):
    path.write_text(text, "utf-8")
    return
  part = path.with_suffix(".part")
  part.write_text(text, "utf-8")
  part.replace(path)
