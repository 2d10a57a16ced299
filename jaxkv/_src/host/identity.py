"""Keeps requests with equal tokens but different inputs from sharing pages.

A salt applies to all pages of a request, an image to the pages it overlaps.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.cache.prefix.hashing import KEY_WORDS

_NO_SALT = bytes(16)
# The attributes that `identity_of` reads.
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
_SIZED = (str, tuple, list)


class Placed(NamedTuple):
  """An image or similar input at its placeholders."""

  identifier: str
  start: int
  stop: int

  @classmethod
  def at(cls, identifier: str, span: Any) -> "Placed":
    """Places an input at a range with `offset` and `length`."""
    offset = as_count("offset", span.offset, 0)
    return cls(identifier, offset, offset + as_count("length", span.length, 0))

  def key(self, begin: int, end: int) -> Any:
    """Returns the identifier, and the place relative to `begin`."""
    # An input that ends after `end` is cut off there, since later tokens do not
    # matter. A start before `begin` is negative.
    stop = min(self.stop, end)
    return ("mm", self.identifier, self.start - begin, stop - begin)


@dataclasses.dataclass(frozen=True)
class Embeddings:
  """Embeddings that replace the first tokens."""

  digest: bytes
  start: int
  stop: int
  # Not compared: `digest` covers the rows, and `==` of arrays is not a bool.
  rows: np.ndarray = dataclasses.field(compare=False)

  @classmethod
  def of(cls, name: str, values: Any) -> "Embeddings":
    """Reads a NumPy, JAX or torch array [P, D], a row for each of P tokens."""
    if str(getattr(values, "dtype", "")).startswith("torch."):
      # NumPy cannot convert torch's bfloat16.
      values = values.detach().cpu().float()
    rows = np.asarray(values)
    if rows.ndim != 2 or rows.dtype == object:
      raise TypeError(
        f"`prompt_embeds` of {name!r} must be an array [P, D], got shape "
        f"{rows.shape} and dtype {rows.dtype}."
      )
    return cls(_digest_of(rows), 0, len(rows), rows)

  def key(self, begin: int, end: int) -> Any:
    """Returns the digest of the embeddings of tokens `begin .. end`."""
    return ("prompt_embeds", _digest_of(self.rows[begin:end]))


def _digest_of(rows: np.ndarray) -> bytes:
  # The same bytes in another shape or dtype are different embeddings.
  digest = hashlib.sha256(f"{rows.dtype}{rows.shape}".encode())
  digest.update(np.ascontiguousarray(rows).tobytes())
  return digest.digest()


Item = Placed | Embeddings


def identity_of(request: Any) -> tuple[bytes, tuple[Item, ...]]:
  """Returns a request's salt, 16 bytes, and its items, or raises."""
  attributes = {}
  for name in _SEPARATING:
    value = getattr(request, name, None)
    if value is None or (isinstance(value, _SIZED) and not value):
      continue
    attributes[name] = value
  if not attributes:
    return _NO_SALT, ()
  name = request.request_id
  parts = _parts_of_salt(name, attributes)
  items: list[Item] = [
    Placed.at(_identifier_of(name, "mm", item), item)
    for item in attributes.get("mm", ())
  ]
  for index, feature in enumerate(attributes.get("mm_features", ())):
    identifier = _identifier_of(name, "mm_features", feature)
    span = _first_of(feature, "mm_position", "placeholder_range")
    # Without a range, any page may depend on the input.
    if span is None:
      parts[f"mm_features {index}"] = identifier.encode()
    else:
      items.append(Placed.at(identifier, span))
  if "prompt_embeds" in attributes:
    items.append(Embeddings.of(name, attributes["prompt_embeds"]))
  return _digest(parts) if parts else _NO_SALT, tuple(items)


def _identifier_of(name: str, tag: str, item: Any) -> str:
  identifier = _first_of(item, "identifier", "mm_hash")
  if not isinstance(identifier, str):
    raise TypeError(
      f"`{tag}` of {name!r} must have an identifier or mm_hash, got {item!r}."
    )
  return identifier


def _first_of(feature: Any, name: str, fallback: str) -> Any:
  return getattr(feature, name, None) or getattr(feature, fallback, None)


def _parts_of_salt(name: str, attributes: dict[str, Any]) -> dict[str, bytes]:
  """Returns the data that the salt of a request covers, by attribute."""
  parts = {}
  for tag in ("cache_salt", "lora_name"):
    value = attributes.get(tag, "")
    if not isinstance(value, str | bytes):
      raise TypeError(
        f"`{tag}` of {name!r} must be a str, bytes or None, got {value!r}; "
        "write str(...) around it."
      )
    if tag in attributes:
      is_text = isinstance(value, str)
      parts[tag] = b"str:" + value.encode() if is_text else b"bytes:" + value
  adapter = attributes.get("lora_request")
  if adapter is not None:
    fields = ("lora_name", "lora_path", "lora_int_id")
    values = [getattr(adapter, field, None) for field in fields]
    if values == [None] * len(fields):
      raise TypeError(
        f"`lora_request` of {name!r} must have a lora_name, got {adapter!r}."
      )
    parts["lora_request"] = repr(values).encode()
  # Pixels have no identifier. Without one, requests with different images would
  # share pages.
  for tag in ("pixel_values", "pixel_values_videos"):
    if tag in attributes and not {"mm", "mm_features"} & set(attributes):
      raise ValueError(
        f"`{tag}` of {name!r} must come with `mm_features`, whose hashes tell "
        "two inputs apart."
      )
  return parts


def _digest(parts: dict[str, bytes]) -> bytes:
  # Tags and lengths separate the parts, so that one part cannot imitate two.
  digest = hashlib.blake2b(digest_size=16, person=b"jaxkv-request")
  for tag, data in parts.items():
    digest.update(f"{tag}:{len(data)}:".encode() + data)
  return digest.digest()


def salt_of(salt: bytes, items: Sequence[Item], size: int) -> bytes:
  """Returns the salt of a request's page keys, 16 bytes.

  If `size`, the `page_size` of the config, is below 4 tokens, the salt covers
  all items. Requests then share pages only if all their items are equal.
  """
  # A mask has 32 bits for each token of a page. Masks of fewer than 128 bits
  # could be equal for different items.
  if not items or size >= KEY_WORDS:
    return salt
  keys = [item.key(0, item.stop) for item in items]
  digest = hashlib.blake2b(digest_size=16, person=b"jaxkv-items")
  digest.update(salt + repr(keys).encode())
  return digest.digest()


def mask_items(
  tokens: bytes,
  items: Sequence[Item],
  start: int,
  size: int,
  secret: bytes,
  num_tokens: int | None = None,
) -> bytes:
  """Masks the tokens of pages that overlap items.

  Tokens after the first `num_tokens` ones stay unmasked if they follow the
  items of their page and four masked tokens; None masks whole pages.

  `tokens`, int32 bytes, begin at position `start` of the request. The mask of a
  page, `32 * size` bits, is a hash of the secret and of the page's items, so
  pages with different items have different contents. See also `salt_of`.
  """
  masked = np.frombuffer(tokens, "<i4").copy()
  stop = start + len(masked)
  pages = {
    page
    for item in items
    for page in range(
      max(item.start, start) // size, -(-min(item.stop, stop) // size)
    )
  }
  for page in pages:
    begin = page * size
    end = begin + size
    inside = [item for item in items if item.start < end and item.stop > begin]
    keys = [item.key(begin, end) for item in inside]
    # `repr` quotes strings, so different keys have different texts.
    stream = hashlib.shake_256(secret + repr(keys).encode()).digest(4 * size)
    mask = np.frombuffer(stream, "<i4")
    # `tokens` can begin or end inside the page, but `mask` covers all of it.
    first = max(begin, start)
    last = min(end, stop)
    if num_tokens is not None:
      items_end = max(item.stop for item in inside)
      # Fewer tokens would have masks of fewer than 128 bits.
      masked_end = max(num_tokens, items_end, begin + KEY_WORDS)
      last = max(first, min(last, masked_end))
    masked[first - start : last - start] ^= mask[first - begin : last - begin]
  return masked.tobytes()
