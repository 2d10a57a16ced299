"""Docstrings and names in plain technical English, and comments with reasons.

Three figures of the library are kept: summaries that do not begin with a verb
or a noun phrase, local names that name nothing, and the share of comment lines.
CONTRIBUTING.md has the rules; the word lists here hold what readers stumbled
over, so they are examples of the rules and not the rules themselves.
"""

import ast
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
  *("unlike", "wanted", "what", "yours"),
}
_MAX_QUESTIONS = _MAX_NAMELESS = 0.005
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


def _library() -> Iterator[tuple[str, ast.Module]]:
  for folder in ("jaxkv", "kernels"):
    for name, text in _sources(folder):
      yield name, ast.parse(text)


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


def test_summaries_begin_with_a_verb_or_a_noun():
  total, places = 0, []
  for name, tree in _library():
    for node in ast.walk(tree):
      if text := _docstring(node):
        total += 1
        if text.split(maxsplit=1)[0].lower().strip(",.") in _QUESTIONS:
          places.append(f"{name}: {text.splitlines()[0]}")
  assert len(places) <= _MAX_QUESTIONS * total, "\n".join(places)


def test_local_names_are_nouns_or_conditions():
  total, places = 0, []
  for path, tree in _library():
    for node in ast.walk(tree):
      if isinstance(node, _Function):
        names = _names(node) - {"self", "cls"}
        total += len(names)
        places += [
          f"{path}:{node.lineno} {node.name}: {name}"
          for name in sorted(names)
          if name.strip("_") in _NAMELESS
        ]
  assert len(places) <= _MAX_NAMELESS * total, "\n".join(places)


@pytest.mark.parametrize(("folder", "bar"), _MIN_COMMENTS.items())
def test_comments_give_reasons(folder, bar):
  """Lines of comments among those of comments and code."""
  code, comments = set(), 0
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
      (name, number)
      for number, line in enumerate(lines, 1)
      if line.strip() and number not in docs | remarks
    }
  assert comments >= bar * (comments + len(code))
