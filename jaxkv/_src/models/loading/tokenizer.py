"""Text to tokens and back, and conversations to text.

The package `tokenizers` does the work; `jinja2` renders chat templates. Both
are imported when they are needed.
"""

import functools
import json
import pathlib
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv._src.extras import extra_package
from jaxkv._src.models.loading import chat_template
from jaxkv._src.models.loading.safetensors_files import json_object

Message = Mapping[str, Any]
"""A message of a conversation: its "role" and its "content"."""

TASK = "To read a tokenizer"
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class Tokenizer:
  """The tokens of a pretrained model.

  Attributes:
    core: the `tokenizers.Tokenizer` that does the work.
    template: the chat template, in Jinja; None if there is none.
    variables: for the template, such as `bos_token`.
  """

  def __init__(
    self,
    core: Any,
    *,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
  ):
    """A tokenizer.

    Args:
      core: a `tokenizers.Tokenizer`.
      template: the chat template.
      variables: for the template, such as `bos_token`.
    """
    self.core = core
    self.template = template
    self.variables = dict(variables or {})

  @property
  def vocab_size(self) -> int:
    """Number of tokens; the model's may be larger."""
    return self.core.get_vocab_size(with_added_tokens=True)

  def encode(self, text: str, *, special: bool = True) -> np.ndarray:
    """The tokens of a text, int32[T].

    Args:
      text: the text.
      special: whether to add the tokens that the model expects at the ends of
        a text. Those written in the text are always found.
    """
    encoded = self.core.encode(text, add_special_tokens=special)
    return np.asarray(encoded.ids, np.int32)

  def decode(
    self, tokens: Sequence[int] | np.ndarray, *, special: bool = False
  ) -> str:
    """The text of int[T] tokens; with `special`, special ones are written."""
    ids = np.asarray(tokens).tolist()
    return self.core.decode(ids, skip_special_tokens=not special)

  def chat(
    self, messages: Sequence[Message], *, answer: bool = True, **variables: Any
  ) -> str:
    """The text of a conversation.

    Args:
      messages: who says what, in order.
      answer: whether the text ends with the beginning of an answer.
      **variables: further ones for the template, such as `tools`.

    Raises:
      ValueError: there is no chat template, or it refuses the conversation.
    """
    if self.template is None:
      raise ValueError(
        "the checkpoint has no chat template; write the text of the "
        "conversation yourself, or use a model that was trained to chat."
      )
    known = {
      **self.variables,
      "messages": list(messages),
      "add_generation_prompt": answer,
      **variables,
    }
    return chat_template.rendered(self.template, known)

  def encode_chat(
    self, messages: Sequence[Message], *, answer: bool = True, **variables: Any
  ) -> np.ndarray:
    """The tokens of a conversation, int32[T]; see `chat`."""
    text = self.chat(messages, answer=answer, **variables)
    return self.encode(text, special=False)

  def token_bytes(self) -> list[bytes]:
    """The bytes of each token, for `jaxkv.rollout.token_bytes`.

    Special tokens have none. A word that a token begins has its space.

    Raises:
      ValueError: the vocabulary writes bytes in a way that is not known.
    """
    vocabulary = self.core.get_vocab(with_added_tokens=False)
    added = self.core.get_added_tokens_decoder()
    size = 1 + max([-1, *vocabulary.values(), *added])
    pieces = [b""] * size
    convert = self._piece_bytes
    for piece, number in vocabulary.items():
      if number not in added:
        pieces[number] = convert(piece)
    for number, token in added.items():
      if not token.special:
        pieces[number] = token.content.replace(SPACE, " ").encode()
    return pieces

  @functools.cached_property
  def _piece_bytes(self) -> Any:
    kinds = _decoder_types(self.core)
    if "ByteLevel" in kinds:
      return _byte_level
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:
      return _with_fallback
    raise ValueError(
      "the vocabulary must be byte-level, or have a fallback to bytes, got the "
      f"decoders {sorted(kinds)}; give `rollout.token_bytes` the bytes of each "
      "token yourself."
    )


def _decoder_types(core: Any) -> set[str]:
  decoder = json.loads(core.to_str()).get("decoder") or {}
  inner = decoder.get("decoders", [])
  return {decoder.get("type", "none"), *(one["type"] for one in inner)}


def _byte_level(piece: str) -> bytes:
  try:
    return bytes(_ALPHABET[character] for character in piece)
  except KeyError:
    # Some added tokens stand in the vocabulary as plain text.
    return piece.encode()


def _with_fallback(piece: str) -> bytes:
  if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
    return bytes([int(piece[3:5], 16)])
  return piece.replace(SPACE, " ").encode()


def _alphabet() -> dict[str, int]:
  """The byte of each character of byte-level vocabularies."""
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in set(plain)]
  shifted = {chr(256 + place): byte for place, byte in enumerate(others)}
  return {chr(byte): byte for byte in plain} | shifted


_ALPHABET = _alphabet()


def from_folder(folder: pathlib.Path) -> Tokenizer:
  """The tokenizer of a folder as Hugging Face writes it.

  Raises:
    ValueError: there is no tokenizer.json, or it cannot be read.
  """
  path = folder / "tokenizer.json"
  if not path.exists():
    raise ValueError(
      f"{folder} has no tokenizer.json; save the model's fast tokenizer there."
    )
  core = from_file(path)
  configured = folder / "tokenizer_config.json"
  config = json_object(configured) if configured.exists() else {}
  return Tokenizer(
    core,
    template=_template(folder, config),
    variables={
      key: _content(value)
      for key, value in config.items()
      if key.endswith("_token")
    },
  )


def from_file(path: pathlib.Path) -> Any:
  """The `tokenizers.Tokenizer` in a file.

  Raises:
    ValueError: the file is damaged, or the package is not installed.
  """
  tokenizers = extra_package("tokenizers", install="jaxkv[hf]", task=TASK)
  try:
    core = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # The package raises nothing more precise.
    raise ValueError(
      f"{path} cannot be read ({error}); get it again."
    ) from error
  core.no_truncation()
  core.no_padding()
  return core


def _content(value: Any) -> Any:
  """The text of a token, which may be stored with its options."""
  return value.get("content") if isinstance(value, dict) else value


def _template(folder: pathlib.Path, config: dict[str, Any]) -> str | None:
  path = folder / "chat_template.jinja"
  if path.exists():
    return path.read_text(encoding="utf-8")
  template = config.get("chat_template")
  other = folder / "chat_template.json"
  if template is None and other.exists():
    template = json_object(other).get("chat_template")
  if isinstance(template, list):
    named = {one["name"]: one["template"] for one in template}
    return named.get("default")
  return template
