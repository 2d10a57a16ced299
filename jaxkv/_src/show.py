"""Draws a cache: its slots, pages and free queue."""

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


@dataclasses.dataclass(frozen=True)
class _Look:
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
  """Classifies the pages of the pool.

  Args:
    state: the cache, not traced.

  Returns:
    A word for each of N pages: "null", "free", "cached" (free, but in the
    prefix index), "in use", "shared" (several page-table entries name it), or
    "pinned" (held by `pin` or `touch`).
  """
  held = np.asarray(state.pool.ref_count)
  pinned = np.asarray(state.pool.pin_count) > 0
  cached = set(cached_pages(state))

  def kind(page: int) -> str:
    if page == 0:
      return "null"
    if held[page] == 0:
      return "cached" if page in cached else "free"
    if pinned[page]:
      return "pinned"
    return "shared" if held[page] > 1 else "in use"

  return [kind(page) for page in range(state.config.num_pages)]


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
  """Draws a cache: its slots, its pool of pages and its free queue.

  Each cell is a page with its number. The colour shows the page's kind: in use
  by one sequence, shared by several, pinned, free, or free but still cached. A
  dot marks a page that is in use and cached, which a new sequence can share.
  The row of a slot has the pages of its sequence in order, and the length of
  the sequence in tokens. In a page that is not full, a bar shows the filled
  part. The free queue has free pages in the order in which they will be popped.

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
  if state.config.num_pages > MAX_PAGES:
    raise ValueError(
      f"`state` must have at most {MAX_PAGES} pages, got "
      f"{state.config.num_pages}; use jaxkv.usage and jaxkv.stats for large "
      "pools."
    )
  kinds = page_kinds(state)
  columns = _COLUMNS
  # For a large pool, this makes the pool's grid about twice as wide as high.
  if len(kinds) > _LARGE_POOL:
    columns = 8 * math.ceil(math.sqrt(2 * len(kinds)) / 8)
  drawing = _Drawing(columns=columns, cached=frozenset(cached_pages(state)))
  _draw_title(drawing, title)
  _draw_slots(drawing, state, kinds)
  _draw_pool(drawing, kinds)
  _draw_free_queue(drawing, state, kinds)
  _draw_legend(drawing, kinds)
  summary = _summary(state, kinds, title)
  return Picture(svg=_svg(drawing, summary), summary=summary)


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


class _Cell(NamedTuple):
  """A page to draw. Lengths are in units of the side of a cell in the pool."""

  x: float
  y: float
  width: float
  height: float
  kind: str
  label: str = ""
  dot: bool = False
  filled: float = 1.0


class _Text(NamedTuple):
  """A text to draw; the font size is in units of a cell's height."""

  x: float
  y: float
  text: str
  size: float = 0.36
  anchor: str = "start"
  bold: bool = False
  colour: str = _INK


@dataclasses.dataclass
class _Drawing:
  """The cells and texts to draw; `bottom` is where the next row starts."""

  columns: int
  cached: frozenset[int]
  left: float = _LEFT
  bottom: float = 0.0
  cells: list[_Cell] = dataclasses.field(default_factory=list)
  texts: list[_Text] = dataclasses.field(default_factory=list)

  @property
  def right(self) -> float:
    return self.left + self.columns


def _draw_title(drawing: _Drawing, title: str) -> None:
  if title:
    drawing.texts.append(_Text(0, drawing.bottom + 0.3, title, 0.46, bold=True))
    drawing.bottom += 1.1


def _draw_slots(drawing: _Drawing, state: CacheState, kinds: list[str]) -> None:
  """Draws a row of pages for each group of each slot."""
  config = state.config
  num_pages = np.asarray(state.num_pages)
  widest = max(1, num_pages.max())
  if config.num_groups > 1:
    drawing.left = _GROUPS_LEFT
  slots = range(config.num_slots)
  # With more than _MAX_ROWS slots, draws only the first _MAX_ROWS in use.
  if config.num_slots > _MAX_ROWS:
    slots = np.flatnonzero(num_pages.max(axis=1) > 0).tolist()[:_MAX_ROWS]
  for slot in slots:
    length = int(state.length[slot])
    empty = num_pages[slot].max() == 0
    status = "empty" if empty else f"{length} token{'s' * (length != 1)}"
    middle = drawing.bottom + 0.5
    drawing.texts += [
      _Text(0, middle, f"slot {slot}", bold=True),
      _Text(_LEFT - 0.3, middle, status, anchor="end"),
    ]
    for group in range(config.num_groups):
      _draw_row(drawing, state, kinds, slot, group, widest)
  hidden = config.num_slots - len(slots)
  if hidden:
    drawing.texts.append(
      _Text(0, drawing.bottom + 0.5, f"and {hidden} more slots")
    )
    drawing.bottom += 1.0
  drawing.bottom += 0.6


def _draw_row(
  drawing: _Drawing,
  state: CacheState,
  kinds: list[str],
  slot: int,
  group: int,
  widest: int,
) -> None:
  """Draws the pages of one slot in one layer group."""
  config = state.config
  kind, size = config.groups[group], config.page_sizes[group]
  length, width = int(state.length[slot]), min(1.0, drawing.columns / widest)
  if config.num_groups > 1:
    at = drawing.left - 0.3, drawing.bottom + 0.5
    drawing.texts.append(_Text(*at, f"group {group}", 0.3, anchor="end"))
  pages = np.asarray(state.page_table)[slot, group]
  count = int(state.num_pages[slot, group])
  for column, page in enumerate(pages[:count].tolist()):
    filled = 1.0
    # Recurrent states do not fill by token: they get no bar.
    if not kind.holds_states:
      filled = min(1.0, max(0.0, length / size - column))
    drawing.cells.append(
      _Cell(
        x=drawing.left + column * width,
        y=drawing.bottom,
        width=width,
        height=1.0,
        kind=kinds[page],
        label=str(page) if page else "",
        dot=page in drawing.cached,
        filled=filled,
      )
    )
  drawing.bottom += 1.0


def _draw_pool(drawing: _Drawing, kinds: list[str]) -> None:
  """Draws every page of the pool, by number."""
  drawing.texts.append(_Text(0, drawing.bottom + 0.5, "pool", bold=True))
  _draw_grid(drawing, range(len(kinds)), kinds, 1.0)
  drawing.bottom += 0.6


def _draw_free_queue(
  drawing: _Drawing, state: CacheState, kinds: list[str]
) -> None:
  """Draws the free pages in the order in which they will be popped."""
  free = free_pages(state)
  scale = _QUEUE_SCALE
  drawing.texts += [
    _Text(0, drawing.bottom + 0.5 * scale, "free queue", bold=True),
    _Text(
      drawing.left - 0.3,
      drawing.bottom + 0.5 * scale,
      "next \N{RIGHTWARDS ARROW}",
      anchor="end",
    ),
  ]
  _draw_grid(drawing, free[:_MAX_FREE], kinds, scale)
  note = ""
  if not free:
    note = "empty"
  elif len(free) > _MAX_FREE:
    note = f"and {len(free) - _MAX_FREE} more"
  if note:
    drawing.texts.append(_Text(drawing.left, drawing.bottom - 0.2, note, 0.3))
  drawing.bottom += 0.5


def _draw_grid(
  drawing: _Drawing, pages: Sequence[int], kinds: list[str], scale: float
) -> None:
  """Draws `pages` in order, in rows as wide as the drawing."""
  per_row = int(drawing.columns / scale)
  for position, page in enumerate(pages):
    row, column = divmod(position, per_row)
    drawing.cells.append(
      _Cell(
        x=drawing.left + column * scale,
        y=drawing.bottom + row * scale,
        width=scale,
        height=scale,
        kind=kinds[page],
        label=str(page),
        dot=page in drawing.cached and kinds[page] != "cached",
      )
    )
  drawing.bottom += scale * max(1, math.ceil(len(pages) / per_row))


def _draw_legend(drawing: _Drawing, kinds: list[str]) -> None:
  """Draws the legend of the colours and marks that occur."""
  x = drawing.left
  y = drawing.bottom
  for kind in _LOOKS:
    if kind not in kinds:
      continue
    label = _LOOKS[kind].label
    drawing.cells.append(_Cell(x, y, 0.55, 0.55, kind))
    drawing.texts.append(_Text(x + 0.7, y + 0.275, label, 0.32))
    x += 1.25 + 0.185 * len(label)
  if any(cell.dot for cell in drawing.cells):
    drawing.cells.append(_Cell(x, y, 0.55, 0.55, "in use", dot=True))
    drawing.texts.append(_Text(x + 0.7, y + 0.275, "cached", 0.32))
  drawing.bottom += 0.7


def _svg(drawing: _Drawing, summary: str) -> str:
  """Returns the drawing as an SVG picture."""
  width = drawing.right + 0.2
  height = drawing.bottom + 0.2
  scale = min(_CELL_PIXELS, _MAX_PIXELS / width)
  parts = [part for cell in drawing.cells for part in _cell(cell, scale)]
  for text in drawing.texts + [_label(cell) for cell in drawing.cells]:
    size = text.size * scale
    # Texts too small to read are omitted.
    if text.text and size >= _MIN_FONT_PIXELS:
      parts.append(
        # `dominant-baseline` is not supported by all programs.
        f'<text x="{text.x * scale:.1f}" y="{text.y * scale:.1f}" dy="0.35em"'
        f' font-size="{size:.1f}" fill="{text.colour}"'
        f' text-anchor="{text.anchor}"'
        f"{_BOLD if text.bold else ''}>{html.escape(text.text)}</text>"
      )
  left, top = -0.1 * scale, -0.1 * scale
  return (
    '<svg xmlns="http://www.w3.org/2000/svg"'
    f' width="{width * scale:.0f}" height="{height * scale:.0f}"'
    f' viewBox="{left:.1f} {top:.1f} {width * scale:.1f} {height * scale:.1f}"'
    ' font-family="sans-serif" role="img">'
    f"<title>{html.escape(summary)}</title>{''.join(parts)}</svg>"
  )


def _cell(cell: _Cell, scale: float) -> list[str]:
  """Returns a rounded cell, a bar if the page is partly filled, and a dot."""
  look = _LOOKS[cell.kind]
  gap = 0.04 * cell.height
  x = cell.x + gap
  width = max(cell.width - 2 * gap, 0.02)
  height = cell.height - 2 * gap
  edge = _INK if look.face == "none" else look.face
  radius = 0.16 * min(width, height)
  parts = [
    _rectangle(
      x,
      cell.y + gap,
      width,
      height,
      radius=radius,
      scale=scale,
      face=look.face,
      edge=edge,
    )
  ]
  if cell.filled < 1 and cell.kind != "null":
    lengths = {_BAR: 0.76 * width, _LIGHT: 0.76 * width * cell.filled}
    parts += [
      _rectangle(
        x + 0.12 * width,
        cell.y + 0.76,
        length,
        0.1,
        radius=0.05,
        scale=scale,
        face=face,
      )
      for face, length in lengths.items()
      if length > 0
    ]
  if cell.dot:
    inset = 0.2 * cell.height
    parts.append(
      f'<circle cx="{(cell.x + cell.width - inset) * scale:.1f}"'
      f' cy="{(cell.y + inset) * scale:.1f}"'
      f' r="{0.09 * cell.height * scale:.1f}" fill="{_LIGHT}"/>'
    )
  return parts


def _rectangle(
  x: float,
  y: float,
  width: float,
  height: float,
  *,
  radius: float,
  scale: float,
  face: str,
  edge: str = "none",
) -> str:
  return (
    f'<rect x="{x * scale:.1f}" y="{y * scale:.1f}"'
    f' width="{width * scale:.1f}" height="{height * scale:.1f}"'
    f' rx="{radius * scale:.1f}" fill="{face}" stroke="{edge}"/>'
  )


def _label(cell: _Cell) -> _Text:
  return _Text(
    cell.x + cell.width / 2,
    cell.y + cell.height / 2,
    cell.label,
    size=0.36 * min(cell.height, 1.6 * cell.width),
    anchor="middle",
    colour=_LOOKS[cell.kind].ink,
  )
