"""Draws a cache: its slots, pages and free queue."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import NamedTuple

import jax
import jax.core
import numpy as np

from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import check_single
from jaxkv._src.cache.verbs.inspect import cached_pages
from jaxkv._src.cache.verbs.inspect import free_pages
from jaxkv._src.extras import extra_package

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure
  from matplotlib.patches import FancyBboxPatch

# A picture of more pages would be unreadable, and slow to draw.
MAX_PAGES = 4096
_MAX_ROWS = 32
_MAX_FREE = 256
_COLUMNS, _LARGE_POOL = 16, 512
_LEFT, _GROUPS_LEFT = 4.4, 6.4
_QUEUE_SCALE = 0.7
_CELL_INCHES, _FIGURE_INCHES = 0.42, 14.0
_LEAST_POINTS = 3.0
# The background is transparent. This grey is readable on black and on white.
_INK = "#7d8590"
_DARK, _LIGHT = "#24292f", "#ffffff"


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


def show(
  state: CacheState, *, title: str = "", ax: "Axes | None" = None
) -> "Figure":
  """Draws a cache: its slots, its pool of pages and its free queue.

  Each cell is a page with its number. The colour shows the page's kind: in use
  by one sequence, shared by several, pinned, free, or free but still cached. A
  dot marks a page that is in use and cached, which a new sequence can share.
  The row of a slot has the pages of its sequence in order, and the length of
  the sequence in tokens. In a page that is not full, a bar shows the filled
  part. The free queue has free pages in the order in which they will be popped.

  A new figure does not belong to pyplot: a notebook displays it only if it is
  the last expression of a cell, and `figure.savefig` writes it to a file. Call
  the function outside `jit`, because it draws on the host. Needs matplotlib.

  Args:
    state: one cache of at most 4,096 pages.
    title: a line above the picture; empty for none.
    ax: the matplotlib axes to draw in; None for a new figure.

  Returns:
    The new figure, or the figure of `ax`.

  Raises:
    ImportError: matplotlib is not installed.
    TypeError: `state` is not a CacheState, or it is traced.
    ValueError: `state` is a stack, was donated, or has too large a pool.
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
  # Notebooks display figures only if pyplot was imported.
  extra_package(
    "matplotlib.pyplot", install="jaxkv[plots]", task="To draw a cache"
  )
  kinds = page_kinds(state)
  columns = _COLUMNS
  # For a large pool, this makes the pool's grid about twice as wide as high.
  if len(kinds) > _LARGE_POOL:
    columns = 8 * math.ceil(math.sqrt(2 * len(kinds)) / 8)
  picture = _Picture(columns=columns, cached=frozenset(cached_pages(state)))
  _draw_title(picture, title)
  _draw_slots(picture, state, kinds)
  _draw_pool(picture, kinds)
  _draw_free_queue(picture, state, kinds)
  _draw_legend(picture, kinds)
  return _render(picture, ax)


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
  align: str = "left"
  bold: bool = False
  colour: str = _INK


@dataclasses.dataclass
class _Picture:
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


def _draw_title(picture: _Picture, title: str) -> None:
  if title:
    picture.texts.append(_Text(0, picture.bottom + 0.3, title, 0.46, bold=True))
    picture.bottom += 1.1


def _draw_slots(picture: _Picture, state: CacheState, kinds: list[str]) -> None:
  """Draws a row of pages for each group of each slot."""
  config = state.config
  num_pages = np.asarray(state.num_pages)
  widest = max(1, num_pages.max())
  if config.num_groups > 1:
    picture.left = _GROUPS_LEFT
  slots = range(config.num_slots)
  # With more than _MAX_ROWS slots, draws only the first _MAX_ROWS in use.
  if config.num_slots > _MAX_ROWS:
    slots = np.flatnonzero(num_pages.max(axis=1) > 0).tolist()[:_MAX_ROWS]
  for slot in slots:
    length = int(state.length[slot])
    empty = num_pages[slot].max() == 0
    status = "empty" if empty else f"{length} token{'s' * (length != 1)}"
    middle = picture.bottom + 0.5
    picture.texts += [
      _Text(0, middle, f"slot {slot}", bold=True),
      _Text(_LEFT - 0.3, middle, status, align="right"),
    ]
    for group in range(config.num_groups):
      _draw_row(picture, state, kinds, slot, group, widest)
  hidden = config.num_slots - len(slots)
  if hidden:
    picture.texts.append(
      _Text(0, picture.bottom + 0.5, f"and {hidden} more slots")
    )
    picture.bottom += 1.0
  picture.bottom += 0.6


def _draw_row(
  picture: _Picture,
  state: CacheState,
  kinds: list[str],
  slot: int,
  group: int,
  widest: int,
) -> None:
  """Draws the pages of one slot in one layer group."""
  config = state.config
  kind, size = config.groups[group], config.page_sizes[group]
  length, width = int(state.length[slot]), min(1.0, picture.columns / widest)
  if config.num_groups > 1:
    at = picture.left - 0.3, picture.bottom + 0.5
    picture.texts.append(_Text(*at, f"group {group}", 0.3, align="right"))
  pages = np.asarray(state.page_table)[slot, group]
  count = int(state.num_pages[slot, group])
  for column, page in enumerate(pages[:count].tolist()):
    filled = 1.0
    # Recurrent states do not fill by token: they get no bar.
    if not kind.holds_states:
      filled = min(1.0, max(0.0, length / size - column))
    picture.cells.append(
      _Cell(
        x=picture.left + column * width,
        y=picture.bottom,
        width=width,
        height=1.0,
        kind=kinds[page],
        label=str(page) if page else "",
        dot=page in picture.cached,
        filled=filled,
      )
    )
  picture.bottom += 1.0


def _draw_pool(picture: _Picture, kinds: list[str]) -> None:
  """Draws every page of the pool, by number."""
  picture.texts.append(_Text(0, picture.bottom + 0.5, "pool", bold=True))
  _draw_grid(picture, range(len(kinds)), kinds, 1.0)
  picture.bottom += 0.6


def _draw_free_queue(
  picture: _Picture, state: CacheState, kinds: list[str]
) -> None:
  """Draws the free pages in the order in which they will be popped."""
  free = free_pages(state)
  scale = _QUEUE_SCALE
  picture.texts += [
    _Text(0, picture.bottom + 0.5 * scale, "free queue", bold=True),
    _Text(
      picture.left - 0.3,
      picture.bottom + 0.5 * scale,
      "next \N{RIGHTWARDS ARROW}",
      align="right",
    ),
  ]
  _draw_grid(picture, free[:_MAX_FREE], kinds, scale)
  note = ""
  if not free:
    note = "empty"
  elif len(free) > _MAX_FREE:
    note = f"and {len(free) - _MAX_FREE} more"
  if note:
    picture.texts.append(_Text(picture.left, picture.bottom - 0.2, note, 0.3))
  picture.bottom += 0.5


def _draw_grid(
  picture: _Picture, pages: Sequence[int], kinds: list[str], scale: float
) -> None:
  """Draws `pages` in order, in rows as wide as the picture."""
  per_row = int(picture.columns / scale)
  for position, page in enumerate(pages):
    row, column = divmod(position, per_row)
    picture.cells.append(
      _Cell(
        x=picture.left + column * scale,
        y=picture.bottom + row * scale,
        width=scale,
        height=scale,
        kind=kinds[page],
        label=str(page),
        dot=page in picture.cached and kinds[page] != "cached",
      )
    )
  picture.bottom += scale * max(1, math.ceil(len(pages) / per_row))


def _draw_legend(picture: _Picture, kinds: list[str]) -> None:
  """Draws the legend of the colours and marks that occur."""
  x = picture.left
  y = picture.bottom
  for kind in _LOOKS:
    if kind not in kinds:
      continue
    label = _LOOKS[kind].label
    picture.cells.append(_Cell(x, y, 0.55, 0.55, kind))
    picture.texts.append(_Text(x + 0.7, y + 0.275, label, 0.32))
    x += 1.25 + 0.185 * len(label)
  if any(cell.dot for cell in picture.cells):
    picture.cells.append(_Cell(x, y, 0.55, 0.55, "in use", dot=True))
    picture.texts.append(_Text(x + 0.7, y + 0.275, "cached", 0.32))
  picture.bottom += 0.7


def _render(picture: _Picture, ax: "Axes | None") -> "Figure":
  """Draws the picture, scaled to fit the axes or a new figure."""
  # Imported here, because matplotlib is optional.
  from matplotlib.collections import PatchCollection
  from matplotlib.figure import Figure

  width, height = picture.right + 0.2, picture.bottom + 0.2
  if ax is None:
    inches = min(_CELL_INCHES, _FIGURE_INCHES / width)
    figure = Figure((width * inches, height * inches), facecolor="none")
    ax = figure.add_axes((0, 0, 1, 1))
  ax.set(xlim=(-0.1, width - 0.1), ylim=(height - 0.1, -0.1), aspect="equal")
  ax.axis("off")
  # The root figure, also of a subfigure; before matplotlib 3.10, `get_figure`
  # has no argument `root`.
  figure = ax.figure.figure
  box = ax.get_window_extent()
  # The height of a cell in points, which scales texts and dots.
  points = 72 / figure.dpi * min(box.width / width, box.height / height)

  # One collection, because matplotlib draws thousands of artists slowly.
  patches = [patch for cell in picture.cells for patch in _patches(cell)]
  ax.add_collection(
    PatchCollection(patches, match_original=True, clip_on=False)
  )
  for height in {cell.height for cell in picture.cells if cell.dot}:
    dots = [c for c in picture.cells if c.dot and c.height == height]
    ax.plot(
      [cell.x + cell.width - 0.2 * height for cell in dots],
      [cell.y + 0.2 * height for cell in dots],
      "o",
      color=_LIGHT,
      markersize=0.18 * height * points,
      markeredgewidth=0,
      clip_on=False,
    )
  for text in picture.texts + [_label(cell) for cell in picture.cells]:
    size = text.size * points
    # Texts too small to read are omitted.
    if not text.text or size < _LEAST_POINTS:
      continue
    ax.text(
      text.x,
      text.y,
      text.text,
      color=text.colour,
      size=size,
      ha=text.align,
      va="center_baseline",
      weight="bold" if text.bold else "normal",
    )
  return figure


def _patches(cell: _Cell) -> "list[FancyBboxPatch]":
  """Returns a rounded cell and, for a partly filled page, a bar."""
  look, gap = _LOOKS[cell.kind], 0.04 * cell.height
  x, width = cell.x + gap, max(cell.width - 2 * gap, 0.02)
  edge = _INK if look.face == "none" else look.face
  height = cell.height - 2 * gap
  patches = [_rounded(x, cell.y + gap, width, height, look.face, edge)]
  if cell.filled < 1 and cell.kind != "null":
    x, y, width = x + 0.12 * width, cell.y + 0.76, 0.76 * width
    patches.append(_rounded(x, y, width, 0.1, "#00000048"))
    if cell.filled > 0:
      patches.append(_rounded(x, y, width * cell.filled, 0.1, _LIGHT))
  return patches


def _rounded(
  x: float, y: float, width: float, height: float, face: str, edge: str = ""
) -> "FancyBboxPatch":
  from matplotlib.patches import FancyBboxPatch

  radius = 0.16 * min(width, height) if edge else 0.5 * min(width, height)
  return FancyBboxPatch(
    (x, y),
    width,
    height,
    boxstyle=f"round,pad=0,rounding_size={radius}",
    facecolor=face,
    edgecolor=edge or "none",
    linewidth=0.6 if edge else 0,
  )


def _label(cell: _Cell) -> _Text:
  return _Text(
    cell.x + cell.width / 2,
    cell.y + cell.height / 2,
    cell.label,
    size=0.36 * min(cell.height, 1.6 * cell.width),
    align="center",
    colour=_LOOKS[cell.kind].ink,
  )
