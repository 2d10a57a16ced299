"""Tokenizers of pretrained models, and their chat templates.

Wraps the package `tokenizers`, which is imported only when it is needed.
"""

import functools
import json
import pathlib
import re
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv._src.extras import extra_package
from jaxkv._src.models.loading import chat_template
from jaxkv._src.models.loading.control_tokens import control_tokens
from jaxkv._src.models.loading.control_tokens import encode_marked
from jaxkv._src.models.loading.control_tokens import mark
from jaxkv._src.models.loading.safetensors_files import json_object

Message = Mapping[str, Any]
"""A message of a conversation, with a "role" and a "content"."""

TASK = "To read a tokenizer"
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class Tokenizer:
  """The tokenizer of a pretrained model.

  Attributes:
    core: the wrapped `tokenizers.Tokenizer`.
    template: the chat template, in Jinja; several templates by name, of which
      "tool_use" is for conversations with tools and "default" for others; or
      None if there is no template.
    variables: variables of the template, such as `bos_token`.
  """

  def __init__(
    self,
    core: Any,
    *,
    template: str | Mapping[str, str] | None = None,
    variables: Mapping[str, Any] | None = None,
  ):
    """Wraps a `tokenizers.Tokenizer`; see the attributes of the class."""
    self.core = core
    self.template = template
    self.variables = dict(variables or {})

  @property
  def vocab_size(self) -> int:
    """Number of tokens, including added tokens."""
    return self.core.get_vocab_size(with_added_tokens=True)

  def encode(self, text: str, *, special: bool = True) -> np.ndarray:
    """Returns the tokens of a text, int32[T].

    Args:
      text: the text.
      special: True to add the special tokens that the model expects before and
        after a text. Special tokens within the text are always recognized.

    Raises:
      ValueError: the text has an unpaired surrogate.
    """
    _check_unicode(text)
    encoded = self.core.encode(text, add_special_tokens=special)
    return np.asarray(encoded.ids, np.int32)

  def decode(
    self, tokens: Sequence[int] | np.ndarray, *, special: bool = False
  ) -> str:
    """Returns the text of int[T] tokens, with or without special tokens."""
    ids = np.asarray(tokens).tolist()
    return self.core.decode(ids, skip_special_tokens=not special)

  def chat(
    self,
    messages: Sequence[Message],
    *,
    answer: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
  ) -> str:
    """Returns the text of a conversation, as transformers 5.24 renders it.

    Keys of a message whose value is None are left out. "thinking" or
    "reasoning" is also passed as "reasoning_content".

    Args:
      messages: the messages, in order, at least one.
      answer: True to end the text with the beginning of the model's answer.
      tools: a JSON schema for each tool; None for no tools.
      documents: mappings with the text of documents; None for no documents.
      **variables: further variables of the template.

    Raises:
      TypeError: a message, tool or document is not a mapping.
      ValueError: there is no message or no chat template, or it cannot be
        rendered, for example because it refuses the conversation.
    """
    template = chat_template.choose(self.template, tools is not None)
    inputs = chat_template.inputs(
      messages, answer=answer, tools=tools, documents=documents, **variables
    )
    return chat_template.render(template, self.variables | inputs)

  def encode_chat(
    self,
    messages: Sequence[Message],
    *,
    answer: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    sanitize: bool = False,
    **variables: Any,
  ) -> np.ndarray:
    """Returns the tokens of a conversation, int32[T].

    Args:
      messages: see `chat`.
      answer: see `chat`.
      tools: see `chat`.
      documents: see `chat`.
      sanitize: True to encode control tokens, such as "<|im_end|>", as plain
        text where they occur in messages, tools, documents or variables. Only
        those that the template writes become tokens. Otherwise, the author of a
        message can end it and write others. Control tokens are the special
        tokens, and added tokens that the template has. A template that joins
        parts of a control token, or a role, still makes one; check roles.
      **variables: see `chat`.

    Raises:
      TypeError: see `chat`.
      ValueError: see `chat`; or, with `sanitize`, the tokenizer has no other
        tokens for the text of a control token.
    """
    template = chat_template.choose(self.template, tools is not None)
    inputs = chat_template.inputs(
      messages, answer=answer, tools=tools, documents=documents, **variables
    )
    if not sanitize:
      text = chat_template.render(template, self.variables | inputs)
      # The template has written the special tokens.
      return self.encode(text, special=False)
    tokens = control_tokens(self.core, template)
    marked = self.variables | mark(inputs, tokens)
    text = chat_template.render(template, marked)
    _check_unicode(text)
    return np.asarray(encode_marked(self.core, text, tokens), np.int32)

  def token_bytes(self) -> list[bytes]:
    """Returns the bytes of each token, for `jaxkv.guides.token_bytes`.

    A special token gets no bytes. If a token includes the space before a word,
    so do its bytes.

    Raises:
      ValueError: the tokenizer has a decoder of an unsupported type.
    """
    vocabulary = self.core.get_vocab(with_added_tokens=False)
    added = self.core.get_added_tokens_decoder()
    # Token ids can have gaps, so the largest one sets the length.
    num_tokens = 1 + max([-1, *vocabulary.values(), *added])
    pieces = [b""] * num_tokens
    convert = self._piece_bytes
    for piece, token_id in vocabulary.items():
      if token_id not in added:
        pieces[token_id] = convert(piece)
    for token_id, token in added.items():
      # The decoder treats added tokens that are not special like other tokens.
      if not token.special:
        pieces[token_id] = convert(token.content)
    return pieces

  @functools.cached_property
  def _piece_bytes(self) -> Any:
    kinds = _decoder_types(self.core)
    if "ByteLevel" in kinds:
      return _byte_level_piece
    if "ByteFallback" in kinds:
      return _fallback_piece
    if kinds & {"Metaspace", "Replace"}:
      return _spaced_piece
    raise ValueError(
      "the tokenizer must have a decoder ByteLevel, ByteFallback, Metaspace or "
      f"Replace, got {sorted(kinds)}; give `guides.token_bytes` the bytes of "
      "each token yourself."
    )


def _check_unicode(text: str) -> None:
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise ValueError(
      f"`text` must be valid Unicode, got {text[error.start]!r} at position "
      f"{error.start}; remove it."
    ) from None


def _decoder_types(core: Any) -> set[str]:
  decoder = json.loads(core.to_str()).get("decoder") or {}
  inner = decoder.get("decoders", [])
  return {decoder.get("type", "none"), *(step["type"] for step in inner)}


def _byte_level_piece(piece: str) -> bytes:
  try:
    return bytes(_ALPHABET[character] for character in piece)
  except KeyError:
    # Like `tokenizers`, treats a token with an unknown character as plain text.
    return piece.encode()


def _fallback_piece(piece: str) -> bytes:
  byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)
  return bytes.fromhex(byte[1]) if byte else _spaced_piece(piece)


def _spaced_piece(piece: str) -> bytes:
  return piece.replace(SPACE, " ").encode()


def _alphabet() -> dict[str, int]:
  """Returns the byte that each character of GPT-2's alphabet represents."""
  # A visible Latin-1 character represents its code point. The other bytes are
  # represented, in order, by the characters from code point 256 on.
  visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
  hidden = [byte for byte in range(256) if byte not in set(visible)]
  shifted = {chr(256 + index): byte for index, byte in enumerate(hidden)}
  return {chr(byte): byte for byte in visible} | shifted


_ALPHABET = _alphabet()


def from_folder(folder: pathlib.Path) -> Tokenizer:
  """Reads the tokenizer of a folder in Hugging Face's format."""
  path = folder / "tokenizer.json"
  if not path.exists():
    raise ValueError(
      f"{folder} has no tokenizer.json; save the model's fast tokenizer there."
    )
  core = from_file(path)
  configured = folder / "tokenizer_config.json"
  config = json_object(configured) if configured.exists() else {}
  return Tokenizer(
    core, template=_template(folder, config), variables=_variables(config)
  )


def from_file(path: pathlib.Path) -> Any:
  """Reads a `tokenizers.Tokenizer` from a file."""
  tokenizers = extra_package("tokenizers", install="jaxkv[hf]", task=TASK)
  try:
    core = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # The package raises nothing more precise.
    raise ValueError(
      f"{path} cannot be read ({error}); download it again, or upgrade "
      "`tokenizers`."
    ) from error
  # A file can store truncation and padding for training. Both are turned off,
  # because they would change the tokens of a text.
  core.no_truncation()
  core.no_padding()
  return core


def _variables(config: dict[str, Any]) -> dict[str, str]:
  """Returns the text of each named token, such as `bos_token`."""
  variables = {}
  for key, value in config.items():
    # A token is stored as its text, or as options with its text as "content".
    text = value.get("content") if isinstance(value, dict) else value
    # A null is a token that the model lacks. A bool is an option.
    if key.endswith("_token") and isinstance(text, str):
      variables[key] = text
  return variables


def _template(
  folder: pathlib.Path, config: dict[str, Any]
) -> str | dict[str, str] | None:
  named = sorted(folder.glob("additional_chat_templates/*.jinja"))
  templates = {path.stem: path.read_text(encoding="utf-8") for path in named}
  path = folder / "chat_template.jinja"
  if path.exists():
    text = path.read_text(encoding="utf-8")
    return templates | {"default": text} if templates else text
  template = templates or config.get("chat_template")
  processor = folder / "chat_template.json"
  if template is None and processor.exists():
    template = json_object(processor).get("chat_template")
  # A list has one named template per purpose, such as "default" or "tool_use".
  if isinstance(template, list):
    return {entry["name"]: entry["template"] for entry in template}
  return template
