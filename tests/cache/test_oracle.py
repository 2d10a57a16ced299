"""The oracle's lookup against that of the reference systems.

One says what a hit is, the other how they look for it. Not for windows of one
token: they ask the reference systems for a page that nobody looks at.
"""

import random

import pytest

from jaxkv import CacheConfig
from jaxkv import ChunkedLocal
from jaxkv import FullAttention
from jaxkv import SlidingWindow
from tests.model_of_the_cache.oracle_groups import groups_of
from tests.model_of_the_cache.oracle_lookup import longest_prefix
from tests.model_of_the_cache.reference_lookup import longest_hit

SLOT = 24


class Pages:
  """Cached pages by group and column; a key is how many tokens it covers."""

  def __init__(self, groups, share: float, draw: random.Random):
    self.groups = groups
    self.cached = {
      (number, column): 1 + number * SLOT + column
      for number, group in enumerate(groups)
      for column in range(SLOT // group.size)
      if draw.random() < share
    }

  def find(self, key: tuple[int, int]) -> int | None:
    """The page that the reference asks for."""
    number, tokens = key
    return self.cached.get((number, tokens // self.groups[number].size - 1))


def both(config: CacheConfig, draw: random.Random) -> tuple[tuple, tuple]:
  """Tokens and junctions that oracle and reference find in random pages."""
  groups = groups_of(config)
  pages = Pages(groups, draw.choice([0.6, 0.8, 0.95]), draw)
  length, size = draw.randint(1, SLOT), config.page_size
  hit = longest_hit(
    [group.kind for group in groups],
    list(range(size, length + 1, size)),
    length - 1,
    pages,
    groups[0].rules(),
  )
  wanted, junction = hit.tokens, hit.junction
  # A hit of which no page is needed is none for jaxkv.
  if all(g.skipped_pages(wanted) == g.full_pages(wanted) for g in groups):
    wanted = 0
    junction = junction or hit.tokens
  found = longest_prefix(groups, lambda *place: place in pages.cached, length)
  return found, (wanted, junction)


def drawn_config(kinds, sizes, draw, **options) -> CacheConfig:
  """One to three groups."""
  groups = tuple(
    draw.choice(kinds)(draw.choice(sizes)) for _ in range(draw.randint(1, 3))
  )
  return CacheConfig(
    num_pages=2,
    page_size=2,
    num_slots=1,
    pages_per_slot=SLOT // 2,
    groups=groups,
    **options,
  )


FULL = [lambda size: FullAttention(page_size=size)]
WINDOWS = [
  lambda size, window=window: SlidingWindow(window, page_size=size)
  for window in (2, 3, 4, 5, 7, 9, 30)
]
CHUNKS = [lambda size: ChunkedLocal(4, page_size=size)]


CASES = {
  "windows": (FULL + FULL + WINDOWS, (2, 4, 6), {}),
  "a draft model": (FULL + FULL + WINDOWS, (2, 4, 6), {"draft_model": True}),
  "classic": (
    FULL + FULL + WINDOWS,
    (2,),
    {"draft_model": True, "classic": True},
  ),
  # Of whole pages, all of one size: the text says nothing about others.
  "chunks": (FULL + CHUNKS, (2,), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_finds_as_much_as_the_reference(name):
  kinds, sizes, options = CASES[name]
  draw = random.Random(0)
  hits = 0
  for _ in range(3000):
    config = drawn_config(kinds, sizes, draw, **options)
    found, wanted = both(config, draw)
    if config.classic:  # It knows of no junction.
      found, wanted = found[:1], wanted[:1]
    assert found == wanted, config
    hits += found[0] > 0
  assert hits > 300
