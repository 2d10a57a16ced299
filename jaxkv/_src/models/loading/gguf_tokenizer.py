"""Tokenizers made of the vocabulary in a GGUF file.

| `tokenizer.ggml.model` | what it is                                          |
|------------------------|-----------------------------------------------------|
| `gpt2`                 | byte-level pairs, with a list of merges             |
| `llama`                | SentencePiece: merges follow from scores of pieces  |

In which words a text is cut before pairs are merged, `tokenizer.ggml.pre` says.
"""

import os
from collections.abc import Mapping
from typing import Any

from jaxkv._src.extras import extra_package
from jaxkv._src.models.loading.gguf_header import read_gguf_header
from jaxkv._src.models.loading.tokenizer import SPACE
from jaxkv._src.models.loading.tokenizer import TASK
from jaxkv._src.models.loading.tokenizer import Tokenizer

_FACT = "tokenizer.ggml."
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
_ROLES = ("bos", "eos", "unknown", "padding", "eot")
_ENDS = ("eos", "eot")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = (
  r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
  r"|\s+(?!\S)|\s+"
)
# Words of a text: how many digits stand together, and whether a word that is a
# token is left whole, and characters are composed, first.
_WORDS = {
  "llama-bpe": (r"\p{N}{1,3}", True, False),
  "qwen2": (r"\p{N}", False, True),
}
_PLAIN_WORDS = {"default", "gpt-2", "smollm"}
_STARTS_TEXTS = {"llama-bpe"}


def stop_tokens(path: str | os.PathLike[str]) -> tuple[int, ...]:
  """The tokens that end a text or a message, as the file names them."""
  return _stop_tokens(read_gguf_header(path).facts)


def _stop_tokens(facts: Mapping[str, Any]) -> tuple[int, ...]:
  found = (facts.get(f"{_FACT}{end}_token_id") for end in _ENDS)
  return tuple(
    dict.fromkeys(int(token) for token in found if token is not None)
  )


def from_file(path: str | os.PathLike[str]) -> Tokenizer:
  """The tokenizer in a GGUF file.

  Raises:
    ImportError: the package `tokenizers` is not installed.
    ValueError: the file has no tokenizer, or one that is not known.
  """
  header = read_gguf_header(path)
  try:
    return from_facts(header.facts)
  except KeyError as error:
    raise ValueError(
      f"`{header.path}` must have a tokenizer, got no {error.args[0]!r}; "
      "convert it again."
    ) from None
  except ValueError as error:
    raise ValueError(f"`{header.path}`: {error}") from error


def from_facts(facts: Mapping[str, Any]) -> Tokenizer:
  """The tokenizer that the facts of a GGUF file describe.

  Args:
    facts: those that begin with "tokenizer.".

  Raises:
    KeyError: a fact is missing.
    ValueError: the kind is not known.
  """
  kind = facts[f"{_FACT}model"]
  if kind not in _KINDS:
    raise ValueError(
      f"`tokenizer.ggml.model` must be {' or '.join(_KINDS)}, got {kind!r}."
    )
  tokens = list(facts[f"{_FACT}tokens"])
  library = extra_package("tokenizers", install="jaxkv[gguf]", task=TASK)
  core = _KINDS[kind](library, facts, tokens)
  _add_tokens(library, core, facts, tokens)
  _add_ends(library, core, facts, tokens)
  return Tokenizer(
    core,
    template=facts.get("tokenizer.chat_template"),
    variables={
      f"{role}_token": tokens[int(number)]
      for role in _ROLES
      if (number := facts.get(f"{_FACT}{role}_token_id")) is not None
    },
  )


def _byte_level(
  library: Any, facts: Mapping[str, Any], tokens: list[str]
) -> Any:
  words = facts.get(f"{_FACT}pre", "default")
  if words not in _WORDS and words not in _PLAIN_WORDS:
    known = ", ".join(sorted({*_WORDS, *_PLAIN_WORDS}))
    raise ValueError(f"`tokenizer.ggml.pre` must be {known}, got {words!r}.")
  digits, whole, composed = _WORDS.get(words, ("", False, False))
  merges = [tuple(pair.split(" ", 1)) for pair in facts[f"{_FACT}merges"]]
  core = library.Tokenizer(
    library.models.BPE(
      vocab={token: number for number, token in enumerate(tokens)},
      merges=merges,
      ignore_merges=whole,
    )
  )
  if composed:
    core.normalizer = library.normalizers.NFC()
  cut = library.pre_tokenizers
  if digits:
    pattern = library.Regex(f"{_CONTRACTIONS}|{_REST % digits}")
    steps = [
      cut.Split(pattern, "isolated"),
      cut.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  else:
    steps = [cut.ByteLevel(add_prefix_space=False)]
    if words == "smollm":
      steps = [cut.Digits(individual_digits=True), *steps]
  core.pre_tokenizer = cut.Sequence(steps)
  core.decoder = library.decoders.ByteLevel()
  return core


def _sentence_pieces(
  library: Any, facts: Mapping[str, Any], tokens: list[str]
) -> Any:
  scores = [float(score) for score in facts[f"{_FACT}scores"]]
  kinds = [int(kind) for kind in facts[f"{_FACT}token_type"]]
  unknown = facts.get(f"{_FACT}unknown_token_id")
  core = library.Tokenizer(
    library.models.BPE(
      vocab={token: number for number, token in enumerate(tokens)},
      merges=merges_of(tokens, scores, kinds),
      unk_token=None if unknown is None else tokens[int(unknown)],
      byte_fallback=True,
      fuse_unk=True,
    )
  )
  change, undo = library.normalizers, library.decoders
  steps = [change.Replace(" ", SPACE)]
  back = [undo.Replace(SPACE, " "), undo.ByteFallback(), undo.Fuse()]
  if facts.get(f"{_FACT}add_space_prefix", True):
    steps = [change.Prepend(SPACE), *steps]
    back = [*back, undo.Strip(" ", 1, 0)]
  core.normalizer = change.Sequence(steps)
  core.decoder = undo.Sequence(back)
  return core


_KINDS = {"gpt2": _byte_level, "llama": _sentence_pieces}


def merges_of(
  tokens: list[str], scores: list[float], kinds: list[int]
) -> list[tuple[str, str]]:
  """The pairs that SentencePiece merges, those with the best results first.

  Args:
    tokens: all pieces.
    scores: of each; of two pairs the one whose result scores more is merged.
    kinds: of each; control tokens and bytes are no part of a pair.

  Examples:
    >>> merges_of(["a", "b", "c", "ab", "abc"], [0, 0, 0, -2, -1], [1] * 5)
    [('ab', 'c'), ('a', 'b')]
  """
  numbers = {
    token: number
    for number, token in enumerate(tokens)
    if kinds[number] not in (_CONTROL, _USER_DEFINED, _BYTE)
  }
  found = []
  for token, number in numbers.items():
    for middle in range(1, len(token)):
      left, right = token[:middle], token[middle:]
      if left in numbers and right in numbers:
        order = -scores[number], number, numbers[left], numbers[right]
        found.append((order, (left, right)))
  found.sort(key=lambda entry: entry[0])
  return [pair for _, pair in found]


def _add_tokens(
  library: Any, core: Any, facts: Mapping[str, Any], tokens: list[str]
) -> None:
  """Tokens that are found in a text before anything else is done to it."""
  kinds = [int(kind) for kind in facts.get(f"{_FACT}token_type", ())]
  special, plain = [], []
  for token, kind in zip(tokens, kinds, strict=False):
    if kind == _CONTROL:
      special.append(library.AddedToken(token, normalized=False, special=True))
    elif kind == _USER_DEFINED:
      plain.append(library.AddedToken(token, normalized=False))
  core.add_special_tokens(special)
  core.add_tokens(plain)


def _add_ends(
  library: Any, core: Any, facts: Mapping[str, Any], tokens: list[str]
) -> None:
  """What stands before and after every text."""
  pieces = facts[f"{_FACT}model"] == "llama"
  starts = facts.get(f"{_FACT}pre") in _STARTS_TEXTS
  begin, end = (
    facts.get(f"{_FACT}{role}_token_id")
    if facts.get(f"{_FACT}add_{role}_token", default)
    else None
    for role, default in (("bos", pieces or starts), ("eos", False))
  )
  names = [None if one is None else tokens[int(one)] for one in (begin, end)]
  ends = [
    (name, int(one))
    for name, one in zip(names, (begin, end), strict=True)
    if name is not None and one is not None
  ]
  if not ends:
    return
  around = [name for name in (names[0], "$A", names[1]) if name is not None]
  core.post_processor = library.processors.TemplateProcessing(
    single=around, special_tokens=ends
  )
