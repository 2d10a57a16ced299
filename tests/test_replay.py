"""The benchmark `replay` against an LRU cache in plain Python."""

import importlib
import json
import pathlib
import random

import pytest

_FOLDER = pathlib.Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def replay(monkeypatch):
  """The module `replay` of the folder of benchmarks."""
  monkeypatch.syspath_prepend(str(_FOLDER))
  return importlib.import_module("replay")


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
    yield 512 * len(prompt) - partial, list(prompt)


def lru(requests, rule, pages):
  """Blocks, hits and evictions of exact LRU, one request at a time.

  Pages are numbers; the hit is the oldest page with the wanted prefix.
  """
  queue = list(range(pages))
  keys = {}
  num_blocks = hits = evicted = 0
  for length, ids in requests:
    cap = len(ids)
    if rule == "full":
      ids = ids[: length // 512]
      cap = max(length - 1, 0) // 512
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
def test_counts_equal_plain_lru(replay, rule, pages):
  requests = list(conversations(700, seed=pages))
  counts = replay.replay(requests, rule, pages)
  expected = lru(requests, rule, min(pages or 5000, 5000))
  assert (counts["blocks"], counts["hits"], counts["evictions"]) == expected
  assert counts["hits"] > 0 and (counts["evictions"] > 0) == (pages in (9, 40))


def test_a_request_with_too_few_ids_is_named(replay, tmp_path):
  path = tmp_path / "trace.jsonl"
  lines = [{"input_length": 512 * n, "hash_ids": [1, 2]} for n in (2, 3)]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  with pytest.raises(ValueError, match=r"line 2: .* tokens of .*1536, got 2\."):
    replay.read_trace(str(path))
