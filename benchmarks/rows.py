"""Rows of a report, which are figures with their bounds."""

import json
import pathlib
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

import command
import jax


class Row(NamedTuple):
  """One figure.

  Attributes:
    workload: the name of the workload.
    metric: the name of the count or time.
    value: the figure.
    bound: the target of the figure; None if there is no target.
    side: "at most" or "at least"; None if there is no target.
  """

  workload: str
  metric: str
  value: float
  bound: float | None = None
  side: str | None = None

  @property
  def met(self) -> bool | None:
    """True if the figure keeps its bound; None if there is no bound."""
    if self.bound is None:
      return None
    if self.side == "at least":
      return self.value >= self.bound
    return self.value <= self.bound

  def as_json(self) -> dict[str, Any]:
    """Returns the row as it is written to the report."""
    return {**self._asdict(), "met": self.met}


def at_most(workload: str, metric: str, value: float, bound: float) -> Row:
  return Row(workload, metric, value, bound, "at most")


def at_least(workload: str, metric: str, value: float, bound: float) -> Row:
  return Row(workload, metric, value, bound, "at least")


def alternated(
  calls: Mapping[str, Callable[[], Any]],
  rounds: int,
  clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
  """Times calls in turns, after one round of warm-up.

  Returns:
    The seconds of each call by its name, one for each round.
  """
  # The calls take turns, so that changes of the machine's speed affect all
  # alike.
  seconds: dict[str, list[float]] = {name: [] for name in calls}
  for number in range(rounds + 1):
    for name, call in calls.items():
      begin = clock()
      jax.block_until_ready(call())
      if number:
        seconds[name].append(clock() - begin)
  return seconds


def show(rows: Iterable[Row]) -> list[Row]:
  """Prints each row as soon as it is measured, and returns all rows."""
  done = []
  for row in rows:
    done.append(row)
    if row.bound is None:
      bound = ""
    else:
      verdict = "" if row.met else "  MISSED"
      bound = f"{row.side:>9} {number(row.bound):>10}{verdict}"
    print(
      f"{row.workload:26} {row.metric:42} {number(row.value):>10} {bound}",
      flush=True,
    )
  return done


def by_part(
  name: str, parts: Mapping[str, Callable[[], Iterable[Row]]]
) -> list[dict[str, Any]]:
  """Runs the parts that a file lacks, and writes each one when it ends.

  Args:
    name: the file, or an empty string to write none.
    parts: for each part, a function that measures its rows.

  Returns:
    The rows of all parts.
  """
  path = pathlib.Path(name) if name else None
  done: dict[str, list[dict[str, Any]]] = {}
  if path and path.exists():
    done = json.loads(path.read_text("utf-8"))["parts"]
  for part in [part for part in parts if part not in done]:
    done[part] = [row.as_json() for row in show(parts[part]())]
    if path:
      report = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "parts": done,
        "complete": done.keys() >= parts.keys(),
      }
      command.write(path, report)
  return [row for rows in done.values() for row in rows]


def number(value: float) -> str:
  """Formats a figure with about four digits."""
  if float(value).is_integer() or abs(value) >= 1000:
    return f"{value:,.0f}"
  return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3f}"


def report(rows: Iterable[Row]) -> dict[str, Any]:
  """Prints a table of rows and a summary, and returns the report."""
  print(f"\n{'workload':26} {'metric':42} {'value':>10} {'bound':>20}")
  done = show(rows)
  print(f"\n{summary(done)}")
  return {"rows": [row.as_json() for row in done]}


def summary(rows: Iterable[Row]) -> str:
  """Returns one line with the number of kept bounds and the missed bounds."""
  rows = [row for row in rows if row.bound is not None]
  missed = [f"{row.workload}: {row.metric}" for row in rows if not row.met]
  text = f"{len(rows) - len(missed)} of {len(rows)} bounds are kept"
  return "; missed: ".join([text, "; ".join(missed)] if missed else [text])
