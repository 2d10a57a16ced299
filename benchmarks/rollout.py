"""The rollout loop: what it computes, and what it takes, beside bounds.

Counted on a model that costs nothing; `rollout_ideal.py` has the workloads and
what is possible. "Before" is the loop that computed prompts in calls of their
own.

| metric             | what                                   | bound | before |
|--------------------|----------------------------------------|-------|--------|
| rows a useful row  | tokens that the model is called with,  | 1.25  | 9.8    |
|                    | for each needed: drawn, or of a prompt |       |        |
|                    | and computed for the first time        |       |        |
| roofline time      | bfloat16 calls, max(rows, 295) each,   | 1.2   | 5.8    |
|                    | against ideal mixed batches            |       |        |
| busy               | slots that draw a token, of all slots  | -1 %  |        |
|                    | in all steps; against both ideals      |       |        |
| 35 % of need: busy | in a small pool                        | 58 %  | 59.8 % |
| and recomputed     | tokens computed again                  | 30 k  | 225 k  |
| same_batch: prompt | tokens of prompts that were computed   | 176   | 1,136  |
| grpo: prompt       | likewise; the least: equal pages once  | +5 %  |        |
| families: hit rate | tokens found, of those looked up;      | 0.55  | 0.12   |
|                    | chosen from 32 that wait, or from all  | 0.69  |        |
| overtaken          | the most sequences that entered before | as    |        |
|                    | one that waited                        | asked |        |
| longest wait       | steps in which a sequence that decodes | 1     |        |
|                    | in a slot draws nothing                |       |        |

The need of a small pool is what its slots would reserve: room for a mean prompt
and the longest answer each.

One bound on rows cannot be kept. `families` has one slot, and computes tails of
8 to 32 tokens in calls of 65 columns at least. That takes no time on an
accelerator, where a call costs 295 rows or more.

Timed, beside the counts:

| metric                | what                                     | bound |
|-----------------------|------------------------------------------|-------|
| step, 2 tokens        | of 64 slots that decode, greedy, without | 110   |
|                       | a model, microseconds                    |       |
| step, 513 tokens      | likewise, with tokens drawn              | 400   |
| characters            | tokens a second of the character model   |       |

With `--device`, nothing but the lengths workload on the GPU or TPU at hand, see
`rollout_device.py`.

Not measured: compilation, and without `--device` an accelerator.

  python benchmarks/rollout.py [--quick] [--json FILE] [--device]
"""

from collections.abc import Iterator
from typing import Any

import command
import rollout_counts as counts
import rollout_device
import rollout_times
from rows import Row
from rows import show
from rows import summary


def counted(quick: bool) -> Iterator[Row]:
  """The rows that are counts."""
  yield from counts.stall(quick)
  yield from counts.small(quick)
  yield from counts.long(quick)


def measured(quick: bool, rounds: int, device: bool) -> dict[str, Any]:
  """All rows, printed as they come."""
  print(f"\n{'workload':26} {'metric':42} {'value':>10} {'bound':>20}")
  if device:
    return {"rows": rollout_device.by_part("", quick)}
  rows = show(rollout_times.all_rows(quick, rounds))
  rows += show(counted(quick))
  print(f"\n{summary(rows)}")
  return {"rows": [row.as_json() for row in rows]}


def main() -> None:
  command.run(
    __doc__,
    measured,
    rounds=7,
    quick_rounds=1,
    not_measured="compilation, accelerators without --device",
    arguments={
      "--device": {"action": "store_true", "help": "a GPU or TPU, alone"},
    },
  )


if __name__ == "__main__":
  main()
