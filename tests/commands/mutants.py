"""Mistakes in commands: one each, and the test that notices it."""

from tests.tools.mistakes import returned
from tests.tools.mistakes import table

MUTANTS = table(
  "jaxkv._src.commands",
  "tests/commands",
  {
    "the last of equal keys": (
      "trace:_object",
      lambda right: dict,
      "test_replay.py::test_a_bad_line_is_named_and_nothing_is_written",
    ),
    "equal ids are one block": (
      "replay:_num_distinct",
      lambda right: lambda ids: len({name for row in ids for name in row}),
      "test_replay.py::test_equal_ids_after_different_blocks",
    ),
    "partial blocks are full": (
      "replay:_num_blocks",
      returned(lambda out, g: len(g.request.hash_ids)),
      "test_replay.py::test_a_trace_without_any_full_block",
    ),
  },
)
