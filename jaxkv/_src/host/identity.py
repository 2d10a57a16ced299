"""Separates requests with equal tokens: by a salt, and by items at pages."""

import dataclasses
import hashlib
from typing import Any
from typing import NamedTuple

import numpy as np

_NO_SALT = bytes(16)
# Attributes that tell requests apart, of which most requests have none.
_TELLING = (
  "cache_salt",
  "lora_name",
  "lora_request",
  "mm",
  "mm_features",
  "prompt_embeds",
  "pixel_values",
  "pixel_values_videos",
)


class Placed(NamedTuple):
  """An image or similar input at its placeholders."""

  identifier: str
  start: int
  stop: int

  @classmethod
  def at(cls, identifier: str, place: Any) -> "Placed":
    """Makes the input at a range with `offset` and `length`."""
    return cls(identifier, place.offset, place.offset + place.length)

  def key(self, begin: int, end: int) -> Any:
    """Returns the input's part of the key of the tokens `begin .. end`."""
    stop = min(self.stop, end)
    return ("mm", self.identifier, self.start - begin, stop - begin)


@dataclasses.dataclass(frozen=True)
class Embeddings:
  """Embeddings of the first tokens."""

  digest: bytes
  start: int
  stop: int
  rows: np.ndarray = dataclasses.field(compare=False)

  @classmethod
  def of(cls, name: str, values: Any) -> "Embeddings":
    """Reads embeddings [P, D] of numpy, jax or torch."""
    if str(getattr(values, "dtype", "")).startswith("torch."):
      values = values.detach().cpu().float()  # numpy has no bfloat16.
    rows = np.asarray(values)
    if rows.ndim != 2 or rows.dtype == object:
      raise TypeError(
        f"`prompt_embeds` of {name!r} must be an array [P, D], got shape "
        f"{rows.shape} and dtype {rows.dtype}."
      )
    return cls(_digest_of(rows), 0, len(rows), rows)

  def key(self, begin: int, end: int) -> Any:
    """Returns the embeddings' part of the key of the tokens `begin .. end`."""
    return ("prompt_embeds", _digest_of(self.rows[begin:end]))


def _digest_of(rows: np.ndarray) -> bytes:
  digest = hashlib.sha256(f"{rows.dtype}{rows.shape}".encode())
  digest.update(np.ascontiguousarray(rows).tobytes())
  return digest.digest()


Item = Placed | Embeddings


def identity_of(request: Any) -> tuple[bytes, tuple[Item, ...]]:
  """Returns a salt of 16 bytes for all pages, and items at some pages.

  Raises:
    TypeError, ValueError: an attribute that separates requests cannot be read.
  """
  telling = {}
  for name in _TELLING:
    value = getattr(request, name, None)
    if value is not None and not _is_empty(value):
      telling[name] = value
  if not telling:
    return _NO_SALT, ()
  name = request.request_id
  parts = _texts(name, telling)
  items: list[Item] = [
    Placed.at(item.identifier, item) for item in telling.get("mm", ())
  ]
  for number, feature in enumerate(telling.get("mm_features", ())):
    identifier = _identifier(name, feature)
    place = getattr(feature, "mm_position", None)
    place = place or getattr(feature, "placeholder_range", None)
    if place is None:
      parts[f"mm_features {number}"] = identifier.encode()
    else:
      items.append(Placed.at(identifier, place))
  if "mm_features" not in telling and "mm" not in telling:
    _refuse_pixels(name, telling)
  if "prompt_embeds" in telling:
    items.append(Embeddings.of(name, telling["prompt_embeds"]))
  return _digest(parts) if parts else _NO_SALT, tuple(items)


def _is_empty(value: Any) -> bool:
  return isinstance(value, str | tuple | list) and not value


def _texts(name: str, telling: dict[str, Any]) -> dict[str, bytes]:
  """Returns the data that separates all pages of a request, by attribute."""
  parts = {}
  for tag in ("cache_salt", "lora_name"):
    if tag in telling:
      parts[tag] = _text(f"`{tag}` of {name!r}", telling[tag])
  adapter = telling.get("lora_request")
  if adapter is not None:
    fields = ("lora_name", "lora_path", "lora_int_id")
    values = [getattr(adapter, field, None) for field in fields]
    if values == [None] * len(fields):
      raise TypeError(
        f"`lora_request` of {name!r} must have a lora_name, got {adapter!r}."
      )
    parts["lora_request"] = repr(values).encode()
  return parts


def _digest(parts: dict[str, bytes]) -> bytes:
  """Hashes to 16 bytes; tags and lengths keep different parts distinct."""
  digest = hashlib.blake2b(digest_size=16, person=b"jaxkv-request")
  for tag, data in parts.items():
    digest.update(f"{tag}:{len(data)}:".encode() + data)
  return digest.digest()


def _text(name: str, value: Any) -> bytes:
  if isinstance(value, str):
    return value.encode()
  if isinstance(value, bytes):
    return b"bytes:" + value
  raise TypeError(
    f"{name} must be a str, bytes or None, got {value!r}; write str(...) "
    "around it."
  )


def _identifier(name: str, feature: Any) -> str:
  identifier = getattr(feature, "identifier", None) or getattr(
    feature, "mm_hash", None
  )
  if not isinstance(identifier, str):
    raise TypeError(
      f"`mm_features` of {name!r} must have an identifier or mm_hash, got "
      f"{feature!r}."
    )
  return identifier


def _refuse_pixels(name: str, telling: dict[str, Any]) -> None:
  for pixels in ("pixel_values", "pixel_values_videos"):
    if pixels in telling:
      raise ValueError(
        f"`{pixels}` of {name!r} must come with `mm_features`, whose hashes "
        "tell two inputs apart."
      )
