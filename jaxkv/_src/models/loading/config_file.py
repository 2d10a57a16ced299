"""Reads typed values from config.json, and refuses unknown keys."""

import sys
from typing import Any

_REQUIRED = object()
_LARGEST = sys.float_info.max

_HARMLESS = frozenset(
  """
  _attn_implementation _name_or_path add_cross_attention architectures
  attention_dropout auto_map aux_loss_alpha begin_suppress_tokens bos_token_id
  cache_implementation chunk_size_feed_forward classifier_dropout
  cross_attention_hidden_size dtype embd_pdrop eos_token_id ep_size
  finetuning_task hidden_dropout
  id2label initializer_range is_decoder is_encoder_decoder is_llama_config
  keys_to_ignore_at_inference label2id max_position_embeddings model_type
  output_attentions output_hidden_states output_router_logits pad_token_id
  prefix pretraining_tp problem_type pruned_heads quantization_config
  resid_pdrop return_dict router_aux_loss_coef router_jitter_noise sep_token_id
  seq_aux task_specific_params tokenizer_class torch_dtype torchscript
  transformers.js_config transformers_version unsloth_fixed
  unsloth_version use_bfloat16 use_cache use_return_dict
  """.split()
)
"""Keys that a model family need not read, because they do not affect logits, or
because `checkpoint_folder` reads them."""


_MAX_INT = 2**31 - 1
_COUNTS_OF_LAYERS = {"num_hidden_layers", "num_nextn_predict_layers"}
"""Keys that count layers. Their values are at most the number of tensors."""
_COUNTS_OF_EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}
_MAX_EXPERTS = 2**16
"""The maximum number of experts, because recorded expert ids have 16 bits."""


class ConfigFile:
  """The values of a config.json, or of a similar table, with checked types.

  A method that returns a value raises a ValueError if the value has the wrong
  type, or if the value is missing and there is no default. A null counts as
  missing, except in `nullable_size` and `nullable_number`. Call
  `check_all_read` last, to refuse unknown keys.
  """

  def __init__(
    self, values: dict[str, Any], file: str, *, num_tensors: int = _MAX_INT
  ):
    """Wraps the JSON object of a `file`, which error messages name.

    The number of tensors in the checkpoint bounds the number of layers.
    """
    self.file = file
    self._num_tensors = num_tensors
    self._values = values
    self._read: set[str] = set()

  def get(self, key: str, default: Any = _REQUIRED) -> Any:
    """Returns a value of any type."""
    self._read.add(key)
    value = self._values.get(key)
    if value is not None:
      return value
    if default is _REQUIRED:
      raise ValueError(f"{self.file} lacks `{key}`; complete it.")
    return default

  def size(self, key: str, default: Any = _REQUIRED) -> Any:
    """Returns an int of at least 1, or the default, which may be None."""
    return self._int(key, default, 1)

  def nullable_size(self, key: str, default: int | None) -> int | None:
    """Returns None for a null, and otherwise the same as `size`."""
    if self._values.get(key, default) is None:
      return None
    return self.size(key, default)

  def count(self, key: str, default: Any = _REQUIRED) -> int:
    """Returns an int of at least 0, or the default, which may be None."""
    return self._int(key, default, 0)

  def number(self, key: str, default: Any = _REQUIRED) -> Any:
    """Returns a finite float, or the default, which may be None."""
    value = self.get(key, default)
    if value is None:
      return None
    # bool is a subclass of int, so it needs a separate check.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # The bound refuses an int of 400 digits, for which `float` would raise an
    # OverflowError.
    if not is_number or not -_LARGEST <= value <= _LARGEST:
      raise self.wrong(key, "a finite number")
    return float(value)

  def nullable_number(self, key: str, default: float | None) -> float | None:
    """Returns None for a null, and otherwise the same as `number`."""
    if self._values.get(key, default) is None:
      return None
    return self.number(key, default)

  def flag(self, key: str, default: Any = _REQUIRED) -> bool:
    """Returns a bool."""
    value = self.get(key, default)
    if not isinstance(value, bool):
      raise self.wrong(key, "true or false")
    return value

  def table(self, key: str) -> dict[str, Any]:
    """Returns a JSON object, or an empty dict if the key is missing."""
    value = self.get(key, {})
    if not isinstance(value, dict):
      raise self.wrong(key, "an object")
    return value

  def items(self, key: str, cls: type, default: Any = _REQUIRED) -> list[Any]:
    """Returns a list whose items all have the type `cls`."""
    value = self.get(key, default)
    if not isinstance(value, list) or not all(type(x) is cls for x in value):
      raise self.wrong(key, f"a list of {cls.__name__}")
    return value

  def wrong(self, key: str, requirement: str) -> ValueError:
    """Returns the error for a value that violates a requirement."""
    text = repr(self._values.get(key))
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return ValueError(
      f"`{key}` in {self.file} must be {requirement}, got {text}."
    )

  def _int(self, key: str, default: Any, minimum: int) -> Any:
    value = self.get(key, default)
    if value is None:
      return None
    # The bounds prevent a loop over 2**31 layers if a count is damaged.
    maximum = _MAX_INT
    if key in _COUNTS_OF_LAYERS:
      maximum = self._num_tensors
    elif key in _COUNTS_OF_EXPERTS:
      maximum = _MAX_EXPERTS
    if type(value) is not int or value < minimum:
      raise self.wrong(key, f"an int of at least {minimum}")
    if value > maximum:
      suffix = ", the number of tensors" if key in _COUNTS_OF_LAYERS else ""
      raise self.wrong(key, f"at most {maximum}{suffix}")
    return value

  def only(self, key: str, *allowed: Any) -> None:
    """Raises ValueError unless a key is missing or has an allowed value."""
    value = self.get(key, None)
    if value is not None and value not in allowed:
      names = " or ".join(repr(name) for name in allowed)
      raise self.wrong(key, f"{names or 'null'}, as no other is supported")

  def ignore(self, *keys: str) -> None:
    """Marks keys as read, for keys that have no effect in a model family."""
    self._read.update(keys)

  def check_all_read(self) -> None:
    """Raises ValueError for keys that are neither read nor in `_HARMLESS`."""
    unknown = [
      key
      for key, value in self._values.items()
      if value is not None and key not in self._read | _HARMLESS
    ]
    if unknown:
      listing = ", ".join(f"`{key}`: {self._values[key]!r}" for key in unknown)
      raise ValueError(
        f"{self.file} has unknown keys, which may change the result: "
        f"{listing}; remove the keys that have no effect."
      )
