"""Keeps control tokens that users write in a conversation plain text.

Control tokens, such as `<|im_end|>`, are marked in the variables of a template.
The text between the marks is encoded without control tokens.
"""

import re
from collections.abc import Iterable
from typing import Any

MARKS = "\U000f0000\U000f0001"
"""Private characters before and after a control token."""


def control_tokens(core: Any, template: str) -> list[str]:
  """Returns the control tokens of a `tokenizers.Tokenizer`, the longest first.

  These are its special tokens, and added tokens that the template has. White
  space is not a control token.
  """
  added = core.get_added_tokens_decoder().values()
  names = {
    token.content
    for token in added
    if token.special
    or (token.content in template and not token.content.isspace())
  }
  return sorted(names, key=len, reverse=True)


def mark(value: Any, tokens: Iterable[str]) -> Any:
  """Returns a JSON value whose strings have marks around control tokens.

  Keys are not marked, because templates look for them.
  """
  if isinstance(value, str):
    # Marks of the user are removed, as they could end those below.
    value = re.sub(f"[{MARKS}]", "", value)
    pattern = "|".join(map(re.escape, tokens)) or "(?!)"
    return re.sub(pattern, rf"{MARKS[0]}\g<0>{MARKS[1]}", value)
  if isinstance(value, dict):
    return {key: mark(item, tokens) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [mark(item, tokens) for item in value]
  return value


def encode_marked(core: Any, text: str, tokens: Iterable[str]) -> list[int]:
  """Encodes a text; marked control tokens are encoded as plain text.

  Raises:
    ValueError: the tokenizer would make a control token of its plain text.
  """
  pattern = "|".join(map(re.escape, tokens)) or "(?!)"
  # A template can separate a mark from its token. The mark alone still
  # separates the text on its two sides.
  pieces = re.split(f"{MARKS[0]}({pattern}){MARKS[1]}|[{MARKS}]", text)
  ids = _encode(core, pieces[0])
  for index, piece in enumerate(pieces[1:], start=1):
    # The pieces with odd indices are control tokens, or None for a mark alone.
    if piece and index % 2:
      plain = _after_line_end(core, piece, _encode_plain)
      if core.token_to_id(piece) in plain:
        raise ValueError(
          f"`messages` must not have {piece!r}, because the tokenizer has no "
          "other tokens for this text; remove it."
        )
      ids += plain
    elif piece:
      ids += _after_line_end(core, piece, _encode)
  return ids


def _encode(core: Any, text: str) -> list[int]:
  return core.encode(text, add_special_tokens=False).ids


def _encode_plain(core: Any, text: str) -> list[int]:
  """Encodes a text without its added tokens, special or not."""
  if core.normalizer is not None:
    text = core.normalizer.normalize_str(text)
  words = [text]
  if core.pre_tokenizer is not None:
    words = [word for word, _ in core.pre_tokenizer.pre_tokenize_str(text)]
  return [token.id for word in words for token in core.model.tokenize(word)]


def _after_line_end(core: Any, text: str, encode: Any) -> list[int]:
  """Encodes the text after a line end, so that no space is put before it."""
  line_end = _encode(core, "\n")
  ids = encode(core, "\n" + text)
  if ids[: len(line_end)] == line_end:
    return ids[len(line_end) :]
  return encode(core, text)
