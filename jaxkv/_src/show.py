"""Draws a cache: its slots, and the pages and the free queue of each pool."""

import dataclasses
import html
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.core
import numpy as np

from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import check_single
from jaxkv._src.cache.verbs.inspect import cached_pages
from jaxkv._src.cache.verbs.inspect import free_pages

# A picture of more pages would be unreadable, and slow to draw.
MAX_PAGES = 4096
_MAX_ROWS = 32
_MAX_FREE = 256
_COLUMNS, _LARGE_POOL = 16, 512
_LEFT, _GROUPS_LEFT = 4.4, 6.4
_QUEUE_SCALE = 0.7
# The side of a cell, and the largest width of a picture, in pixels.
_CELL_PIXELS, _MAX_PIXELS = 40.0, 1340.0
_MIN_FONT_PIXELS = 4.0
# The background is transparent. This grey is readable on black and on white.
_INK = "#7d8590"
_DARK, _LIGHT = "#24292f", "#ffffff"
_BAR = "#00000048"
_BOLD = ' font-weight="bold"'


class _Look(NamedTuple):
  """The label and the colours of one kind of page."""

  label: str
  face: str
  ink: str


# The colours stay distinct for readers who cannot see red or green.
_LOOKS = {
  "in use": _Look("in use", "#4a86c8", _LIGHT),
  "shared": _Look("shared", "#d9662f", _LIGHT),
  "pinned": _Look("pinned", "#1f8f6d", _LIGHT),
  "cached": _Look("free, cached", "#f2d36b", _DARK),
  "free": _Look("free", "#ced4dc", _DARK),
  "null": _Look("null page", "none", _INK),
}


def page_kinds(state: CacheState) -> list[str]:
  """Returns the kind of each of N pages, a key of `_LOOKS`.

  A page is "cached" if it is free and in the prefix index, "shared" if several
  page-table entries name it, and "pinned" if `pin` or `touch` holds it. The
  first page of each pool, which no sequence can get, counts as "null".
  """
  held = np.asarray(state.pool.ref_count)
  pinned = np.asarray(state.pool.pin_count) > 0
  cached = set(cached_pages(state))
  first_pages = state.config.numbers.first_pages

  def kind(page: int) -> str:
    if page in first_pages:
      return "null"
    if held[page] == 0:
      return "cached" if page in cached else "free"
    if pinned[page]:
      return "pinned"
    return "shared" if held[page] > 1 else "in use"

  return [kind(page) for page in range(state.config.total_pages)]


@dataclasses.dataclass(frozen=True)
class Picture:
  """A picture of a cache, which a notebook shows.

  Attributes:
    svg: the picture as the text of an SVG file.
    summary: the same in one line of text.
  """

  svg: str
  summary: str

  def _repr_svg_(self) -> str:
    return self.svg

  def __repr__(self) -> str:
    return self.summary


def show(state: CacheState, *, title: str = "") -> Picture:
  """Draws a cache: its slots, its pools of pages and their free queues.

  Each cell is a page with its number. The colour shows the page's kind: in use
  by one sequence, shared by several, pinned, free, or free but still cached. A
  dot marks a page that is in use and cached, which a new sequence can share.
  The row of a slot has the pages of its sequence in order, and the length of
  the sequence in tokens. In a page that is not full, a bar shows the filled
  part. A free queue has free pages in the order in which they will be popped.
  With several pools, each pool is drawn, with its first page as a null page.

  Call the function outside `jit`, because it draws on the host.

  Args:
    state: one cache of at most 4,096 pages.
    title: a line above the picture; empty for none.

  Returns:
    The drawing. A notebook shows it if it is the last expression of a cell.
    `pathlib.Path("cache.svg").write_text(drawing.svg)` writes it to a file.

  Raises:
    TypeError: `state` is not a CacheState, or it is traced.
    ValueError: `state` is a stack, was donated, or has too large a pool.

  Examples:
    >>> import jaxkv
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=8, page_size=4, num_slots=2, pages_per_slot=4
    ... )
    >>> state, _ = jaxkv.allocate(jaxkv.init(config), [6, 0])
    >>> jaxkv.show(state, title="An allocation")
    An allocation: slot 0 has 2 pages; 2 pages in use, 5 free
  """
  check_single(state)
  if isinstance(state.length, jax.core.Tracer):
    raise TypeError(
      "`state` must hold values, got a traced state; call jaxkv.show outside "
      "jit."
    )
  if state.config.total_pages > MAX_PAGES:
    raise ValueError(
      f"`state` must have at most {MAX_PAGES} pages, got "
      f"{state.config.total_pages}; use jaxkv.usage and jaxkv.stats for large "
      "pools."
    )
  kinds = page_kinds(state)
  summary = _summary(state, kinds, title)
  drawing = _Drawing(state, kinds)
  if title:
    drawing.text(0, 0.3, title, 0.46, bold=True)
    drawing.bottom += 1.1
  drawing.draw_slots()
  for pool in range(state.config.num_pools):
    drawing.draw_pool(pool)
    drawing.draw_free_queue(pool)
  drawing.draw_legend()
  return Picture(svg=drawing.svg(summary), summary=summary)


def _summary(state: CacheState, kinds: list[str], title: str) -> str:
  """Describes the cache in one line, for readers who do not see the drawing."""
  slots = []
  for slot, num_pages in enumerate(np.asarray(state.num_pages).max(axis=1)):
    if num_pages:
      plural = "s" * int(num_pages > 1)
      slots.append(f"slot {slot} has {num_pages} page{plural}")
  if len(slots) > _MAX_ROWS:
    slots = [f"{len(slots)} slots have pages"]
  counts = [
    f"{kinds.count(kind)} {kind}"
    for kind in _LOOKS
    if kind != "null" and kind in kinds
  ]
  if counts:
    number, label = counts[0].split(maxsplit=1)
    counts[0] = f"{number} page{'s' * (number != '1')} {label}"
  text = "; ".join(filter(None, (", ".join(slots), ", ".join(counts))))
  return f"{title}: {text}" if title else text


class _Drawing:
  """A picture of a cache in SVG; `bottom` is where its next row starts.

  Lengths are in units of the side of a cell in the pool.
  """

  def __init__(self, state: CacheState, kinds: list[str]):
    self.state = state
    self.kinds = kinds
    self.cached = frozenset(cached_pages(state))
    self.columns = _COLUMNS
    # For a large pool, this makes the pool's grid about twice as wide as high.
    if len(kinds) > _LARGE_POOL:
      self.columns = 8 * math.ceil(math.sqrt(2 * len(kinds)) / 8)
    self.left = _LEFT if state.config.num_groups == 1 else _GROUPS_LEFT
    self.width = self.left + self.columns + 0.2
    self.scale = min(_CELL_PIXELS, _MAX_PIXELS / self.width)
    self.bottom = 0.0
    self.has_dots = False
    self.parts: list[str] = []

  def draw_slots(self) -> None:
    """Draws a row of pages for each group of each slot."""
    config = self.state.config
    num_pages = np.asarray(self.state.num_pages)
    width = min(1.0, self.columns / num_pages.max(initial=1))
    slots = range(config.num_slots)
    # With more than _MAX_ROWS slots, draws only the first _MAX_ROWS in use.
    if config.num_slots > _MAX_ROWS:
      slots = np.flatnonzero(num_pages.max(axis=1) > 0).tolist()[:_MAX_ROWS]
    for slot in slots:
      length = int(self.state.length[slot])
      is_empty = num_pages[slot].max() == 0
      status = "empty" if is_empty else f"{length} token{'s' * (length != 1)}"
      self.text(0, self.bottom + 0.5, f"slot {slot}", bold=True)
      self.text(_LEFT - 0.3, self.bottom + 0.5, status, anchor="end")
      for group in range(config.num_groups):
        self.draw_row(slot, group, length, width)
    num_hidden = config.num_slots - len(slots)
    if num_hidden:
      self.text(0, self.bottom + 0.5, f"and {num_hidden} more slots")
      self.bottom += 1.0
    self.bottom += 0.6

  def draw_row(self, slot: int, group: int, length: int, width: float) -> None:
    """Draws the pages of one slot in one layer group."""
    config = self.state.config
    if config.num_groups > 1:
      y = self.bottom + 0.5
      self.text(self.left - 0.3, y, f"group {group}", 0.3, anchor="end")
    num_pages = int(self.state.num_pages[slot, group])
    pages = np.asarray(self.state.page_table)[slot, group, :num_pages]
    for column, page in enumerate(pages.tolist()):
      filled = 1.0
      # Recurrent states do not fill by token: they get no bar.
      if not config.groups[group].holds_states:
        filled = min(1.0, max(0.0, length / config.page_sizes[group] - column))
      self.cell(
        self.left + column * width,
        self.bottom,
        self.kinds[page],
        width=width,
        label=str(page) if page else "",
        has_dot=page in self.cached,
        filled=filled,
      )
    self.bottom += 1.0

  def draw_pool(self, pool: int) -> None:
    """Draws every page of a pool, by number."""
    numbers = self.state.config.numbers
    name = "pool" if numbers.num_pools == 1 else f"pool {pool}"
    self.text(0, self.bottom + 0.5, name, bold=True)
    first_page = numbers.first_pages[pool]
    pages = range(first_page, first_page + numbers.sizes[pool])
    self.draw_grid(pages, 1.0)
    self.bottom += 0.6

  def draw_free_queue(self, pool: int) -> None:
    """Draws a pool's free pages in the order in which they will be popped."""
    pages = free_pages(self.state, pool=pool)
    y = self.bottom + 0.5 * _QUEUE_SCALE
    arrow = "next \N{RIGHTWARDS ARROW}"
    self.text(0, y, "free queue", bold=True)
    self.text(self.left - 0.3, y, arrow, anchor="end")
    self.draw_grid(pages[:_MAX_FREE], _QUEUE_SCALE)
    if not pages:
      self.text(self.left, y, "empty", 0.3)
    num_more = len(pages) - _MAX_FREE
    if num_more > 0:
      self.text(self.left, self.bottom + 0.2, f"and {num_more} more", 0.3)
    self.bottom += 0.5

  def draw_grid(self, pages: Sequence[int], scale: float) -> None:
    """Draws `pages` in order, in rows as wide as the drawing."""
    num_columns = int(self.columns / scale)
    for position, page in enumerate(pages):
      row, column = divmod(position, num_columns)
      self.cell(
        self.left + column * scale,
        self.bottom + row * scale,
        self.kinds[page],
        width=scale,
        height=scale,
        label=str(page),
        has_dot=page in self.cached and self.kinds[page] != "cached",
      )
    self.bottom += scale * max(1, math.ceil(len(pages) / num_columns))

  def draw_legend(self) -> None:
    """Draws the legend of the colours and marks that occur."""
    entries = [
      (kind, look.label, False)
      for kind, look in _LOOKS.items()
      if kind in self.kinds
    ]
    if self.has_dots:
      entries.append(("in use", "cached", True))
    x = self.left
    for kind, label, has_dot in entries:
      self.cell(x, self.bottom, kind, width=0.55, height=0.55, has_dot=has_dot)
      self.text(x + 0.7, self.bottom + 0.275, label, 0.32)
      x += 1.25 + 0.185 * len(label)
    self.bottom += 0.7

  def cell(
    self,
    x: float,
    y: float,
    kind: str,
    *,
    width: float,
    height: float = 1.0,
    label: str = "",
    has_dot: bool = False,
    filled: float = 1.0,
  ) -> None:
    """Draws a rounded cell, a bar if the page is partly filled, and a dot."""
    look = _LOOKS[kind]
    gap = 0.04 * height
    inner_width = max(width - 2 * gap, 0.02)
    inner_height = height - 2 * gap
    self.rectangle(
      x + gap,
      y + gap,
      inner_width,
      inner_height,
      radius=0.16 * min(inner_width, inner_height),
      face=look.face,
      edge=_INK if look.face == "none" else look.face,
    )
    if filled < 1 and kind != "null":
      for face, part in ((_BAR, 1.0), (_LIGHT, filled)):
        self.rectangle(
          x + gap + 0.12 * inner_width,
          y + 0.76,
          0.76 * inner_width * part,
          0.1,
          radius=0.05,
          face=face,
        )
    if has_dot:
      self.has_dots = True
      inset = 0.2 * height
      self.parts.append(
        f'<circle cx="{(x + width - inset) * self.scale:.1f}"'
        f' cy="{(y + inset) * self.scale:.1f}"'
        f' r="{0.09 * height * self.scale:.1f}" fill="{_LIGHT}"/>'
      )
    self.text(
      x + width / 2,
      y + height / 2,
      label,
      0.36 * min(height, 1.6 * width),
      anchor="middle",
      colour=look.ink,
    )

  def rectangle(
    self,
    x: float,
    y: float,
    width: float,
    height: float,
    *,
    radius: float,
    face: str,
    edge: str = "none",
  ) -> None:
    """Draws a rounded rectangle."""
    scale = self.scale
    self.parts.append(
      f'<rect x="{x * scale:.1f}" y="{y * scale:.1f}"'
      f' width="{width * scale:.1f}" height="{height * scale:.1f}"'
      f' rx="{radius * scale:.1f}" fill="{face}" stroke="{edge}"/>'
    )

  def text(
    self,
    x: float,
    y: float,
    text: str,
    size: float = 0.36,
    *,
    anchor: str = "start",
    bold: bool = False,
    colour: str = _INK,
  ) -> None:
    """Draws a text around height `y`, unless it is too small to read."""
    font_pixels = size * self.scale
    if text and font_pixels >= _MIN_FONT_PIXELS:
      self.parts.append(
        # `dominant-baseline` is not supported by all programs.
        f'<text x="{x * self.scale:.1f}" y="{y * self.scale:.1f}" dy="0.35em"'
        f' font-size="{font_pixels:.1f}" fill="{colour}"'
        f' text-anchor="{anchor}"'
        f"{_BOLD if bold else ''}>{html.escape(text)}</text>"
      )

  def svg(self, summary: str) -> str:
    """Returns the picture as the text of an SVG file."""
    margin = -0.1 * self.scale
    width = self.width * self.scale
    height = (self.bottom + 0.2) * self.scale
    return (
      '<svg xmlns="http://www.w3.org/2000/svg"'
      f' width="{width:.0f}" height="{height:.0f}"'
      f' viewBox="{margin:.1f} {margin:.1f} {width:.1f} {height:.1f}"'
      ' font-family="sans-serif" role="img">'
      f"<title>{html.escape(summary)}</title>{''.join(self.parts)}</svg>"
    )
