"""Damaged checkpoints: one line that names the file, whatever is wrong."""

import copy
import functools
import json
import random
import shutil
import struct
import time

import pytest

from jaxkv import models
from jaxkv._src.models.loading import checkpoint_errors
from tests.models.loading import gguf_writing
from tests.models.loading import llama_folder

_VALUES = (
  None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**400, 0.5, -1e9, 1e308,
  float("inf"), float("nan"), "", "8", "text", [], [0], ["a"], [[]], {},
  {"a": 1}, [None] * 3,
)  # fmt: skip
# Of the processor: other processes do not count.
_SECONDS = 2


def _refused(path, *words):
  """The message of a load, which must fail in time and name the file."""
  start_time = time.process_time()
  with pytest.raises((ValueError, OSError)) as caught:
    _ = models.load(path).tokenizer
  assert time.process_time() - start_time < _SECONDS
  message = str(caught.value)
  assert "\n" not in message
  for word in (str(path), *words):
    assert word in message, message


@pytest.fixture
def folder(tmp_path):
  """A small checkpoint with a tokenizer."""
  tokenizers = pytest.importorskip("tokenizers", reason="it makes the tokens")
  llama_folder.write_folder(tmp_path)
  core = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
  core.save(str(tmp_path / "tokenizer.json"))
  (tmp_path / "tokenizer_config.json").write_text(
    '{"chat_template": "x", "eos_token": {"content": "b"}}'
  )
  (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
  _ = models.load(tmp_path).tokenizer
  return tmp_path


@pytest.mark.parametrize(
  ("key", "value"),
  [
    ("num_hidden_layers", 2**31 - 1),
    ("num_hidden_layers", "2"),
    ("rms_norm_eps", "small"),
    ("rms_norm_eps", [1e-6]),
    ("rope_theta", float("inf")),
    ("rope_theta", 10**400),
    ("rope_scaling", [1]),
    ("tie_word_embeddings", "yes"),
    ("eos_token_id", "</s>"),
    ("quantization_config", "fp8"),
    ("text_config", 3),
  ],
)
def test_a_value_of_another_type_is_named(folder, key, value):
  path = folder / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
  if key == "eos_token_id":
    (folder / "generation_config.json").unlink()
  _refused(folder, f"`{key}`")


def test_overlapping_tensors_are_refused(folder):
  path = folder / "model.safetensors"
  data = path.read_bytes()
  (length,) = struct.unpack("<Q", data[:8])
  header = json.loads(data[8 : 8 + length])
  name_0, name_1 = (name for name in header if name.endswith("q_proj.weight"))
  header[name_1]["data_offsets"] = header[name_0]["data_offsets"]
  text = json.dumps(header).encode()
  path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
  _refused(folder, name_0, name_1, "overlap")


def test_a_panic_in_rust_is_reported():
  """Its class is private, and derives from BaseException."""
  panic = type("PanicException", (BaseException,), {})
  with pytest.raises(ValueError, match=r"file is damaged.*PanicException: no"):
    with checkpoint_errors.one_line_errors("file"):
      raise panic("no\nway")
  with (
    pytest.raises(KeyboardInterrupt),
    checkpoint_errors.one_line_errors("file"),
  ):
    raise KeyboardInterrupt


def _mutated(value, draw):
  """A JSON value with one part replaced, removed or renamed."""
  value = copy.deepcopy(value)
  holder = key = None
  part = value
  while isinstance(part, dict | list) and part and draw.random() < 0.8:
    holder = part
    key = draw.choice(
      list(part) if isinstance(part, dict) else range(len(part))
    )
    part = part[key]
  if holder is None:
    return draw.choice(_VALUES)
  uniform = draw.random()
  if uniform < 0.7:
    holder[key] = draw.choice(_VALUES)
  elif uniform < 0.85:
    del holder[key]
  elif isinstance(holder, dict):
    holder[draw.choice(("other", "rope_scaling", "decoder"))] = part
  return value


def _flipped(data, draw):
  data = bytearray(data)
  for _ in range(draw.choice((1, 1, 2, 8))):
    data[draw.randrange(len(data))] = draw.randrange(256)
  return bytes(data[: draw.choice((len(data), draw.randrange(len(data))))])


def _damage_json(name, folder, draw):
  path = folder / name
  if draw.random() < 0.2:
    path.write_bytes(_flipped(path.read_bytes(), draw))
  else:
    value = _mutated(json.loads(path.read_text("utf-8")), draw)
    path.write_text(json.dumps(value), "utf-8")


def _damage_tensors(folder, draw):
  path = folder / "model.safetensors"
  data = path.read_bytes()
  (length,) = struct.unpack("<Q", data[:8])
  if draw.random() < 0.5:
    path.write_bytes(_flipped(data[: 8 + length], draw) + data[8 + length :])
    return
  text = json.dumps(_mutated(json.loads(data[8 : 8 + length]), draw)).encode()
  path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


_PARTS = {
  "config": functools.partial(_damage_json, "config.json"),
  "tokenizer": functools.partial(_damage_json, "tokenizer.json"),
  "options": functools.partial(_damage_json, "tokenizer_config.json"),
  "generation": functools.partial(_damage_json, "generation_config.json"),
  "tensors": _damage_tensors,
}


def _check_load(path):
  """A load succeeds, or fails in time with one line that names the file."""
  start_time = time.process_time()
  try:
    _ = models.load(path).tokenizer
  except (ValueError, OSError) as error:
    assert str(path) in str(error), error
    assert "\n" not in str(error)
    failed = True
  else:
    failed = False
  assert time.process_time() - start_time < _SECONDS
  return failed


@pytest.mark.slow
@pytest.mark.parametrize("part", _PARTS)
def test_random_damage_to_a_folder_is_refused_or_read(
  folder, part, tmp_path_factory
):
  """300 loads."""
  draw = random.Random(part)
  num_failures = 0
  for i in range(300):
    damaged = tmp_path_factory.mktemp(f"damaged{i}")
    shutil.copytree(folder, damaged, dirs_exist_ok=True)
    _PARTS[part](damaged, draw)
    num_failures += _check_load(damaged)
    shutil.rmtree(damaged)
  assert num_failures > 50


@pytest.mark.slow
@pytest.mark.parametrize("part", ["bytes", "facts"])
def test_random_damage_to_a_gguf_file_is_refused_or_read(tmp_path, part):
  """250 loads."""
  pytest.importorskip("gguf", reason="it writes the files")
  pytest.importorskip("tokenizers", reason="it makes the tokens")
  tokens = [chr(97 + i % 26) * (1 + i // 26) for i in range(320)]
  facts = gguf_writing.sizes(rope__freq_base=1e4) | {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": tokens,
    "tokenizer.ggml.token_type": [1] * 320,
    "tokenizer.ggml.merges": ["a a"],
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.chat_template": "x",
  }
  weights = gguf_writing.weights("llama")
  whole = gguf_writing.write_gguf(
    tmp_path / "whole.gguf", "llama", facts, weights
  )
  assert not _check_load(whole)
  data = whole.read_bytes()
  path = tmp_path / "damaged.gguf"
  num_failures = 0
  draw = random.Random(part)
  values = (0, 1, 2**32 - 1, -1.5, float("inf"), float("nan"), "", "a", True)
  values += ([1], ["a"], [1.5, float("inf")], ["a a"] * 3)
  for _ in range(250):
    if part == "bytes":
      path.write_bytes(_flipped(data[:6000], draw) + data[6000:])
    else:
      key = draw.choice(list(facts))
      changed = facts | {key: draw.choice(values)}
      gguf_writing.write_gguf(path, "llama", changed, weights)
    num_failures += _check_load(path)
  assert num_failures > 50
