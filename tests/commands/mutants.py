"""Mutants of commands, with the test that notices each."""

from tests.tools.mistakes import returned
from tests.tools.mistakes import table

MUTANTS = table(
  "jaxkv._src.commands",
  "tests/commands",
  {
    "partial blocks are full": (
      "replay:_num_blocks",
      returned(lambda out, g: len(g.request.hash_ids)),
      "test_replay.py::test_a_trace_without_any_full_block",
    ),
    "any file can be written": (
      "output:check_writable",
      lambda right: lambda *paths: None,
      "test_output.py::test_unwritable_files_are_refused",
    ),
  },
)
