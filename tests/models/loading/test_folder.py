"""Folders that cannot be used, and weights in few bits."""

import json
import struct

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkv import models
from jaxkv._src.models.loading import checkpoint_folder
from jaxkv._src.models.loading import dequantize
from tests.models.loading.llama_folder import CONFIG
from tests.models.loading.llama_folder import stored
from tests.models.loading.llama_folder import tensors
from tests.models.loading.llama_folder import write_tensors


def _change(folder, **values):
  path = folder / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _refused(folder, *words):
  with pytest.raises(ValueError) as caught:
    models.load(folder)
  message = str(caught.value)
  assert "\n" not in message
  for word in words:
    assert word in message, message


class TestFolder:
  def test_weights_keep_their_type_and_place(self, folder):
    model = models.load(folder)
    rows = tensors()
    assert model.config.dtype == jnp.bfloat16
    assert (model.max_length, model.stop_tokens) == (64, (2,))
    (segment,) = model.params["layers"]
    query = rows["model.layers.1.self_attn.q_proj.weight"].T.reshape(8, 2, 4)
    loaded_query = np.asarray(segment[0]["query"][1])
    np.testing.assert_array_equal(
      loaded_query, query.astype(ml_dtypes.bfloat16)
    )
    wide = models.load(folder, dtype=jnp.float32)
    assert wide.params["embed"].dtype == jnp.float32

  def test_a_dtype_of_the_outer_table_is_read(self, folder):
    """Multimodal checkpoints have it outside of `text_config`."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    dtype = values.pop("torch_dtype", None) or values.pop("dtype")
    names = {"architectures": values.pop("architectures"), "torch_dtype": dtype}
    path.write_text(json.dumps(names | {"text_config": values}))
    assert models.load(folder).config.dtype == jnp.bfloat16

  @pytest.mark.parametrize(
    ("architecture", "length"),
    [
      ("Gemma3ForConditionalGeneration", 131_072),
      ("LlamaForCausalLM", 2048),
    ],
  )
  def test_a_missing_length_is_the_default_of_the_family(
    self, folder, architecture, length
  ):
    _change(folder, architectures=[architecture], max_position_embeddings=None)
    checkpoint = checkpoint_folder.open_checkpoint(folder)
    assert checkpoint.max_length == length

  def test_a_given_dtype_replaces_an_unknown_one(self, folder):
    _change(folder, torch_dtype="float64", dtype="float64")
    _refused(folder, "float64", "name one in `load(dtype=)`")
    model = models.load(folder, dtype=jnp.float32)
    assert model.config.dtype == jnp.float32

  def test_generation_config_names_more_stop_tokens(self, folder):
    path = folder / "generation_config.json"
    path.write_text('{"eos_token_id": [2, 7]}')
    assert models.load(folder).stop_tokens == (2, 7)

  def test_shards_are_read_together(self, folder):
    whole = tensors()
    names = sorted(whole)
    homes = {
      name: f"model-{1 + i % 2}.safetensors" for i, name in enumerate(names)
    }
    for home in set(homes.values()):
      shard = {name: whole[name] for name in names if homes[name] == home}
      write_tensors(folder / home, shard)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": homes}))
    assert models.load(folder).config.num_layers == 2
    (folder / "model-2.safetensors").unlink()
    _refused(folder, "lacks the shard model-2.safetensors")

  @pytest.mark.parametrize("num_bytes", [0, 5, 200, -1])
  def test_truncated_tensors_are_refused(self, folder, num_bytes):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    _refused(folder, "model.safetensors", "truncated")

  def test_damaged_headers_are_refused(self, folder):
    path = folder / "model.safetensors"
    for text in (b"no", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32"}}'):
      path.write_bytes(struct.pack("<Q", len(text)) + text)
      _refused(folder, "damaged header")
    entry = {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}
    text = json.dumps({"a": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    _refused(folder, "a, float32 of shape [3]")

  def test_a_tensor_of_another_shape_is_refused(self, folder):
    changed_tensors = tensors() | {"model.norm.weight": np.zeros(9, np.float32)}
    write_tensors(folder / "model.safetensors", changed_tensors)
    _refused(folder, "model.norm.weight", "[8]", "[9]")

  @pytest.mark.parametrize(
    ("values", "words"),
    [
      ({"architectures": ["Mamba"]}, ("architectures", "Mamba")),
      ({"mlp_bias": True}, ("mlp_bias",)),
      ({"hidden_act": "relu2"}, ("hidden_act", "relu2")),
      ({"hidden_size": "8"}, ("hidden_size",)),
      ({"rope_scaling": {"type": "dynamic", "factor": 2}}, ("dynamic",)),
      ({"rope_scaling": {"rope_type": "longrope"}}, ("longrope",)),
      ({"rope_scaling": {"type": "linear"}}, ("`factor`",)),
      ({"quantization_config": {"quant_method": "awq"}}, ("awq",)),
      ({"dtype": "int8"}, ("int8",)),
      ({"num_hidden_layers": 3}, ("lacks tensors: model.layers.2.",)),
      ({"num_hidden_layers": 1}, ("not known: model.layers.1.",)),
      ({"vocab_size": None}, ("lacks `vocab_size`",)),
      ({"tie_word_embeddings": True, "surprise": 1}, ("`surprise`: 1",)),
    ],
  )
  def test_unsupported_configurations_are_refused(self, folder, values, words):
    _change(folder, **values)
    _refused(folder, *words)

  def test_a_page_size_of_zero_is_refused(self, folder):
    model = models.load(folder)
    with pytest.raises(ValueError, match="`page_size` must be at least 1"):
      model.cache_config(num_pages=2, num_slots=1, page_size=0)

  def test_sources_of_other_types_are_refused(self, tmp_path):
    for source in (5, None, [tmp_path]):
      with pytest.raises(TypeError, match="`source` must be a folder, a"):
        models.load(source)

  def test_missing_files_are_refused(self, tmp_path):
    _refused(tmp_path / "nothing", "`source` must be")
    _refused(tmp_path, "config.json")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    _refused(tmp_path, "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    _refused(tmp_path, "pytorch_model.bin")

  def test_a_missing_tokenizer_is_refused(self, folder):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
      _ = models.load(folder).tokenizer


class TestFewBits:
  def test_fp8_blocks(self):
    draw = np.random.default_rng(0)
    packed = draw.normal(size=(5, 7)).astype(ml_dtypes.float8_e4m3fn)
    scales = draw.uniform(1, 2, (3, 2)).astype(np.float32)
    parts = {"w": stored(packed), "w_scale_inv": stored(scales)}
    (tensor,) = dequantize.fp8_blocks(parts, (2, 4)).values()
    for (i, j), value in np.ndenumerate(tensor.read()):
      expected = np.float32(packed[i, j]) * scales[i // 2, j // 4]
      assert value == expected
    with pytest.raises(ValueError, match="w_scale_inv must have shape"):
      dequantize.fp8_blocks(parts, (2, 2))

  def test_mxfp4(self):
    draw = np.random.default_rng(0)
    blocks = draw.integers(0, 256, (2, 3, 2, 16), np.uint8)
    scales = draw.integers(120, 134, (2, 3, 2), np.uint8)
    parts = {"w_blocks": stored(blocks), "w_scales": stored(scales)}
    (tensor,) = dequantize.mxfp4(parts).values()
    assert tensor.read().shape == tensor.shape == (2, 64, 3)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for (x, i, o), value in np.ndenumerate(tensor.read()):
      group, offset = divmod(i, 32)
      byte = int(blocks[x, o, group, offset // 2])
      bits = byte >> 4 if offset % 2 else byte & 15
      sign = -1 if bits & 8 else 1
      exponent = int(scales[x, o, group]) - 127
      assert value == sign * magnitudes[bits & 7] * 2.0**exponent
