"""T5Gemma checkpoints as they lie in a folder; no other library is needed."""

import json
from typing import Any

import numpy as np
import pytest

import jaxkv
from jaxkv import models
from tests.models.loading import t5gemma_folder as written


def test_tensors_find_their_place(tmp_path):
  tensors = written.write(tmp_path, written.values())
  model = models.load(tmp_path)
  assert model.start_token == 2
  assert model.stop_tokens == (1,)
  assert model.max_length == 64
  decoder, encoder = model.config, model.config.encoder
  assert (encoder.embed_dim, encoder.num_layers) == (12, 3)
  assert models.cache_groups(decoder) == (
    jaxkv.SlidingWindow(4),
    jaxkv.FullAttention(),
    jaxkv.CrossAttention(),
    jaxkv.CrossAttention(),
  )
  cross = decoder.layers[0].cross
  assert (cross.soft_cap, cross.scale) == (50.0, 8**-0.5)
  own = model.params["layers"][0][1]
  at = "model.decoder.layers.1.cross_attn."
  for name, theirs in {"cross_key": "k_proj", "cross_query": "q_proj"}.items():
    wanted = tensors[f"{at}{theirs}.weight"].T
    np.testing.assert_array_equal(own[name][0].reshape(wanted.shape), wanted)
  np.testing.assert_array_equal(
    own["post_cross_norm"][0],
    tensors["model.decoder.layers.1.post_cross_attn_layernorm.weight"],
  )
  np.testing.assert_array_equal(
    model.params["encoder"]["embed"],
    tensors["model.encoder.embed_tokens.weight"],
  )
  with pytest.raises(ValueError, match=r"`CacheConfig.prefix_caching` must be"):
    model.cache_config(num_pages=9, num_slots=1, prefix_caching=True)


def test_an_output_layer_of_its_own(tmp_path):
  config = written.values(tie_word_embeddings=False)
  tensors = written.write(tmp_path, config)
  model = models.load(tmp_path)
  np.testing.assert_array_equal(
    model.params["unembed"], tensors["lm_head.out_proj.weight"].T
  )


def test_configurations_that_are_refused(tmp_path):
  written.write(tmp_path, written.values())

  def refused(message: str, **changes: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(written.values(**changes)))
    with pytest.raises(ValueError, match=message):
      models.load(tmp_path)

  refused("`made_up`: 3", made_up=3)
  narrow = written.MODULE | {"hidden_size": 12, "num_hidden_layers": 3}
  refused("`made_up`: 3", encoder=narrow | {"made_up": 3})
  refused("lacks `encoder`; complete it", encoder=None)
  refused("`is_encoder_decoder` in", is_encoder_decoder=False)
  refused(
    "`cross_attention_hidden_size` in `decoder` .* must be 12",
    decoder=written.MODULE | {"cross_attention_hidden_size": 16},
  )
  refused(
    r"cross_attn.k_proj.* must have shape \[8, 14\]",
    encoder=narrow | {"hidden_size": 14},
    decoder=written.MODULE,
  )
  refused(
    r"`architectures` in .* got \['T5Gemma2",
    architectures=["T5Gemma2ForConditionalGeneration"],
  )
