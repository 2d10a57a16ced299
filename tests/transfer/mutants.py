"""Mistakes in exports and imports: one each, and the test that notices it."""

from dataclasses import replace

from tests.tools.mistakes import given
from tests.tools.mistakes import returned
from tests.tools.mistakes import table

_EXPORT = "test_export.py::"

_MISTAKES = {
  "imported pages have the contents of their neighbours": (
    "import_sequences:write_pages",
    given(sources=lambda g: g.sources[::-1]),
    _EXPORT + "test_moves_change_no_bit",
  ),
  "a page that is not full stays behind": (
    "export:_computed",
    returned(lambda out, g: (out[0], out[1] // 2 * 2, out[2])),
    _EXPORT + "test_moves_change_no_bit",
  ),
  "pages of all secrets are used": (
    "import_rules:fingerprint_of",
    returned(lambda out, g: out * 0),
    "test_moved_pages.py::test_pages_of_running_sequences_move",
  ),
  "imported samples find no group": (
    "import_sequences:_rows_of",
    given(exported=lambda g: replace(g.exported, sample=g.exported.sample * 0)),
    _EXPORT + "test_codes_of_export_and_import",
  ),
}

MUTANTS = table("jaxkv._src.transfer", "tests/transfer", _MISTAKES)
