"""The replay command against an LRU cache in plain Python, and bad input."""

import argparse
import json
import os
import random

import pytest

from jaxkv._src.commands import replay
from jaxkv._src.commands.output import CommandError

KEYS = [
  "requests",
  "blocks",
  "hit_blocks",
  "hit_rate",
  "evicted",
  "seconds",
  "us_per_request",
]


def arguments(*words):
  parser = argparse.ArgumentParser()
  replay.add_arguments(parser)
  return parser.parse_args([str(word) for word in words])


def line(input_length, hash_ids, **changes):
  record = {
    "timestamp": 0,
    "input_length": input_length,
    "output_length": 3,
    "hash_ids": hash_ids,
  }
  return {**record, **changes}


def written(path, lines):
  path.write_text("".join(json.dumps(request) + "\n" for request in lines))
  return path


def conversations(count, seed):
  """Requests that branch off one another, enough for several spans."""
  rng = random.Random(seed)
  ids = {}
  prompts = [()]
  for _ in range(count):
    prefix = rng.choice(prompts[-30:])
    prefix = prefix[: rng.randint(0, len(prefix))]
    # Wider than 32 bits, and only two choices, so that prompts coincide.
    for _ in range(rng.randint(0, 4)):
      chosen = (*prefix, rng.randint(0, 1))
      prefix = (*prefix, ids.setdefault(chosen, 2**40 + len(ids)))
    prompts.append(prefix[:9])
  for prompt in prompts:
    # The last block is full at every other request.
    partial = rng.choice((0, rng.randint(1, 511))) if prompt else 0
    yield line(512 * len(prompt) - partial, list(prompt))


def blocks_and_cap(request, rule):
  length, ids = request["input_length"], request["hash_ids"]
  if rule == "all":
    return ids, len(ids)
  return ids[: length // 512], max(length - 1, 0) // 512


def lru(requests, rule, pages):
  """Blocks, hits and evictions of exact LRU, one request at a time.

  Pages are numbers; the hit is the oldest page with the wanted prefix.
  """
  queue = list(range(pages))
  keys = {}
  num_blocks = hits = evicted = 0
  for request in requests:
    ids, cap = blocks_and_cap(request, rule)
    prefixes = [tuple(ids[: i + 1]) for i in range(len(ids))]
    held_pages = []
    for prefix in prefixes[:cap]:
      page = next((p for p, key in keys.items() if key == prefix), None)
      if page is None:
        break
      queue.remove(page)
      held_pages.append(page)
    num_hits = len(held_pages)
    for _ in prefixes[num_hits:]:
      page = queue.pop(0)
      evicted += keys.pop(page, None) is not None
      held_pages.append(page)
    keys.update(zip(held_pages[num_hits:], prefixes[num_hits:], strict=True))
    queue.extend(reversed(held_pages))
    num_blocks = num_blocks + len(ids)
    hits = hits + num_hits
  return num_blocks, hits, evicted


@pytest.mark.slow
@pytest.mark.parametrize(
  ("rule", "pages"),
  [
    ("full", 9),
    ("all", 10**12),
    pytest.param("full", 0, marks=pytest.mark.deep),
    pytest.param("all", 40, marks=pytest.mark.deep),
  ],
)
def test_counts_equal_plain_lru(tmp_path, capsys, rule, pages):
  requests = list(conversations(700, seed=pages))
  path = written(tmp_path / "trace.jsonl", requests)
  out = tmp_path / "out.json"
  words = (path, "--pages", pages, "--rule", rule, "--json", out)
  assert replay.run(arguments(*words)) == 0
  result = json.loads(out.read_text())
  assert list(result) == KEYS
  num_blocks, hits, evicted = lru(requests, rule, min(pages or 5000, 5000))
  assert (result["blocks"], result["hit_blocks"]) == (num_blocks, hits)
  assert result["evicted"] == evicted
  assert result["hit_rate"] == hits / num_blocks
  assert result["requests"] == len(requests)
  assert result["seconds"] > 0
  assert hits > 0 and (evicted > 0) == (pages in (9, 40))
  assert f"{hits:,}" in capsys.readouterr().out
  assert sorted(os.listdir(tmp_path)) == ["out.json", "trace.jsonl"]


@pytest.mark.slow
def test_a_trace_without_any_full_block(tmp_path):
  path = written(tmp_path / "trace.jsonl", [line(0, []), line(5, [7])])
  out = tmp_path / "out.json"
  replay.run(arguments(path, "--pages", 1, "--json", out))
  result = json.loads(out.read_text())
  assert [result[key] for key in KEYS[:5]] == [2, 0, 0, 0, 0]


@pytest.mark.slow
def test_equal_ids_after_different_blocks_are_different_blocks(tmp_path):
  """They are different blocks, and without a limit all of them stay cached."""
  lines = [line(1024, [first_id, 9]) for first_id in (1, 2, 3, 1, 2, 3)]
  path = written(tmp_path / "trace.jsonl", lines)
  out = tmp_path / "out.json"
  replay.run(arguments(path, "--pages", 0, "--rule", "all", "--json", out))
  result = json.loads(out.read_text())
  assert (result["hit_blocks"], result["evicted"]) == (6, 0)


GOOD = json.dumps(line(600, [1, 2]))
BAD_LINES = {
  "not JSON": ["{", "line 2", "not JSON"],
  "not text": [b"\xff\xfe\xff", "not UTF-8", "byte"],
  "not an object": ["[1, 2]", "line 2", "object"],
  "a control character": [GOOD[:9] + "\0" + GOOD[9:], "line 2", "not JSON"],
  "no output_length": ['{"input_length": 1}', "line 2", "output_length"],
  "no hash_ids": [
    '{"timestamp": 1, "input_length": 1, "output_length": 1}',
    "line 2",
    "hash_ids",
  ],
  "negative": [json.dumps(line(-1, [])), "line 2", "input_length"],
  "negative output": [
    json.dumps(line(1, [1], output_length=-4)),
    "line 2",
    "output_length",
  ],
  "a fraction": [json.dumps(line(600.5, [1, 2])), "line 2", "whole number"],
  "a boolean": [json.dumps(line(True, [1])), "line 2", "whole number"],
  "ids of text": [json.dumps(line(1, ["a"])), "line 2", "hash_ids"],
  "negative id": [json.dumps(line(1, [-3])), "line 2", "hash_ids"],
  "ids not a list": [json.dumps(line(1, 3)), "line 2", "hash_ids"],
  "too few ids": [json.dumps(line(513, [1])), "line 2", "513"],
  "too many ids": [json.dumps(line(512, [1, 2])), "line 2", "512"],
  "too wide": [json.dumps(line(2048, [1, 2, 3, 4])), "line 2", "4 pages"],
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named_and_nothing_is_written(tmp_path, case):
  text, *words = BAD_LINES[case]
  bad = text if isinstance(text, bytes) else text.encode()
  path = tmp_path / "trace.jsonl"
  path.write_bytes(GOOD.encode() + b"\n" + bad + b"\n")
  out = tmp_path / "out.json"
  with pytest.raises(CommandError) as caught:
    replay.run(arguments(path, "--pages", 3, "--json", out))
  message = str(caught.value)
  assert all(word in message for word in words), message
  assert len(message.splitlines()) == 1
  assert os.listdir(tmp_path) == ["trace.jsonl"]


def test_line_numbers_count_blank_lines(tmp_path):
  path = tmp_path / "trace.jsonl"
  path.write_text(f"{GOOD}\n\n\n{{\n")
  with pytest.raises(CommandError, match="line 4"):
    replay.run(arguments(path, "--pages", 3))


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (("missing.jsonl", "--pages", 3), "No such file"),
    ((".", "--pages", 3), "directory"),
    (("empty.jsonl", "--pages", 3), "no request"),
    (("blank.jsonl", "--pages", 3), "no request"),
    (("good.jsonl", "--pages", 1, "--rule", "all"), "2 pages"),
    (("good.jsonl", "--pages", 3, "--json", "no/out.json"), "missing"),
    (("good.jsonl", "--pages", 3, "--json", "."), "regular"),
    (("good.jsonl", "--pages", 3, "--json", "good.jsonl"), "reads it"),
  ],
)
def test_bad_files_and_sizes_are_refused(tmp_path, monkeypatch, words, message):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "good.jsonl").write_text(GOOD)
  (tmp_path / "empty.jsonl").write_text("")
  (tmp_path / "blank.jsonl").write_text("\n  \n")
  with pytest.raises(CommandError, match=message) as caught:
    replay.run(arguments(*words))
  assert len(str(caught.value).splitlines()) == 1
  assert len(os.listdir(tmp_path)) == 3
  assert (tmp_path / "good.jsonl").read_text() == GOOD
