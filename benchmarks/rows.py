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
import jax.numpy as jnp
import numpy as np


class Row(NamedTuple):
  """One figure.

  Attributes:
    workload: the name of the workload.
    metric: the name of the count or time.
    value: the figure.
    bound: the target of the figure, or None.
    side: "at most" or "at least", or None without a target.
  """

  workload: str
  metric: str
  value: float
  bound: float | None = None
  side: str | None = None

  @property
  def met(self) -> bool | None:
    """True if the figure keeps its bound; None without a bound."""
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


def timed(call: Callable[..., Any], *inputs: Any) -> tuple[float, float, Any]:
  """Returns the wall seconds and CPU seconds of a call, and its result."""
  # Waits for the calls that compute the inputs, because they must not be timed.
  jax.block_until_ready(inputs)
  wall, processor = time.perf_counter(), time.process_time()
  result = jax.block_until_ready(call(*inputs))
  return time.perf_counter() - wall, time.process_time() - processor, result


def alternated(
  calls: Mapping[Any, tuple[Any, ...]], rounds: int
) -> tuple[dict[Any, np.ndarray], dict[Any, Any]]:
  """Times calls in turns, after one round of warm-up.

  Args:
    calls: a function and its inputs by name. Each call gets copies of the
      inputs, because it may donate them. Making copies is not timed.
    rounds: the number of timed calls of each function.

  Returns:
    The wall seconds and CPU seconds, [rounds, 2], and the last result, by name.
  """
  # The calls take turns, so that changes of the machine's speed affect all
  # alike.
  seconds: dict[Any, list[tuple[float, float]]] = {name: [] for name in calls}
  results = {}
  for _ in range(rounds + 1):
    for name, (call, *inputs) in calls.items():
      copies = jax.tree.map(jnp.copy, inputs)
      wall, processor, results[name] = timed(call, *copies)
      seconds[name].append((wall, processor))
  return {name: np.array(seconds[name][1:]) for name in calls}, results


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
    name: the file.
    parts: for each part, a function that measures its rows.

  Returns:
    The rows of all parts.
  """
  path = pathlib.Path(name)
  done: dict[str, list[dict[str, Any]]] = {}
  if path.exists():
    done = json.loads(path.read_text("utf-8"))["parts"]
  for part in [part for part in parts if part not in done]:
    done[part] = [row.as_json() for row in show(parts[part]())]
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


def run(
  description: str | None,
  rows_of: Callable[[bool, int], Iterable[Row]],
  **settings: Any,
) -> None:
  """Runs a benchmark whose rows are `rows_of(quick, rounds)`.

  The other arguments are those of `command.run`.
  """
  command.run(description, lambda *sizes: report(rows_of(*sizes)), **settings)


def summary(rows: Iterable[Row]) -> str:
  """Returns one line with the number of kept bounds and the missed bounds."""
  rows = [row for row in rows if row.bound is not None]
  missed = [f"{row.workload}: {row.metric}" for row in rows if not row.met]
  text = f"{len(rows) - len(missed)} of {len(rows)} bounds are kept"
  return "; missed: ".join([text, "; ".join(missed)] if missed else [text])
