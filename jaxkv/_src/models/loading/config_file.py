"""config.json, every key of which is read, known to be harmless, or refused."""

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
"""Keys of training, of other programs and of tokens: no logit depends on them.
`quantization_config` is read before."""


_MOST = 2**31 - 1
_LISTED = {
  "num_hidden_layers",
  "num_experts",
  "num_local_experts",
  "n_routed_experts",
  "num_nextn_predict_layers",
}
"""Counts that a checkpoint has tensors for."""


class ConfigFile:
  """The typed values of a config.json, each of which must be accounted for.

  Every method raises a ValueError that names the file and the key if the value
  is missing and there is no default, or if it has another type. A value of
  null counts as missing.
  """

  def __init__(
    self, values: dict[str, Any], where: str, *, num_tensors: int = _MOST
  ):
    """Wraps the values of a file.

    Args:
      values: of the JSON object.
      where: the name of the file, for messages.
      num_tensors: how many tensors the checkpoint has; it cannot have more
        layers or experts.
    """
    self.where = where
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
      raise ValueError(f"{self.where} lacks `{key}`; complete it.")
    return default

  def size(self, key: str, default: Any = _REQUIRED) -> Any:
    """Returns an int of at least 1, or a default of None."""
    return self._int(key, default, 1)

  def count(self, key: str, default: Any = _REQUIRED) -> int:
    """Returns an int of at least 0."""
    return self._int(key, default, 0)

  def number(self, key: str, default: Any = _REQUIRED) -> Any:
    """Returns a finite float, or a default of None."""
    value = self.get(key, default)
    if value is None:
      return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # An int of 400 digits has no float.
    if not is_number or not -_LARGEST <= value <= _LARGEST:
      raise self.wrong(key, "a finite number")
    return float(value)

  def flag(self, key: str, default: Any = _REQUIRED) -> bool:
    """Returns a bool."""
    value = self.get(key, default)
    if not isinstance(value, bool):
      raise self.wrong(key, "true or false")
    return value

  def table(self, key: str) -> dict[str, Any]:
    """Returns an object, which is empty if the key is missing."""
    value = self.get(key, {})
    if not isinstance(value, dict):
      raise self.wrong(key, "an object")
    return value

  def items(self, key: str, kind: type, default: Any = _REQUIRED) -> list[Any]:
    """Returns a list whose items have one type."""
    value = self.get(key, default)
    if not isinstance(value, list) or not all(type(x) is kind for x in value):
      raise self.wrong(key, f"a list of {kind.__name__}")
    return value

  def wrong(self, key: str, wanted: str) -> ValueError:
    """Returns the error of a value that is not what is wanted."""
    text = repr(self._values.get(key))
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return ValueError(f"`{key}` in {self.where} must be {wanted}, got {text}.")

  def _int(self, key: str, default: Any, least: int) -> Any:
    value = self.get(key, default)
    if value is None:
      return None
    most = self._num_tensors if key in _LISTED else _MOST
    if type(value) is not int or value < least:
      raise self.wrong(key, f"an int of at least {least}")
    if value > most:
      raise self.wrong(
        key, f"at most {most}" + " tensors, as there are" * (most < _MOST)
      )
    return value

  def only(self, key: str, *allowed: Any) -> None:
    """Refuses a key unless it is missing, null or has a value that is built."""
    value = self.get(key, None)
    if value is not None and value not in allowed:
      known = " or ".join(repr(one) for one in allowed)
      raise self.wrong(key, f"{known or 'null'}; nothing else is built")

  def ignore(self, *keys: str) -> None:
    """Marks keys that change nothing in a family."""
    self._read.update(keys)

  def check_all_read(self) -> None:
    """Refuses keys that nobody has read and that may change the result."""
    unknown = [
      key
      for key, value in self._values.items()
      if value is not None and key not in self._read | _HARMLESS
    ]
    if unknown:
      named = ", ".join(f"`{key}`: {self._values[key]!r}" for key in unknown)
      raise ValueError(
        f"{self.where} has keys that are not known and may change the result: "
        f"{named}; remove them there if they do not."
      )
