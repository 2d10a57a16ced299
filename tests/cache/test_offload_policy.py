"""The policy restores a page if that is faster than computing its tokens."""

import math

import pytest

import jaxkv


def _tokens_per_second(parameters, flops, share=0.4):
  return share * flops / (2 * parameters)


@pytest.mark.parametrize(
  ("parameters", "token_bytes", "bytes_per_second", "flops", "restores"),
  [
    # A TPU v6e with 918 TFLOP/s in bfloat16, and 16.4 GB/s to its host.
    (0.6e9, 114_688, 16.4e9, 918e12, False),
    (8e9, 131_072, 16.4e9, 918e12, True),
    # An H100 with 989 TFLOP/s, over PCIe 5.
    (0.6e9, 114_688, 55e9, 989e12, True),
    (70e9, 327_680, 55e9, 989e12, True),
  ],
)
def test_known_models(
  parameters, token_bytes, bytes_per_second, flops, restores
):
  speed = _tokens_per_second(parameters, flops)
  policy = jaxkv.OffloadPolicy(bytes_per_second, speed)
  assert (policy.max_pages(16 * token_bytes, 16) > 0) == restores


def test_counts_pages_of_a_column():
  policy = jaxkv.OffloadPolicy(bytes_per_second=100, tokens_per_second=10)
  # Computing 4 tokens takes as long as moving 40 bytes.
  assert policy.max_pages(page_bytes=9, page_size=4) == 4
  assert policy.max_pages(page_bytes=10, page_size=4) == 3
  assert policy.max_pages(page_bytes=40, page_size=4) == 0


def _config(**options):
  return jaxkv.CacheConfig(
    num_pages=4,
    page_size=2,
    num_slots=1,
    pages_per_slot=4,
    offload_pages=4,
    **options,
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ("options", "num_saved"),
  [
    ({}, 3),
    ({"offload_policy": "always"}, 3),
    ({"offload_policy": "never"}, 0),
    ({"offload_policy": jaxkv.OffloadPolicy(100, 10), "page_bytes": 19}, 3),
    ({"offload_policy": jaxkv.OffloadPolicy(100, 10), "page_bytes": 20}, 0),
  ],
)
def test_reusable_pages_are_saved(options, num_saved):
  state = jaxkv.init(_config(**options))
  state, _ = jaxkv.allocate(state, [6])
  state, _ = jaxkv.commit(state, [[1, 2, 3, 4, 5, 6]], [6])
  state, _ = jaxkv.free(state, slots=[0])
  state, out = jaxkv.allocate(state, [6])
  assert int(out.moves.count) == num_saved
  stats = jaxkv.stats(state)
  assert int(stats.saved_pages) == num_saved
  assert int(stats.dropped_pages) == 3 - num_saved


def test_refuses_bad_policies():
  for speeds in ((0, 1), (1, -1), (math.inf, 1), (1, math.nan)):
    with pytest.raises(ValueError, match="must be finite and above 0"):
      jaxkv.OffloadPolicy(*speeds)
  with pytest.raises(TypeError, match="tokens_per_second` must be a number"):
    jaxkv.OffloadPolicy(1.0, "fast")
  with pytest.raises(ValueError, match="page_bytes"):
    _config(offload_policy=jaxkv.OffloadPolicy(1.0, 1.0))
  with pytest.raises(ValueError, match="offload_policy` must be one of"):
    _config(offload_policy="sometimes")
