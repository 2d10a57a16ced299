"""A request trace: JSON lines, one request each, prompts as block hashes.

The format of the Mooncake traces (Qin et al., "Mooncake: Trading More Storage
for Less Computation", FAST 2025): `timestamp`, `input_length` and
`output_length` in tokens, and `hash_ids`, one for every 512 tokens of the
prompt; the last block may be partial. An id names a block and all before it.
"""

import dataclasses
import json
import os
from typing import Any

from jaxkv._src.commands.errors import CommandError

BLOCK_TOKENS = 512

_COUNTS = ("timestamp", "input_length", "output_length")


@dataclasses.dataclass(frozen=True)
class TraceRequest:
  """One line of a trace.

  Attributes:
    line: its number, from 1.
    input_length: tokens of the prompt.
    output_length: tokens of the answer.
    hash_ids: ids of its blocks.
  """

  line: int
  input_length: int
  output_length: int
  hash_ids: tuple[int, ...]


def read(path: str | os.PathLike[str]) -> list[TraceRequest]:
  """Reads and checks a whole trace; blank lines are skipped.

  Args:
    path: the file.

  Returns:
    At least one request, in the order of the file.

  Raises:
    CommandError: the file or one of its lines cannot be used.
  """
  try:
    with open(path, "rb") as file:
      lines = file.read().splitlines()
  except OSError as error:
    raise CommandError(f"cannot read {path}: {error.strerror}") from error
  requests = [
    _request(f"{path}, line {number}", number, line)
    for number, line in enumerate(lines, start=1)
    if line.strip()
  ]
  if not requests:
    raise CommandError(f"{path} holds no request")
  return requests


def _request(where: str, number: int, line: bytes) -> TraceRequest:
  record = _record(where, line)
  for key in _COUNTS:
    if not _is_count(record[key]):
      raise CommandError(
        f"{where}: {key} must be a whole number of at least 0, not "
        f"{_shown(record[key])}"
      )
  ids = record["hash_ids"]
  if not isinstance(ids, list):
    raise CommandError(f"{where}: hash_ids must be a list, not {_shown(ids)}")
  for value in ids:
    if not _is_count(value):
      raise CommandError(
        f"{where}: hash_ids must hold whole numbers of at least 0, not "
        f"{_shown(value)}"
      )
  wanted = -(-record["input_length"] // BLOCK_TOKENS)
  if len(ids) != wanted:
    raise CommandError(
      f"{where}: input_length {_shown(record['input_length'])} makes "
      f"{_shown(wanted)} blocks of {BLOCK_TOKENS} tokens, but hash_ids has "
      f"{len(ids)}"
    )
  return TraceRequest(
    line=number,
    input_length=record["input_length"],
    output_length=record["output_length"],
    hash_ids=tuple(ids),
  )


def _record(where: str, line: bytes) -> dict[str, Any]:
  """The JSON object of a line, with all keys present."""
  try:
    record = json.loads(line, object_pairs_hook=_object)
  except _RepeatedKeyError as error:
    raise CommandError(
      f"{where}: {_shown(error.args[0])} stands there twice; keep one"
    ) from error
  except (ValueError, RecursionError) as error:
    reason = str(error).splitlines()[0]
    raise CommandError(f"{where}: not JSON ({reason})") from error
  if not isinstance(record, dict):
    raise CommandError(f"{where}: not a JSON object but {_shown(record)}")
  for key in (*_COUNTS, "hash_ids"):
    if key not in record:
      raise CommandError(f"{where}: {key} is missing")
  return record


class _RepeatedKeyError(Exception):
  """An object has a key twice; the argument is the key."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """A JSON object; Python's parser would keep the last of equal keys."""
  record: dict[str, Any] = {}
  for key, value in pairs:
    if key in record:
      raise _RepeatedKeyError(key)
    record[key] = value
  return record


def _is_count(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _shown(value: Any) -> str:
  """A value as JSON, cut if it is long."""
  text = json.dumps(value)
  return text if len(text) <= 40 else f"{text[:37]}..."
