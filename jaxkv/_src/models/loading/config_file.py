"""config.json, every key of which is read, known to be harmless, or refused."""

from typing import Any

_REQUIRED = object()

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


class ConfigFile:
  """The keys of a config.json, each of which must be accounted for."""

  def __init__(self, values: dict[str, Any], where: str):
    """Keys of the file, and its name for messages."""
    self.where = where
    self._values = values
    self._read: set[str] = set()

  def get(self, key: str, default: Any = _REQUIRED) -> Any:
    """A value; null counts as not being there.

    Raises:
      ValueError: the key is not there, and there is no default.
    """
    self._read.add(key)
    value = self._values.get(key)
    if value is not None:
      return value
    if default is _REQUIRED:
      raise ValueError(f"{self.where} lacks `{key}`; complete it.")
    return default

  def size(self, key: str, default: Any = _REQUIRED) -> int:
    """A value that must be an int of at least 1."""
    value = self.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
      raise ValueError(
        f"`{key}` in {self.where} must be an int of at least 1, got {value!r}."
      )
    return value

  def only(self, key: str, *allowed: Any) -> None:
    """Refuses a key unless it is missing, null or has a value that is built."""
    value = self.get(key, None)
    if value is not None and value not in allowed:
      known = " or ".join(repr(one) for one in allowed)
      raise ValueError(
        f"`{key}` in {self.where} must be {known or 'null'}, got {value!r}; "
        "anything else is not built."
      )

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
