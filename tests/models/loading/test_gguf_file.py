"""GGUF files: metadata, weights, and damage."""

import re
import sys
import time

import numpy as np
import pytest

from jaxkv import models
from jaxkv._src.models.decoder.rope import LinearScaling
from jaxkv._src.models.decoder.rope import Llama3Scaling
from jaxkv._src.models.decoder.rope import YarnScaling
from jaxkv._src.models.loading import gguf_checkpoint
from tests.models.loading import gguf_writing as writing

gguf = pytest.importorskip("gguf", reason="files are written by gguf")

TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K")
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")


def facts_of(architecture):
  options = {"attention.sliding_window": 32} if architecture == "gemma3" else {}
  return writing.sizes(**options)


def small(path, architecture="llama", facts=None, tensors=None):
  facts = facts_of(architecture) | (facts or {})
  tensors = writing.weights(architecture) | (tensors or {})
  return writing.write_gguf(path / "m.gguf", architecture, facts, tensors)


def quantised(type_name, rows, columns, seed=0):
  """Random bytes whose float16 parts are small numbers."""
  quantization = gguf.GGMLQuantizationType[type_name]
  block, num_bytes = gguf.GGML_QUANT_SIZES[quantization]
  random = np.random.default_rng(seed)
  data = random.integers(0, 256, (rows, columns // block, num_bytes), np.uint8)
  scale = random.uniform(0.01, 0.1, (rows, columns // block, 2))
  halves = scale.astype(np.float16).view(np.uint8)
  if type_name == "Q6_K":
    data[..., -2:] = halves[..., :2]
  elif type_name in ("Q4_1", "Q4_K"):
    data[..., :4] = halves
  else:
    data[..., :2] = halves[..., :2]
  return data.reshape(rows, -1), quantization


def interleaved(weight, heads):
  """Rows in the order of llama.cpp, one at a time."""
  head = weight.shape[0] // heads
  rows = []
  for head_row in range(0, weight.shape[0], head):
    for i in range(head // 2):
      rows += [weight[head_row + i], weight[head_row + head // 2 + i]]
  return np.stack(rows)


def stored(path):
  """The tensors by Hugging Face's names."""
  return gguf_checkpoint.open_checkpoint(path).tensors


def weight(path, name):
  tensor = stored(path)[name]
  values = tensor.read()
  assert (values.shape, values.dtype) == (tensor.shape, np.float32)
  return values


def decoder(path):
  return gguf_checkpoint.open_checkpoint(path).weight_map(np.float32).decoder


class TestMetadata:
  def test_metadata_are_those_of_the_package(self, tmp_path):
    facts = {
      "a.list": [1, -2, 3],
      "a.text": "Größe",
      "a.words": ["one", "", "Ġtwo"],
      "a.flag": True,
      "a.flags": [True, False],
      "a.fraction": 0.5,
    }
    path = small(tmp_path, facts=facts)
    metadata, tensors = gguf_checkpoint.read(gguf, path)
    reader = gguf.GGUFReader(path)
    for key, field in reader.fields.items():
      assert metadata.get(key) == field.contents(), key
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
      tensor.name: tuple(reversed(tensor.shape.tolist()))
      for tensor in reader.tensors
    }

  def test_metadata_of_a_large_vocabulary_are_read_fast(self, tmp_path):
    """262,144 tokens, as Gemma 3 has; the package's reader takes seconds."""
    facts = {
      "tokenizer.ggml.tokens": [f"token {i}" for i in range(1 << 18)],
      "tokenizer.ggml.scores": [0.5] * (1 << 18),
      "tokenizer.ggml.token_type": [1] * (1 << 18),
    }
    path = small(tmp_path, facts=facts)
    start_time = time.process_time()
    metadata, _ = gguf_checkpoint.read(gguf, path)
    assert time.process_time() - start_time < 2
    assert metadata.get("tokenizer.ggml.tokens")[-1] == "token 262143"

  @pytest.mark.parametrize("end", [0, 3, 7, 8, 20, 40, 300, 2000, -400, -1])
  def test_a_file_that_ends_early_is_refused(self, tmp_path, end):
    path = small(tmp_path)
    data = path.read_bytes()
    # Zeros after the last tensor belong to no tensor.
    end_offset = max(
      tensor.data_offset + tensor.n_bytes
      for tensor in gguf.GGUFReader(path).tensors
    )
    path.write_bytes(data[:end_offset][:end])
    with pytest.raises(
      ValueError, match="must be a complete, little-endian GGUF"
    ) as error:
      models.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)

  def test_every_damaged_byte_is_refused_or_read(self, tmp_path):
    """No damage leads to another error, to a hang or to gigabytes."""
    path = small(tmp_path)
    data = bytearray(path.read_bytes())
    data_offset = gguf.GGUFReader(path).data_offset
    for offset in range(0, data_offset, 3):
      damaged = bytearray(data)
      damaged[offset] ^= 0xFF
      path.write_bytes(damaged)
      try:
        models.load(path)
      except ValueError as error:
        assert str(path) in str(error) and "\n" not in str(error)

  @pytest.mark.parametrize("offset", [8, 16])
  def test_counts_are_bounded(self, tmp_path, offset):
    """Zeros can be read as any number of tensors without a name."""
    path = small(tmp_path)
    header = bytearray(path.read_bytes()[: gguf.GGUFReader(path).data_offset])
    header[offset : offset + 8] = (1 << 40).to_bytes(8, "little")
    path.write_bytes(header + bytes(1 << 25))
    start_time = time.process_time()
    with pytest.raises(
      ValueError, match="must be a complete, little-endian GGUF"
    ):
      models.load(path)
    assert time.process_time() - start_time < 2

  @pytest.mark.parametrize(
    "start", [b"PK\3\4", b"GGUF\1\0\0\0", b"GGUF\0\0\0\3"]
  )
  def test_a_file_of_another_format_is_refused(self, tmp_path, start):
    """No GGUF file, one of version 1, and a big-endian one."""
    path = small(tmp_path)
    path.write_bytes(start + path.read_bytes()[len(start) :])
    with pytest.raises(
      ValueError, match="little-endian GGUF file of version 2"
    ):
      models.load(path)

  def test_an_unsupported_type_is_named(self, tmp_path):
    tensors = {"blk.0.ffn_up.weight": np.zeros((96, 64), np.int32)}
    path = small(tmp_path, tensors=tensors)
    with pytest.raises(ValueError, match="I32") as error:
      models.load(path)
    assert str(path) in str(error.value)

  def test_a_missing_file_is_named(self, tmp_path):
    with pytest.raises(ValueError, match=r"no file .*none\.gguf; name a"):
      models.load(tmp_path / "none.gguf")


class TestWeights:
  @pytest.mark.parametrize("type_name", TYPES[3:])
  def test_values_are_those_of_the_package(self, tmp_path, type_name):
    data, quantization = quantised(type_name, 7, 512)
    name = "blk.0.ffn_up.weight"
    path = small(tmp_path, tensors={name: (data, type_name)})
    values = weight(path, "model.layers.0.mlp.up_proj.weight")
    expected = gguf.dequantize(data, quantization)
    assert values.shape == (7, 512) and np.isfinite(expected).all()
    np.testing.assert_array_equal(values, expected)

  @pytest.mark.parametrize("type_name", TYPES[:3])
  def test_plain_types_keep_their_numbers(self, tmp_path, type_name):
    quantization = gguf.GGMLQuantizationType[type_name]
    plain = np.random.default_rng(0).standard_normal((6, 64), np.float32)
    data = gguf.quantize(plain, quantization)
    tensor = (data, type_name) if type_name == "BF16" else data
    path = small(tmp_path, tensors={"output.weight": tensor})
    values = weight(path, "lm_head.weight")
    tolerance = {"F32": 0, "F16": 2**-10, "BF16": 2**-7}[type_name]
    np.testing.assert_allclose(values, plain, rtol=tolerance, atol=1e-6)

  def test_queries_and_keys_of_llama_are_put_back_in_order(self, tmp_path):
    plain = writing.weights("llama")
    tensors = {
      f"blk.0.attn_{name}.weight": interleaved(
        plain[f"blk.0.attn_{name}.weight"], heads
      )
      for name, heads in (("q", 4), ("k", 2))
    }
    path = small(tmp_path, tensors=tensors)
    for name in "qk":
      np.testing.assert_array_equal(
        weight(path, f"model.layers.0.self_attn.{name}_proj.weight"),
        plain[f"blk.0.attn_{name}.weight"],
      )
    np.testing.assert_array_equal(
      weight(path, "model.layers.0.self_attn.v_proj.weight"),
      plain["blk.0.attn_v.weight"],
    )

  @pytest.mark.parametrize("architecture", ARCHITECTURES[1:])
  def test_other_queries_are_in_order(self, tmp_path, architecture):
    path = small(tmp_path, architecture)
    np.testing.assert_array_equal(
      weight(path, "model.layers.1.self_attn.q_proj.weight"),
      writing.weights(architecture)["blk.1.attn_q.weight"],
    )

  def test_norms_of_gemma_have_no_offset(self, tmp_path):
    path = small(tmp_path, "gemma3")
    plain = writing.weights("gemma3")
    for name, source in (
      ("model.norm", "output_norm"),
      ("model.layers.0.input_layernorm", "blk.0.attn_norm"),
      ("model.layers.0.self_attn.q_norm", "blk.0.attn_q_norm"),
      ("model.layers.0.pre_feedforward_layernorm", "blk.0.ffn_norm"),
      ("model.layers.0.post_feedforward_layernorm", "blk.0.post_ffw_norm"),
      (
        "model.layers.0.post_attention_layernorm",
        "blk.0.post_attention_norm",
      ),
    ):
      np.testing.assert_array_equal(
        weight(path, f"{name}.weight"),
        plain[f"{source}.weight"] - np.float32(1),
      )
    np.testing.assert_array_equal(
      weight(path, "model.embed_tokens.weight"), plain["token_embd.weight"]
    )

  @pytest.mark.parametrize("architecture", ARCHITECTURES)
  def test_tensors_are_read_when_they_are_loaded(self, tmp_path, architecture):
    path = small(tmp_path, architecture)
    opened = gguf_checkpoint.open_checkpoint(path)
    with path.open("r+b") as file:
      file.seek(gguf.GGUFReader(path).tensors[0].data_offset)
      file.write(np.full(320 * 64, 7, np.float32).tobytes())
    assert (opened.tensors["model.embed_tokens.weight"].read() == 7).all()
    model = models.load(path, dtype=np.float32)
    assert (np.asarray(model.params["embed"]) == 7).all()

  def test_a_missing_package_is_named(self, tmp_path, monkeypatch):
    path = small(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r'pip install "jaxkv\[gguf\]"'):
      models.load(path)

  def test_unknown_tensors_are_refused_by_name(self, tmp_path):
    name = "blk.0.ffn_gate_inp.weight"
    path = small(tmp_path, tensors={name: np.zeros((4, 64), np.float32)})
    with pytest.raises(ValueError, match=re.escape(name)):
      models.load(path)


class TestConfig:
  def test_config_of_llama(self, tmp_path):
    facts = {
      ".rope.freq_base": 1e5,
      ".rope.dimension_count": 16,
      "tokenizer.ggml.eos_token_id": 2,
    }
    model = models.load(small(tmp_path, facts=facts), dtype=np.float32)
    assert model.config == models.llama(
      num_layers=2,
      embed_dim=64,
      num_heads=4,
      num_kv_heads=2,
      head_dim=16,
      mlp_dim=96,
      vocab_size=320,
      rope_base=1e5,
      norm_eps=1e-5,
      tied_embeddings=True,
      dtype=np.float32,
    )
    assert (model.max_length, model.stop_tokens) == (128, (2,))

  def test_config_of_gemma(self, tmp_path):
    facts = writing.sizes(block_count=7, attention__sliding_window=32)
    layers = decoder(small(tmp_path, "gemma3", facts)).layers
    windows = [layer.attention.window for layer in layers]
    assert windows == [32] * 5 + [None, 32]
    assert layers[0].attention.scale == 16**-0.5
    assert layers[0].attention.rope.base == 1e4
    assert layers[5].attention.rope.base == 1e6

  def test_config_of_the_largest_gemma(self, tmp_path):
    """Queries are scaled by width / heads, which is not the head size."""
    head = {"attention.key_length": 32, "attention.value_length": 32}
    facts = writing.sizes(block_count=62, attention__sliding_window=32, **head)
    tensors = {f"blk.{i}.other": np.ones(1, np.float32) for i in range(62)}
    tensors["blk.0.attn_q.weight"] = np.ones((4 * 32, 64), np.float32)
    path = small(tmp_path, "gemma3", facts, tensors)
    assert decoder(path).layers[0].attention.scale == 16**-0.5

  def test_config_of_gemma_with_windows_by_layer(self, tmp_path):
    facts = {".attention.sliding_window_pattern": [False, True]}
    layers = decoder(small(tmp_path, "gemma3", facts)).layers
    assert [layer.attention.window for layer in layers] == [None, 32]

  def test_an_untied_output_is_loaded(self, tmp_path):
    tensors = {"output.weight": np.ones((320, 64), np.float32)}
    model = models.load(small(tmp_path, tensors=tensors))
    assert not model.config.tied_embeddings
    assert model.params["unembed"].shape == (64, 320)

  @pytest.mark.parametrize(
    ("facts", "scaling"),
    [
      ({"type": "none"}, None),
      ({"type": "linear", "factor": 8.0}, LinearScaling(factor=8.0)),
      (
        {"type": "yarn", "factor": 4.0, "original_context_length": 32},
        YarnScaling(
          factor=4.0,
          original_length=32,
          attention_factor=0.1 * np.log(4.0) + 1,
        ),
      ),
    ],
  )
  def test_scaled_rope(self, tmp_path, facts, scaling):
    facts = {f".rope.scaling.{key}": value for key, value in facts.items()}
    layers = decoder(small(tmp_path, facts=facts)).layers
    assert layers[1].attention.rope.scaling == scaling

  @pytest.mark.parametrize("factor", [8.0, 32.0])
  def test_rope_of_llama_3(self, tmp_path, factor):
    """Divisors as a converter writes them, one frequency at a time."""
    divisors = []
    for i in range(0, 128, 2):
      wave = 2 * np.pi * 500_000 ** (i / 128)
      if wave < 8192 / 4:
        divisors.append(1.0)
      elif wave > 8192:
        divisors.append(factor)
      else:
        smooth = (8192 / wave - 1) / 3
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    rope = np.asarray(divisors, np.float32)
    facts = {".attention.key_length": 128, ".attention.value_length": 128}
    facts |= {".rope.freq_base": 5e5}
    tensors = {
      "rope_freqs.weight": rope,
      "blk.0.attn_q.weight": np.ones((4 * 128, 64), np.float32),
    }
    path = small(tmp_path, facts=facts, tensors=tensors)
    opened = gguf_checkpoint.open_checkpoint(path)
    layers = opened.weight_map(np.float32).decoder.layers
    assert layers[0].attention.rope.scaling == Llama3Scaling(
      factor=factor,
      low_frequency_factor=1.0,
      high_frequency_factor=4.0,
      original_length=8192,
    )
    assert all("rope" not in name for name in opened.tensors)
    rope[40] *= 1.01
    path = small(tmp_path, facts=facts, tensors=tensors)
    with pytest.raises(ValueError, match="Llama 3's scaling"):
      models.load(path)

  @pytest.mark.parametrize(
    ("facts", "named"),
    [
      ({".expert_count": 8}, r"`llama\.expert_count`: 8"),
      ({".rope.dimension_count": 8}, r"`llama\.rope\.dimension_count`.*got 8"),
      ({".rope.scaling.type": "su"}, r"`llama\.rope\.scaling\.type`.*got 'su'"),
      ({".rope.scaling.attn_factor": 2.0}, r"scaling\.attn_factor`.*got 2"),
      ({".attention.sliding_window": 9}, r"sliding_window`.*got 9"),
      ({".attention.head_count_kv": [1, 2]}, r"head_count_kv`.*got \[1, 2\]"),
      ({".block_count": 1 << 31}, r"block_count`.*got 2147483648"),
      ({"tokenizer.ggml.eos_token_id": "a"}, r"eos_token_id`.*got 'a'"),
      ({"split.count": 3}, r"`split\.count`.*must be .*got 3"),
    ],
  )
  def test_unsupported_facts_are_named(self, tmp_path, facts, named):
    path = small(tmp_path, facts=facts)
    with pytest.raises(ValueError, match=named) as error:
      models.load(path)
    assert str(path) in str(error.value)

  def test_a_count_of_zero_experts_is_ignored(self, tmp_path):
    facts = {".expert_count": 0}
    assert models.load(small(tmp_path, facts=facts)).max_length == 128

  def test_an_unknown_architecture_is_named(self, tmp_path):
    path = writing.write_gguf(tmp_path / "m.gguf", "mamba", {}, {})
    with pytest.raises(ValueError, match="got 'mamba'"):
      models.load(path)

  def test_a_missing_size_is_named(self, tmp_path):
    facts = facts_of("llama")
    del facts[".block_count"]
    tensors = writing.weights("llama")
    path = writing.write_gguf(tmp_path / "m.gguf", "llama", facts, tensors)
    with pytest.raises(ValueError, match=r"lacks `llama\.block_count`"):
      models.load(path)
