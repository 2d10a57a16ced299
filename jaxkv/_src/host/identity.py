"""Separates requests with equal tokens by a salt, and by items at pages."""

import dataclasses
import hashlib
from typing import Any
from typing import NamedTuple

import numpy as np

_NO_SALT = bytes(16)
# Most requests have none of these attributes, and are then served without work.
_SEPARATING = (
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
    """Places an input at a range with `offset` and `length`."""
    return cls(identifier, place.offset, place.offset + place.length)

  def key(self, begin: int, end: int) -> Any:
    """Returns the input's part of the key of the tokens `begin .. end`."""
    # Only what the page contains counts. So a start before it is negative, and
    # an end after it is cut off.
    stop = min(self.stop, end)
    return ("mm", self.identifier, self.start - begin, stop - begin)


@dataclasses.dataclass(frozen=True)
class Embeddings:
  """Embeddings that replace the first tokens."""

  digest: bytes
  start: int
  stop: int
  # The digest covers the rows, and arrays have no single truth value.
  rows: np.ndarray = dataclasses.field(compare=False)

  @classmethod
  def of(cls, name: str, values: Any) -> "Embeddings":
    """Reads embeddings [P, D] of numpy, jax or torch."""
    if str(getattr(values, "dtype", "")).startswith("torch."):
      # numpy has no bfloat16.
      values = values.detach().cpu().float()
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
  # Equal bytes of another shape or type are other embeddings.
  digest = hashlib.sha256(f"{rows.dtype}{rows.shape}".encode())
  digest.update(np.ascontiguousarray(rows).tobytes())
  return digest.digest()


Item = Placed | Embeddings


def identity_of(request: Any) -> tuple[bytes, tuple[Item, ...]]:
  """Returns a salt of 16 bytes for all pages, and items at some pages.

  Raises:
    TypeError, ValueError: an attribute that separates requests cannot be read.
  """
  attributes = {}
  for name in _SEPARATING:
    value = getattr(request, name, None)
    if value is not None and not _is_empty(value):
      attributes[name] = value
  if not attributes:
    return _NO_SALT, ()
  name = request.request_id
  parts = _texts(name, attributes)
  items: list[Item] = [
    Placed.at(item.identifier, item) for item in attributes.get("mm", ())
  ]
  for number, feature in enumerate(attributes.get("mm_features", ())):
    identifier = _identifier(name, feature)
    place = getattr(feature, "mm_position", None)
    place = place or getattr(feature, "placeholder_range", None)
    # Without a range, any page may depend on the input.
    if place is None:
      parts[f"mm_features {number}"] = identifier.encode()
    else:
      items.append(Placed.at(identifier, place))
  # Pixels have no name. Without one, requests with different images would share
  # pages.
  if "mm_features" not in attributes and "mm" not in attributes:
    _refuse_pixels(name, attributes)
  if "prompt_embeds" in attributes:
    items.append(Embeddings.of(name, attributes["prompt_embeds"]))
  return _digest(parts) if parts else _NO_SALT, tuple(items)


def _is_empty(value: Any) -> bool:
  return isinstance(value, str | tuple | list) and not value


def _texts(name: str, attributes: dict[str, Any]) -> dict[str, bytes]:
  """Returns the data that separates all pages of a request, by attribute."""
  parts = {}
  for tag in ("cache_salt", "lora_name"):
    if tag in attributes:
      parts[tag] = _text(f"`{tag}` of {name!r}", attributes[tag])
  adapter = attributes.get("lora_request")
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
  """Hashes the parts to 16 bytes."""
  # Tags and lengths separate the parts, so that one part cannot imitate two.
  digest = hashlib.blake2b(digest_size=16, person=b"jaxkv-request")
  for tag, data in parts.items():
    digest.update(f"{tag}:{len(data)}:".encode() + data)
  return digest.digest()


def _text(name: str, value: Any) -> bytes:
  if isinstance(value, str):
    return b"str:" + value.encode()
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


def _refuse_pixels(name: str, attributes: dict[str, Any]) -> None:
  for pixels in ("pixel_values", "pixel_values_videos"):
    if pixels in attributes:
      raise ValueError(
        f"`{pixels}` of {name!r} must come with `mm_features`, whose hashes "
        "tell two inputs apart."
      )
