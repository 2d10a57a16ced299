"""What drives a rollout from outside, and what it costs.

| workload  | metric                | what                            | bound |
|-----------|-----------------------|---------------------------------|-------|
| streaming | programs compiled     | 10,000 prompts through 512 rows | 1     |
|           | busy                  | slots, against a list schedule  | 0.99  |
|           | answers               | unlike those of one large call  | 0     |
| first 16  | steps                 | until 16 of 32 groups are done, | 0.75  |
|           |                       | against 16 groups alone         |       |
| settings  | us a step             | all settings, against a         | 1.25  |
|           |                       | temperature alone, no model     |       |
| drafts    | tokens a step         | of a sequence that decodes      | 1.3   |
|           | seconds               | against those without drafts,   | 1.05  |
|           |                       | where nothing repeats: there    |       |
|           |                       | without a model, which is the   |       |
|           |                       | hardest case                    |       |

Answers have lognormal lengths: median 200, sigma 1, at most 2,048. Drafts are
for the character model, trained at the first call. Its texts are lists and
code; it copies them when greedy, and drifts away at temperature 0.8.

  python benchmarks/rollout_control.py [--quick] [--json FILE]
"""

from collections.abc import Iterator
from typing import Any

import command
import rollout_drafts
import rollout_settings
import rollout_streams
from rollout_rows import Row
from rollout_rows import report


def _rows(quick: bool, rounds: int) -> Iterator[Row]:
  yield from rollout_streams.first_groups(quick)
  yield from rollout_streams.streaming(quick)
  yield from rollout_settings.all_rows(quick, rounds)
  yield from rollout_drafts.all_rows(quick, rounds)


def measured(quick: bool, rounds: int) -> dict[str, Any]:
  """All rows, printed as they come."""
  return report(_rows(quick, rounds))


def main() -> None:
  command.run(
    __doc__,
    measured,
    rounds=7,
    quick_rounds=1,
    not_measured="accelerators, other models",
  )


if __name__ == "__main__":
  main()
