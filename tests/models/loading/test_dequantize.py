"""Whole checkpoints in few bits, and beside an encoder of pictures.

What is stored is unpacked here by its definition, given to `transformers`, and
its logits are compared with those of what `load` reads.
"""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkv import models
from tests.models.loading import families

# In numbers of 4 bits: sign, exponent, mantissa.
_FOUR_BITS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FOUR_BITS = np.concatenate([_FOUR_BITS, -_FOUR_BITS])


def _mxfp4(rng, shape):
  """Blocks and scales of experts, and their values [X, inputs, outputs]."""
  count, inputs, outputs = shape
  bits = rng.integers(0, 16, (count, outputs, inputs // 32, 32), np.uint8)
  scales = rng.integers(122, 125, (count, outputs, inputs // 32), np.uint8)
  values = (
    _FOUR_BITS[bits] * np.exp2(scales.astype(np.float32) - 127)[..., None]
  )
  blocks = bits[..., ::2] | (bits[..., 1::2] << 4)
  return blocks, scales, values.reshape(count, outputs, inputs).swapaxes(1, 2)


def _fp8(values, block):
  """A matrix in float8 with a scale for each block, and its float32 values."""
  rows, columns = (-(-n // block) for n in values.shape)
  scales = np.zeros((rows, columns), np.float32)
  packed = np.zeros(values.shape, ml_dtypes.float8_e4m3fn)
  wide = np.zeros_like(values)
  for row in range(rows):
    for column in range(columns):
      part = np.s_[
        row * block : (row + 1) * block, column * block : (column + 1) * block
      ]
      scale = np.float32(np.abs(values[part]).max() / 448)
      packed[part] = (values[part] / scale).astype(ml_dtypes.float8_e4m3fn)
      wide[part] = packed[part].astype(np.float32) * scale
      scales[row, column] = scale
  return packed, scales, wide


def _with(model, values):
  """Sets parameters by name."""
  import torch  # pyright: ignore[reportMissingImports]

  params = dict(model.named_parameters())
  with torch.no_grad():
    for name, value in values.items():
      params[name].copy_(torch.from_numpy(np.ascontiguousarray(value)))


def _saved(model, folder, tensors, **config):
  """Saves a model, and then other tensors in its file."""
  import torch  # pyright: ignore[reportMissingImports]
  from safetensors import torch as stored  # pyright: ignore

  model.save_pretrained(folder)
  path = folder / "model.safetensors"
  all_ = stored.load_file(path)
  for name, value in tensors.items():
    base = name.removesuffix("_blocks").removesuffix("_scales")
    all_.pop(base, None)
    if value.dtype == ml_dtypes.float8_e4m3fn:
      bits = torch.from_numpy(value.view(np.uint8).copy())
      all_[name] = bits.view(torch.float8_e4m3fn)
    else:
      all_[name] = torch.from_numpy(np.ascontiguousarray(value))
  stored.save_file(all_, path)
  path = folder / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | config))
  return models.load(folder, dtype=jnp.float32)


def _assert_equal(loaded, model):
  tokens = families.tokens()
  logits = families.uncached(loaded, tokens)
  expected = families.expected(model, tokens)
  np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-5)
  np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))


def test_gpt_oss_in_four_bits(transformers, tmp_path):
  model = families.model_of(transformers, "gpt-oss", intermediate_size=64)
  rng = np.random.default_rng(0)
  tensors = {}
  values = {}
  for layer in range(4):
    for name, shape in {
      "gate_up_proj": (6, 32, 128),
      "down_proj": (6, 64, 32),
    }.items():
      name = f"model.layers.{layer}.mlp.experts.{name}"
      blocks, scales, values[name] = _mxfp4(rng, shape)
      tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
  _with(model, values)
  method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.norm"]}
  loaded = _saved(model, tmp_path, tensors, quantization_config=method)
  _assert_equal(loaded, model)


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Qwen3"])
def test_blocks_of_float8(name, transformers, tmp_path):
  model = families.model_of(transformers, name)
  model.save_pretrained(tmp_path / "float32")
  from safetensors import numpy as stored  # pyright: ignore

  whole = stored.load_file(tmp_path / "float32" / "model.safetensors")
  block = 16
  tensors = {}
  wide = {}
  for tensor, value in whole.items():
    if "_proj" in tensor and value.ndim == 2:
      packed, scales, wide[tensor] = _fp8(value, block)
      tensors |= {tensor: packed, f"{tensor}_scale_inv": scales}
  assert len(tensors) > 40
  stored.save_file(whole | wide, tmp_path / "float32" / "model.safetensors")
  prefix = families.FAMILIES[name][0]
  reference = getattr(transformers, f"{prefix}ForCausalLM").from_pretrained(
    tmp_path / "float32", attn_implementation="eager"
  )
  if hasattr(reference.config, "_experts_implementation"):
    reference.config._experts_implementation = "eager"
  method = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [block, block],
  }
  loaded = _saved(
    model, tmp_path / "float8", tensors, quantization_config=method
  )
  _assert_equal(loaded, reference.eval().float())


def test_the_text_model_of_a_multimodal_checkpoint(transformers, tmp_path):
  import torch  # pyright: ignore[reportMissingImports]

  prefix, changes = families.FAMILIES["Gemma 3"]
  text = transformers.Gemma3TextConfig(**(families.SIZES | changes))
  config = transformers.Gemma3Config(
    text_config=text.to_dict(),
    vision_config={
      "hidden_size": 16,
      "intermediate_size": 32,
      "num_hidden_layers": 2,
      "num_attention_heads": 2,
      "image_size": 28,
      "patch_size": 14,
    },
    mm_tokens_per_image=4,
    image_token_index=95,
    boi_token_index=94,
    eoi_token_index=93,
  )
  config._attn_implementation = "eager"
  torch.manual_seed(0)
  model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
  model = families.randomized(model)
  model.save_pretrained(tmp_path)
  loaded = models.load(tmp_path, dtype=jnp.float32)
  tokens = np.minimum(families.tokens(), 92)
  logits = families.uncached(loaded, tokens)
  expected = families.expected(model, tokens)
  np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-5)
