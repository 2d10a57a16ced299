"""Layer groups, pools and segments of decoders."""

import pytest

from jaxkv import models
from jaxkv._src.models.decoder import groups
from tests.models import tiny_decoders as tiny

_WINDOW = tiny.layer(tiny.attention(window=8))
_WIDER = tiny.layer(tiny.attention(window=16))
_FULL = tiny.layer(tiny.attention())
_STATE = tiny.layer(tiny.DELTA_NET)
_EXPERTS = tiny.layer(tiny.attention(), tiny.EXPERTS)

# The layers of a decoder; the layers and the pool of each group; P and R of
# each segment.
_DECODERS = {
  "Gemma 3 1B": (
    (((_WINDOW,) * 5 + (_FULL,)) * 4 + (_WINDOW,) * 2),
    ((22, 4), (0, 1)),
    ((6, 4), (1, 2)),
  ),
  "Qwen3-Next": (
    ((_STATE,) * 3 + (_FULL,)) * 3,
    ((9, 3), (0, 1)),
    ((4, 3),),
  ),
  "alternating": ((_WINDOW, _FULL) * 3, ((3, 3), (0, 0)), ((2, 3),)),
  "three windows": (
    (_FULL, _WINDOW, _WIDER, _WINDOW, _WINDOW, _WIDER),
    ((1, 3, 2), (0, 1, 2)),
    ((1, 1), (1, 1), (1, 1), (1, 2), (1, 1)),
  ),
  "experts later": (
    (_FULL, *(_EXPERTS,) * 3),
    ((4,), (0,)),
    ((1, 1), (1, 3)),
  ),
}


@pytest.mark.parametrize("name", _DECODERS)
def test_layers_of_one_kind_and_size_form_a_group(name):
  layers, (num_layers, pools), segments = _DECODERS[name]
  decoder = tiny.decoder(layers)
  layer_groups = groups.groups_of(decoder)
  assert layer_groups.num_layers == num_layers
  kinds = models.cache_groups(decoder)
  assert tuple(group_kind.pool for group_kind in kinds) == pools
  # Each pattern is compiled once, whatever the groups of its layers.
  assert segments == tuple(
    (len(segment.pattern), segment.num_repeats)
    for segment in groups.segments(decoder)
  )
