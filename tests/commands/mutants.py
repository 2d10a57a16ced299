"""Mutants of commands, with the test that notices each."""

from tests.tools.mistakes import table

MUTANTS = table(
  "jaxkv._src.commands",
  "tests/commands",
  {
    "any file can be written": (
      "output:check_writable",
      lambda right: lambda *paths: None,
      "test_output.py::test_unwritable_files_are_refused",
    ),
  },
)
