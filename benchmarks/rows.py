"""Rows of a report: a figure and its bound."""

import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

import jax


class Row(NamedTuple):
  """One figure.

  Attributes:
    workload: what was run.
    metric: what was counted or timed.
    value: the figure.
    bound: what the figure should reach; None if there is no such number.
    side: "at most" or "at least", the bound; None without one.
  """

  workload: str
  metric: str
  value: float
  bound: float | None = None
  side: str | None = None

  @property
  def met(self) -> bool | None:
    """Whether the figure keeps its bound; None without one."""
    if self.bound is None:
      return None
    if self.side == "at least":
      return self.value >= self.bound
    return self.value <= self.bound

  def as_json(self) -> dict[str, Any]:
    """The row of the report."""
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
  """Times calls that take turns, after a round that is not counted.

  Args:
    calls: functions of no arguments by name.
    rounds: samples of each.
    clock: returns seconds.

  Returns:
    Seconds of each call, by name.
  """
  seconds: dict[str, list[float]] = {name: [] for name in calls}
  for number in range(rounds + 1):
    for name, call in calls.items():
      begin = clock()
      jax.block_until_ready(call())
      if number:
        seconds[name].append(clock() - begin)
  return seconds


def show(rows: Iterable[Row]) -> list[Row]:
  """Prints rows as they come; returns them."""
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


def number(value: float) -> str:
  """A figure with about four digits."""
  if float(value).is_integer() or abs(value) >= 1000:
    return f"{value:,.0f}"
  return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3f}"


def report(rows: Iterable[Row]) -> dict[str, Any]:
  """Prints a table of rows as they come, and a summary; returns them all."""
  print(f"\n{'workload':26} {'metric':42} {'value':>10} {'bound':>20}")
  done = show(rows)
  print(f"\n{summary(done)}")
  return {"rows": [row.as_json() for row in done]}


def summary(rows: Iterable[Row]) -> str:
  """One line: how many bounds are kept, and which are not."""
  rows = [row for row in rows if row.bound is not None]
  missed = [f"{row.workload}: {row.metric}" for row in rows if not row.met]
  text = f"{len(rows) - len(missed)} of {len(rows)} bounds are kept"
  return "; missed: ".join([text, "; ".join(missed)] if missed else [text])
