"""Broken files of commands: one small mistake each, such as people make."""

import pathlib

import pytest

from tests.commands import test_replay
from tests.commands import test_report
from tests.commands.test_commands import TestRollout
from tests.commands.test_json_file import TestRefusals
from tests.commands.test_json_file import TestRegularFiles
from tests.commands.test_json_file import TestStreams
from tests.tools.mistakes import FailsCheck
from tests.tools.mistakes import returned
from tests.tools.mistakes import text


def _link(folder):
  TestRegularFiles().test_a_link_stays_a_link(folder, True)


def _pipe(folder):
  TestStreams().test_a_named_pipe(folder, None)


def _mode(folder):
  TestRegularFiles().test_an_old_file_keeps_its_mode(folder)


def _failure(folder):
  with pytest.MonkeyPatch.context() as patch:
    TestRegularFiles().test_a_failure_while_writing(folder, patch)


def _missing_folder(folder):
  with pytest.MonkeyPatch.context() as patch:
    TestRefusals().test_paths(folder, patch, "none/file", "No such file")


def _prompt_lines(folder):
  TestRollout().test_lines_end_as_on_any_system(folder)


def _least(prompts, least):
  return lambda folder: test_report.TestLeastPrefilled().test_prompts(
    prompts, least
  )


def _bad_line(case):
  return lambda folder: (
    test_replay.test_a_bad_line_is_named_and_nothing_is_written(folder, case)
  )


def _command(place, wrong, check):
  return FailsCheck(f"jaxkv._src.commands.{place}", wrong, check)


MUTANTS = {
  "a link is replaced": _command(
    "json_file:_target",
    returned(lambda out, g: pathlib.Path(g.path)),
    _link,
  ),
  "a pipe is replaced": _command(
    "json_file:_stream", lambda right: lambda path, mode: None, _pipe
  ),
  "a mode is lost": _command(
    "json_file:_write", text("part.chmod(stat.S_IMODE(mode))", "pass"), _mode
  ),
  "a part is left behind": _command(
    "json_file:_write", text("part.unlink(missing_ok=True)", "pass"), _failure
  ),
  "a file is written in place": _command(
    "json_file:_write",
    text("os.replace(part, target)", "target.write_text(part.read_text())"),
    _failure,
  ),
  "a missing folder is told at the end": _command(
    "json_file:_check_replaceable",
    lambda right: lambda path, mode: None,
    _missing_folder,
  ),
  "the last of equal keys": _command(
    "trace:_object", lambda right: dict, _bad_line("a key twice")
  ),
  "true is 1": _command(
    "trace:_is_count",
    text("and not isinstance(value, bool)", ""),
    _bad_line("a boolean"),
  ),
  "partial blocks have no id": _command(
    "trace:_request",
    text(
      '-(-record["input_length"] // BLOCK_TOKENS)',
      'record["input_length"] // BLOCK_TOKENS',
    ),
    _bad_line("too few ids"),
  ),
  "lines from 0": _command(
    "trace:read",
    text("start=1", "start=0"),
    test_replay.test_line_numbers_count_blank_lines,
  ),
  "equal ids are one block": _command(
    "replay:_num_distinct",
    lambda right: lambda ids: len({name for row in ids for name in row}),
    test_replay.test_equal_ids_after_different_blocks,
  ),
  "partial blocks are full": _command(
    "replay:_num_blocks",
    returned(lambda out, g: len(g.request.hash_ids)),
    test_replay.test_a_trace_without_any_full_block,
  ),
  "equal pages are one page": _command(
    "report:least_prefilled",
    text("key = page, tuple", "key = 0, tuple"),
    _least([[5, 6, 3, 4, 0], [7, 8, 3, 4, 0]], 8),
  ),
  "a prompt's last page is taken from the cache": _command(
    "report:least_prefilled",
    text("end < length else", "end <= length else"),
    _least([[1, 2], [1, 2, 3]], 1),
  ),
  "a form feed ends a line": _command(
    "prompts:read_lines",
    text('.removesuffix("\\n").split("\\n")', ".splitlines()"),
    _prompt_lines,
  ),
}
