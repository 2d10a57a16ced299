"""GGUF files: what they say of themselves, and their weights."""

import re
import sys

import numpy as np
import pytest

from jaxkv._src.models.loading import gguf_file
from jaxkv._src.models.loading import gguf_header
from tests.models.loading import gguf_writing as writing

gguf = pytest.importorskip("gguf", reason="files are written by gguf")

TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K")
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")


def facts_of(architecture):
  more = {"attention.sliding_window": 32} if architecture == "gemma3" else {}
  return writing.sizes(**more)


def small(path, architecture="llama", facts=None, tensors=None):
  facts = facts_of(architecture) | (facts or {})
  tensors = writing.weights(architecture) | (tensors or {})
  return writing.write_gguf(path / "m.gguf", architecture, facts, tensors)


def quantised(kind, rows, columns, seed=0):
  """Random bytes whose float16 parts are small numbers."""
  number = gguf.GGMLQuantizationType[kind]
  block, size = gguf.GGML_QUANT_SIZES[number]
  random = np.random.default_rng(seed)
  data = random.integers(0, 256, (rows, columns // block, size), np.uint8)
  scale = random.uniform(0.01, 0.1, (rows, columns // block, 2))
  halves = scale.astype(np.float16).view(np.uint8)
  if kind == "Q6_K":
    data[..., -2:] = halves[..., :2]
  elif kind in ("Q4_1", "Q4_K"):
    data[..., :4] = halves
  else:
    data[..., :2] = halves[..., :2]
  return data.reshape(rows, -1), number


def interleaved(weight, heads):
  """Rows in the order of llama.cpp, one at a time."""
  head = weight.shape[0] // heads
  rows = []
  for first in range(0, weight.shape[0], head):
    for place in range(head // 2):
      rows += [weight[first + place], weight[first + head // 2 + place]]
  return np.stack(rows)


class TestHeader:
  def test_is_what_the_package_reads(self, tmp_path):
    facts = {
      "a.list": [1, -2, 3],
      "a.text": "Größe",
      "a.words": ["one", "", "Ġtwo"],
      "a.flag": True,
      "a.flags": [True, False],
      "a.fraction": 0.5,
    }
    path = small(tmp_path, facts=facts)
    header = gguf_header.read_gguf_header(path)
    reader = gguf.GGUFReader(path)
    wanted = {
      key: field.contents()
      for key, field in reader.fields.items()
      if not key.startswith("GGUF.")
    }
    found = {
      key: value.tolist() if isinstance(value, np.ndarray) else value
      for key, value in header.facts.items()
    }
    assert found == wanted
    assert {
      name: (tensor.shape, tensor.type, tensor.offset)
      for name, tensor in header.tensors.items()
    } == {
      tensor.name: (
        tuple(reversed(tensor.shape.tolist())),
        tensor.tensor_type.name,
        tensor.data_offset,
      )
      for tensor in reader.tensors
    }

  @pytest.mark.parametrize("kept", [0, 3, 7, 8, 20, 40, 300, 2000, -400, -1])
  def test_a_file_that_ends_early_is_refused(self, tmp_path, kept):
    path = small(tmp_path)
    data = path.read_bytes()
    # Zeros after the last tensor belong to no tensor.
    end = max(
      tensor.offset + tensor.num_blocks * tensor.block_bytes
      for tensor in gguf_header.read_gguf_header(path).tensors.values()
    )
    path.write_bytes(data[:end][:kept])
    with pytest.raises(ValueError, match=re.escape(str(path))) as error:
      gguf_header.read_gguf_header(path)
    assert "\n" not in str(error.value)

  def test_every_damaged_byte_is_refused_or_read(self, tmp_path):
    """No damage leads to another error, to a hang or to gigabytes."""
    path = small(tmp_path)
    data = bytearray(path.read_bytes())
    first = min(
      tensor.offset
      for tensor in gguf_header.read_gguf_header(path).tensors.values()
    )
    for place in range(0, first, 3):
      damaged = bytearray(data)
      damaged[place] ^= 0xFF
      path.write_bytes(damaged)
      try:
        gguf_file.read_gguf(path)
      except ValueError as error:
        assert str(path) in str(error) and "\n" not in str(error)

  def test_another_file_is_refused(self, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\3\4 something else")
    with pytest.raises(ValueError, match="must be a GGUF file, got one that"):
      gguf_header.read_gguf_header(path)

  def test_an_old_version_is_refused(self, tmp_path):
    path = small(tmp_path)
    data = bytearray(path.read_bytes())
    data[4] = 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="got version 1"):
      gguf_header.read_gguf_header(path)

  def test_a_part_is_refused(self, tmp_path):
    path = small(tmp_path, facts={"split.count": 3})
    with pytest.raises(ValueError, match="one of 3 parts"):
      gguf_header.read_gguf_header(path)

  def test_a_type_that_is_not_read_is_named(self, tmp_path):
    data = np.zeros((64, 176), np.uint8)
    tensors = {"blk.0.ffn_up.weight": (data, "Q5_K")}
    path = small(tmp_path, tensors=tensors)
    with pytest.raises(ValueError, match=r"got Q5_K for 'blk\.0\.ffn_up"):
      gguf_header.read_gguf_header(path)

  def test_a_missing_file_is_named(self, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.gguf"):
      gguf_header.read_gguf_header(tmp_path / "none.gguf")


class TestWeights:
  @pytest.mark.parametrize("kind", TYPES[3:])
  def test_equal_the_package_s(self, tmp_path, kind, monkeypatch):
    monkeypatch.setattr(gguf_file, "_CHUNK", 5)
    data, number = quantised(kind, 7, 512)
    name = "blk.0.ffn_up.weight"
    path = small(tmp_path, tensors={name: (data, kind)})
    weight = gguf_file.read_gguf(path)[1]["model.layers.0.mlp.up_proj.weight"]
    wanted = gguf.dequantize(data, number)
    assert weight.dtype == np.float32 and weight.shape == (7, 512)
    assert np.isfinite(wanted).all()
    np.testing.assert_array_equal(weight, wanted)

  @pytest.mark.parametrize("kind", TYPES[:3])
  def test_plain_types_keep_their_numbers(self, tmp_path, kind):
    number = gguf.GGMLQuantizationType[kind]
    weight = np.random.default_rng(0).standard_normal((6, 64), np.float32)
    data = gguf.quantize(weight, number)
    tensor = (data, kind) if kind == "BF16" else data
    path = small(tmp_path, tensors={"output.weight": tensor})
    found = gguf_file.read_gguf(path)[1]["lm_head.weight"]
    tolerance = {"F32": 0, "F16": 2**-10, "BF16": 2**-7}[kind]
    np.testing.assert_allclose(found, weight, rtol=tolerance, atol=1e-6)

  def test_of_q4_1_and_q8_0_by_their_definition(self, tmp_path):
    four, _ = quantised("Q4_1", 1, 32)
    eight, _ = quantised("Q8_0", 1, 32)
    tensors = {
      "blk.0.ffn_up.weight": (four, "Q4_1"),
      "blk.1.ffn_up.weight": (eight, "Q8_0"),
    }
    found = gguf_file.read_gguf(small(tmp_path, tensors=tensors))[1]
    scale, least = four[0, :4].view(np.float16).astype(np.float32)
    nibbles = [*(four[0, 4:] & 15), *(four[0, 4:] >> 4)]
    np.testing.assert_allclose(
      found["model.layers.0.mlp.up_proj.weight"][0],
      [scale * nibble + least for nibble in nibbles],
      rtol=1e-6,
    )
    scale = eight[0, :2].view(np.float16).astype(np.float32)
    np.testing.assert_allclose(
      found["model.layers.1.mlp.up_proj.weight"][0],
      scale * eight[0, 2:].view(np.int8),
      rtol=1e-6,
    )

  def test_queries_and_keys_of_llama_are_put_back_in_order(self, tmp_path):
    plain = writing.weights("llama")
    stored = {
      f"blk.0.attn_{name}.weight": interleaved(
        plain[f"blk.0.attn_{name}.weight"], heads
      )
      for name, heads in (("q", 4), ("k", 2))
    }
    found = gguf_file.read_gguf(small(tmp_path, tensors=stored))[1]
    for name in "qk":
      np.testing.assert_array_equal(
        found[f"model.layers.0.self_attn.{name}_proj.weight"],
        plain[f"blk.0.attn_{name}.weight"],
      )
    np.testing.assert_array_equal(
      found["model.layers.0.self_attn.v_proj.weight"],
      plain["blk.0.attn_v.weight"],
    )

  @pytest.mark.parametrize("architecture", ARCHITECTURES[1:])
  def test_queries_of_others_are_in_order(self, tmp_path, architecture):
    found = gguf_file.read_gguf(small(tmp_path, architecture))[1]
    np.testing.assert_array_equal(
      found["model.layers.1.self_attn.q_proj.weight"],
      writing.weights(architecture)["blk.1.attn_q.weight"],
    )

  def test_norms_of_gemma_have_no_offset(self, tmp_path):
    found = gguf_file.read_gguf(small(tmp_path, "gemma3"))[1]
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
        found[f"{name}.weight"], plain[f"{source}.weight"] - np.float32(1)
      )
    np.testing.assert_array_equal(
      found["model.embed_tokens.weight"], plain["token_embd.weight"]
    )

  @pytest.mark.parametrize("architecture", ARCHITECTURES)
  def test_are_those_that_transformers_has(self, tmp_path, architecture):
    reason = "names and shapes are compared with its own"
    transformers = pytest.importorskip("transformers", reason=reason)
    torch = pytest.importorskip("torch", reason=reason)
    head = {"attention.key_length": 16, "attention.value_length": 16}
    path = small(tmp_path, architecture, facts=writing.sizes(**head))
    if architecture == "gemma3":
      window = {"attention.sliding_window": 32}
      path = small(tmp_path, architecture, writing.sizes(**head, **window))
    config, tensors = gguf_file.read_gguf(path)
    plain = {key: value for key, value in config.items() if value is not None}
    kind = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
      model = kind(kind.config_class(**plain))
    assert {
      name: tuple(tensor.shape)
      for name, tensor in model.state_dict().items()
      if name != "lm_head.weight"
    } == {name: tensors.shape(name) for name in tensors}

  def test_need_the_package(self, tmp_path, monkeypatch):
    path = small(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r'pip install "jaxkv\[gguf\]"'):
      gguf_file.read_gguf(path)

  def test_unknown_ones_are_refused_by_name(self, tmp_path):
    name = "blk.0.ffn_gate_inp.weight"
    path = small(tmp_path, tensors={name: np.zeros((4, 64), np.float32)})
    with pytest.raises(ValueError, match=re.escape(name)):
      gguf_file.read_gguf(path)


class TestConfig:
  def test_of_llama(self, tmp_path):
    facts = {
      ".rope.freq_base": 1e5,
      ".rope.dimension_count": 16,
      "tokenizer.ggml.eos_token_id": 2,
    }
    assert gguf_file.read_gguf(small(tmp_path, facts=facts))[0] == {
      "architectures": ["LlamaForCausalLM"],
      "model_type": "llama",
      "num_hidden_layers": 2,
      "max_position_embeddings": 128,
      "hidden_size": 64,
      "intermediate_size": 96,
      "num_attention_heads": 4,
      "num_key_value_heads": 2,
      "rms_norm_eps": 1e-5,
      "head_dim": 16,
      "vocab_size": 320,
      "tie_word_embeddings": True,
      "rope_theta": 1e5,
      "rope_scaling": None,
      "eos_token_id": 2,
      "hidden_act": "silu",
      "attention_bias": False,
      "mlp_bias": False,
    }

  def test_of_gemma(self, tmp_path):
    facts = writing.sizes(block_count=7, attention__sliding_window=32)
    config, _ = gguf_file.read_gguf(small(tmp_path, "gemma3", facts))
    local = "sliding_attention"
    wanted = [local] * 5 + ["full_attention", local]
    assert config["layer_types"] == wanted
    assert config["model_type"] == "gemma3_text"
    assert config["sliding_window"] == 32
    assert config["query_pre_attn_scalar"] == 16
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)

  def test_of_gemma_with_windows_by_layer(self, tmp_path):
    facts = {".attention.sliding_window_pattern": [False, True]}
    config, _ = gguf_file.read_gguf(small(tmp_path, "gemma3", facts))
    assert config["layer_types"] == ["full_attention", "sliding_attention"]

  def test_of_tables_with_an_output_of_their_own(self, tmp_path):
    tensors = {"output.weight": np.ones((320, 64), np.float32)}
    config, found = gguf_file.read_gguf(small(tmp_path, tensors=tensors))
    assert not config["tie_word_embeddings"]
    assert found["lm_head.weight"].shape == (320, 64)

  @pytest.mark.parametrize(
    ("facts", "wanted"),
    [
      ({"type": "none"}, None),
      (
        {"type": "linear", "factor": 8.0},
        {"rope_type": "linear", "factor": 8.0},
      ),
      (
        {"type": "yarn", "factor": 4.0, "original_context_length": 32},
        {
          "rope_type": "yarn",
          "factor": 4.0,
          "original_max_position_embeddings": 32,
        },
      ),
    ],
  )
  def test_of_scaled_rope(self, tmp_path, facts, wanted):
    facts = {f".rope.scaling.{key}": value for key, value in facts.items()}
    config, _ = gguf_file.read_gguf(small(tmp_path, facts=facts))
    assert config["rope_scaling"] == wanted

  @pytest.mark.parametrize("factor", [8.0, 32.0])
  def test_of_llama_3(self, tmp_path, factor):
    """Divisors as a converter writes them, one frequency at a time."""
    divisors = []
    for place in range(0, 128, 2):
      wave = 2 * np.pi * 500_000 ** (place / 128)
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
    path = small(tmp_path, facts=facts, tensors={"rope_freqs.weight": rope})
    config, tensors = gguf_file.read_gguf(path)
    assert config["rope_scaling"] == {
      "rope_type": "llama3",
      "factor": factor,
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
      "original_max_position_embeddings": 8192,
    }
    assert all("rope" not in name for name in tensors)
    rope[40] *= 1.01
    path = small(tmp_path, facts=facts, tensors={"rope_freqs.weight": rope})
    with pytest.raises(ValueError, match="Llama 3's scaling"):
      gguf_file.read_gguf(path)

  @pytest.mark.parametrize(
    ("facts", "named"),
    [
      ({".expert_count": 8}, r"'llama\.expert_count' = 8"),
      ({".rope.dimension_count": 8}, r"llama\.rope\.dimension_count, got 8"),
      ({".rope.scaling.type": "su"}, r"rope\.scaling\.type, got 'su'"),
      ({".attention.sliding_window": 9}, r"sliding_window, got 9"),
      ({".attention.head_count_kv": [1, 2]}, r"head_count_kv, got \[1, 2\]"),
    ],
  )
  def test_what_is_not_built_is_named(self, tmp_path, facts, named):
    path = small(tmp_path, facts=facts)
    with pytest.raises(ValueError, match=named) as error:
      gguf_file.read_gguf(path)
    assert str(path) in str(error.value)

  def test_none_of_something_is_nothing(self, tmp_path):
    facts = {".expert_count": 0}
    config, _ = gguf_file.read_gguf(small(tmp_path, facts=facts))
    assert config["model_type"] == "llama"

  def test_an_unknown_architecture_is_named(self, tmp_path):
    path = writing.write_gguf(tmp_path / "m.gguf", "mamba", {}, {})
    with pytest.raises(ValueError, match="got 'mamba'"):
      gguf_file.read_gguf(path)

  def test_a_missing_size_is_named(self, tmp_path):
    facts = facts_of("llama")
    del facts[".block_count"]
    tensors = writing.weights("llama")
    path = writing.write_gguf(tmp_path / "m.gguf", "llama", facts, tensors)
    with pytest.raises(ValueError, match=r"llama\.block_count, got none"):
      gguf_file.read_gguf(path)
