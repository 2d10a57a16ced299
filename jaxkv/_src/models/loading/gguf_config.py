"""The sizes in a GGUF file, as Hugging Face's `config.json` says them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxkv._src.models.loading.gguf_header import GgufHeader

_PREFIX_OF_SCALING = "rope.scaling."
# What a fact is called in a `config.json`.
_SIZES = {
  "block_count": "num_hidden_layers",
  "context_length": "max_position_embeddings",
  "embedding_length": "hidden_size",
  "feed_forward_length": "intermediate_size",
  "attention.head_count": "num_attention_heads",
  "attention.head_count_kv": "num_key_value_heads",
  "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
# Facts that are looked at below, and facts that change nothing here.
_READ = {
  "attention.key_length",
  "attention.value_length",
  "attention.sliding_window",
  "attention.sliding_window_pattern",
  "rope.dimension_count",
  "rope.freq_base",
  "rope.freq_base_swa",
  "vocab_size",
}
_IDLE = {"tensor_data_layout"}
_MODELS = {
  "llama": ("LlamaForCausalLM", "llama"),
  "qwen2": ("Qwen2ForCausalLM", "qwen2"),
  "qwen3": ("Qwen3ForCausalLM", "qwen3"),
  "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
_ROPE_BASES = {"gemma3": 1e6, "llama": 1e4, "qwen2": 1e4, "qwen3": 1e4}
_GEMMA_PERIOD = 6
_GEMMA_27B_LAYERS = 62
_TOKENS = {
  "bos_token_id": "bos_token_id",
  "eos_token_id": "eos_token_id",
  "padding_token_id": "pad_token_id",
}
# The one form in which Llama 3's scaling of long waves is published.
_LLAMA3 = {
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8192,
}


def config_of(header: GgufHeader) -> dict[str, Any]:
  """What a `config.json` of the same model says.

  Args:
    header: the file's facts, and its tensors' shapes.

  Raises:
    ValueError: the architecture is not known, a size is missing, or a fact is
      not known that may change what the model computes; one line that names
      the file.
  """
  architecture = header.facts.get("general.architecture")
  if architecture not in _MODELS:
    raise ValueError(
      f"`{header.path}` must have one of the architectures "
      f"{', '.join(_MODELS)}, got {architecture!r}."
    )
  facts = _Facts(header, architecture)
  facts.check_known()
  model_class, model_type = _MODELS[architecture]
  config = {"architectures": [model_class], "model_type": model_type}
  config |= {key: facts.one(fact) for fact, key in _SIZES.items()}
  width, heads = config["hidden_size"], config["num_attention_heads"]
  config["head_dim"] = facts.head_dim(width // heads)
  config["vocab_size"] = facts.rows("token_embd.weight")
  config["tie_word_embeddings"] = "output.weight" not in header.tensors
  base = facts.get("rope.freq_base", _ROPE_BASES[architecture])
  config["rope_theta"] = float(base)
  config["rope_scaling"] = facts.scaling(config)
  config |= facts.tokens()
  if architecture == "gemma3":
    return config | _gemma(facts, config)
  config |= {"hidden_act": "silu"}
  if architecture == "llama":
    biased = "blk.0.attn_output.bias" in header.tensors
    config |= {"attention_bias": biased, "mlp_bias": False}
  return config


def _gemma(facts: "_Facts", config: Mapping[str, Any]) -> dict[str, Any]:
  """What Gemma 3 has besides; the largest scales queries by its width."""
  layers = config["num_hidden_layers"]
  local, whole = "sliding_attention", "full_attention"
  pattern = facts.get("attention.sliding_window_pattern", _GEMMA_PERIOD)
  if np.ndim(pattern) == 0:
    period = int(pattern)
    pattern = [(layer + 1) % period != 0 for layer in range(layers)]
  scale = config["head_dim"]
  if layers == _GEMMA_27B_LAYERS:
    scale = config["hidden_size"] // config["num_attention_heads"]
  return {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": scale,
    "sliding_window": int(facts.one("attention.sliding_window")),
    "layer_types": [local if slides else whole for slides in pattern],
    "rope_local_base_freq": float(facts.get("rope.freq_base_swa", 1e4)),
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
  }


class _Facts:
  """The facts of one architecture in a file."""

  def __init__(self, header: GgufHeader, architecture: str):
    self._header = header
    self._prefix = f"{architecture}."

  def check_known(self) -> None:
    known = _SIZES.keys() | _READ | _IDLE
    for key, value in self._header.facts.items():
      fact = key.removeprefix(self._prefix)
      if fact == key or fact in known or fact.startswith(_PREFIX_OF_SCALING):
        continue
      if np.ndim(value) == 0 and not value:
        continue  # none of something
      raise self._wrong(f"facts that are known, got {key!r} = {value!r}")
    if self._prefix != "gemma3." and self.get("attention.sliding_window"):
      raise self._wrong("no window", "attention.sliding_window")

  def get(self, fact: str, default: Any = None) -> Any:
    return self._header.facts.get(self._prefix + fact, default)

  def one(self, fact: str) -> Any:
    """A number that all layers share."""
    value = self.get(fact)
    if value is None and fact == "attention.head_count_kv":
      value = self.get("attention.head_count")
    if value is None:
      raise self._wrong(f"{self._prefix}{fact}, got none")
    if len(set(np.atleast_1d(value).tolist())) != 1:
      raise self._wrong("one for all layers", fact)
    number = np.atleast_1d(value)[0].item()
    # The nearest number that people write: 1e-5, not 9.99999974e-6.
    return float(str(np.float32(number))) if number < 1 else number

  def rows(self, tensor: str) -> int:
    if tensor not in self._header.tensors:
      raise self._wrong(f"a tensor {tensor!r}, got none")
    return self._header.tensors[tensor].shape[0]

  def head_dim(self, default: int) -> int:
    size = int(self.get("attention.key_length", default))
    for fact in ("attention.value_length", "rope.dimension_count"):
      if int(self.get(fact, size)) != size:
        raise self._wrong(f"{size}, as many as a key has", fact)
    return size

  def scaling(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """`rope_scaling`; None for none."""
    kind = self.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in self._header.tensors:
      return self._llama3(config)
    if kind == "none":
      return None
    factor = float(self.get("rope.scaling.factor", 1.0))
    if kind == "linear":
      return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
      raise self._wrong("none, linear or yarn", "rope.scaling.type")
    if self.get("rope.scaling.attn_factor", 1.0) != 1.0:
      raise self._wrong("1", "rope.scaling.attn_factor")
    original = self.get("rope.scaling.original_context_length")
    return {
      "rope_type": "yarn",
      "factor": factor,
      "original_max_position_embeddings": int(
        original or config["max_position_embeddings"]
      ),
    }

  def _llama3(self, config: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling that a file stores as one divisor for each frequency."""
    divisors = self._divisors()
    factor = float(divisors.max(initial=1.0))
    size = config["head_dim"]
    exponents = np.arange(0, size, 2, dtype=np.float64) / size
    waves = 2 * np.pi * config["rope_theta"] ** exponents
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    turns = _LLAMA3["original_max_position_embeddings"] / waves
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    wanted = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != wanted.shape or not np.allclose(
      divisors, wanted, rtol=1e-4
    ):
      raise self._wrong("Llama 3's scaling, got other 'rope_freqs.weight'")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}

  def _divisors(self) -> np.ndarray:
    tensor = self._header.tensors["rope_freqs.weight"]
    if tensor.type != "F32":
      raise self._wrong(f"F32 in 'rope_freqs.weight', got {tensor.type}")
    return np.fromfile(
      self._header.path, "<f4", int(np.prod(tensor.shape)), offset=tensor.offset
    )

  def tokens(self) -> dict[str, Any]:
    """The ids of the tokens that start, end and fill a text."""
    found = {
      key: self._header.facts.get(f"tokenizer.ggml.{fact}")
      for fact, key in _TOKENS.items()
    }
    return {
      key: int(token) for key, token in found.items() if token is not None
    }

  def _wrong(self, wanted: str, fact: str | None = None) -> ValueError:
    path = self._header.path
    if fact is None:
      return ValueError(f"`{path}` must have {wanted}.")
    value = self.get(fact)
    if isinstance(value, np.ndarray):
      value = value.tolist()
    return ValueError(
      f"`{path}` must have {wanted} as {self._prefix}{fact}, got {value!r}."
    )
