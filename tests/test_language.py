"""Docstrings and names in plain technical English, and comments with reasons.

Figures of the library, and of tests and benchmarks, must stay below bars. When
a figure falls, lower its bar. CONTRIBUTING.md has the rules. The word lists
here have examples that readers stumbled over; they do not replace the rules.

| figure | counts |
|---|---|
| summaries | docstrings that do not begin with a verb or a noun phrase |
| nameless | local names that do not say what they hold |
| unitless | local names of a bound or a count that do not say of what |
| packed | assignments of several values to several names |
"""

import ast
import collections
import io
import pathlib
import tokenize
from collections.abc import Iterator

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]

_QUESTIONS = {
  *("how", "that", "those", "what", "when", "where", "whether", "which"),
  *("who", "whoever", "whose", "why"),
}
# Adjectives, pronouns, adverbs and participles: a name says of what.
_NAMELESS = {
  *("again", "alike", "alone", "apart", "asked", "behind", "beside", "both"),
  *("due", "early", "else", "enough", "far", "few", "found", "given", "gone"),
  *("here", "kept", "known", "late", "least", "less", "like", "many", "mine"),
  *("more", "most", "near", "none", "nothing", "now", "once", "one", "ones"),
  *("others", "owed", "own", "ready", "rest", "said", "same", "seen", "some"),
  *("spare", "strange", "such", "taken", "theirs", "there", "told", "true"),
  *("heat", "unlike", "wanted", "what", "yours"),
}
_UNITLESS = {
  *("after", "before", "begin", "begins", "begun", "drawn", "end", "filled"),
  *("first", "found", "held", "kind", "last", "next", "number", "numbers"),
  *("old", "other", "others", "place", "places", "served", "size", "sizes"),
  *("stop", "top", "total"),
}
_LIBRARY = ("jaxkv", "kernels")
_TESTS = ("tests", "benchmarks")
# The largest share of each figure.
_MAX_SHARES = {
  _LIBRARY: {
    "summaries": 0.005,
    "nameless": 0.005,
    "unitless": 0.025,
    "packed": 0.015,
  },
  _TESTS: {
    "summaries": 0.005,
    "nameless": 0.005,
    "unitless": 0.01,
    "packed": 0.02,
  },
}
_MIN_COMMENTS = {
  "jaxkv/_src/cache": 0.05,
  "jaxkv/_src/kv": 0.05,
  "kernels": 0.05,
  "jaxkv": 0.04,
}

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _sources(folder: str) -> Iterator[tuple[str, str]]:
  """Paths from the root, and texts."""
  for path in sorted((_ROOT / folder).rglob("*.py")):
    yield path.relative_to(_ROOT).as_posix(), path.read_text("utf-8")


def _docstring(node: ast.AST) -> str | None:
  if isinstance(node, ast.Module | ast.ClassDef | _Function):
    return ast.get_docstring(node)
  return None


def _names(function: _Function) -> set[str]:
  """Parameters and names that are assigned."""
  arguments = function.args
  return {
    *(node.id for node in ast.walk(function) if _is_assigned(node)),
    *(argument.arg for argument in arguments.posonlyargs + arguments.args),
    *(argument.arg for argument in arguments.kwonlyargs),
  }


def _is_assigned(node: ast.AST) -> bool:
  return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _is_packed(node: ast.AST) -> bool:
  return (
    isinstance(node, ast.Assign)
    and isinstance(node.targets[0], ast.Tuple)
    and isinstance(node.value, ast.Tuple)
  )


def _items(path: str, tree: ast.Module) -> Iterator[tuple[str, str, bool]]:
  """Yields (figure, place, True if the place breaks the rule)."""
  for node in ast.walk(tree):
    if text := _docstring(node):
      opener = text.split(maxsplit=1)[0].lower().strip(",.")
      place = f"{path}: {text.splitlines()[0]}"
      yield "summaries", place, opener in _QUESTIONS
    if isinstance(node, _Function):
      for name in sorted(_names(node) - {"self", "cls"}):
        place = f"{path}:{node.lineno} {node.name}: {name}"
        yield "nameless", place, name.strip("_") in _NAMELESS
        yield "unitless", place, name.strip("_") in _UNITLESS
    if isinstance(node, ast.Assign):
      yield "packed", f"{path}:{node.lineno}", _is_packed(node)


@pytest.fixture(scope="module", params=[_LIBRARY, _TESTS], ids="-".join)
def figures(request):
  """Returns the places of each figure, the broken ones, and the bars."""
  counts: collections.Counter[str] = collections.Counter()
  broken: dict[str, list[str]] = collections.defaultdict(list)
  for folder in request.param:
    for path, text in _sources(folder):
      for figure, place, is_broken in _items(path, ast.parse(text)):
        counts[figure] += 1
        if is_broken:
          broken[figure].append(place)
  return counts, broken, _MAX_SHARES[request.param]


@pytest.mark.parametrize(
  "figure", ["summaries", "nameless", "unitless", "packed"]
)
def test_figure_is_below_its_bar(figures, figure):
  counts, broken, max_shares = figures
  limit = max_shares[figure] * counts[figure]
  assert len(broken[figure]) <= limit, "\n".join(broken[figure])


@pytest.mark.parametrize(("folder", "bar"), _MIN_COMMENTS.items())
def test_comments_give_reasons(folder, bar):
  """Lines of comments among those of comments and code."""
  code = set()
  comments = 0
  for name, text in _sources(folder):
    lines = text.splitlines()
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        docs.update(range(node.lineno, (node.end_lineno or 0) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    remarks = {
      token.start[0]
      for token in tokens
      if token.type == tokenize.COMMENT and token.line.strip()[0] == "#"
    }
    comments += len(remarks)
    code |= {
      (name, line_index)
      for line_index, line in enumerate(lines, 1)
      if line.strip() and line_index not in docs | remarks
    }
  assert comments >= bar * (comments + len(code))
