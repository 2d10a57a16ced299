"""Small caches for `tests.fuzz`, with few pages so that allocations fail."""

import dataclasses
from typing import Any

from jaxkv import ChunkedLocal
from jaxkv import FullAttention
from jaxkv import OffloadPolicy
from jaxkv import Recurrent
from jaxkv import SlidingWindow
from jaxkv.host import CrossAttention
from jaxkv.host import SpeculativeRecurrent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """A manager's configuration, and options of its scheduler.

  Attributes:
    name: the name of the configuration.
    groups: the kinds, with their page sizes.
    num_pages: the pages, with the null page.
    max_model_len: tokens of the longest sequence.
    options: other arguments of the manager.
    drafts: the most speculative tokens of a step, also the lookahead.
    external: True if some tokens are computed elsewhere.
    encoder: the most tokens of an encoder.
    policies: the policies that support the configuration.
  """

  name: str
  groups: tuple[Any, ...]
  num_pages: int
  max_model_len: int
  options: dict[str, Any]
  drafts: int
  external: bool
  encoder: int
  policies: tuple[str, ...]

  def arguments(self, policy: str) -> dict[str, Any]:
    """Returns the arguments of the manager's constructor."""
    encoder = {"max_encoder_tokens": self.encoder} if self.encoder else {}
    return {
      "num_pages": self.num_pages,
      "groups": list(self.groups),
      "max_model_len": self.max_model_len,
      "policy": policy,
      **encoder,
      **self.options,
    }


_SEVERAL = {"full": FullAttention, "state": Recurrent, "cross": CrossAttention}
_SIZED = {"window": (SlidingWindow, "window"), "chunk": (ChunkedLocal, "chunk")}


def _group(text: str) -> Any:
  """Parses full/4, cross/4, window6/4, chunk8/4, state/4 or state2/4."""
  name, _, page_size = text.partition("/")
  letters = name.rstrip("0123456789")
  parameter = name.removeprefix(letters)
  if letters in _SIZED:
    make, field = _SIZED[letters]
    return make(page_size=int(page_size), **{field: int(parameter)})
  if parameter:
    return SpeculativeRecurrent(int(parameter), page_size=int(page_size))
  return _SEVERAL[letters](page_size=int(page_size))


def _setup(
  name: str,
  groups: str,
  num_pages: int,
  max_model_len: int,
  *,
  drafts: int = 0,
  external: bool = False,
  encoder: int = 0,
  **options: Any,
) -> Setup:
  group_names = groups.split()
  # With a draft model and several page sizes, classic hits prefixes whose
  # windows are missing.
  page_sizes = {group_name.partition("/")[2] for group_name in group_names}
  classic = "prefix_retention_interval" not in options
  classic &= len(page_sizes) == 1 or "use_eagle" not in options
  return Setup(
    name=name,
    groups=tuple(_group(text) for text in group_names),
    num_pages=num_pages,
    max_model_len=max_model_len,
    options=options,
    drafts=drafts,
    external=external,
    encoder=encoder,
    policies=("current", "classic") if classic else ("current",),
  )


OFF = {"enable_caching": False}
EAGLE = {"use_eagle": True}
ELSEWHERE = {"external": True}

_ALL = (
  # One kind.
  _setup("full", "full/4", 20, 40),
  _setup("full_one_token", "full/1", 30, 24),
  _setup("full_drafts", "full/4", 20, 40, drafts=3),
  _setup("full_eagle", "full/4", 20, 40, drafts=2, **EAGLE),
  _setup("full_external", "full/4", 20, 40, **ELSEWHERE),
  _setup("full_host", "full/4", 14, 40, offload_pages=9),
  _setup("full_watermark", "full/4", 14, 40, watermark=0.25),
  _setup("full_off", "full/4", 20, 40, drafts=2, **OFF),
  _setup("full_off_external", "full/4", 20, 40, **OFF, **ELSEWHERE),
  _setup("window", "window6/2", 20, 40),
  _setup("window_cap", "window5/2", 16, 60, max_in_flight=8),
  _setup("window_small", "window3/4", 14, 60, max_in_flight=12),
  _setup("window_eagle", "window8/4", 16, 48, drafts=2, **EAGLE),
  _setup("window_external", "window7/2", 20, 40, **ELSEWHERE),
  _setup("window_latest", "window6/2", 20, 40, prefix_retention_interval=0),
  _setup("window_kept", "window6/2", 20, 40, prefix_retention_interval=10),
  _setup(
    "window_kept_eagle",
    "window6/2",
    24,
    40,
    prefix_retention_interval=12,
    **EAGLE,
  ),
  _setup("chunk", "chunk8/4", 12, 48, max_in_flight=12),
  _setup("chunk_external", "chunk12/4", 13, 48, **ELSEWHERE),
  _setup("chunk_uneven", "chunk10/4", 13, 48, **ELSEWHERE),
  _setup("chunk_off", "chunk8/4", 13, 48, drafts=2, **OFF),
  _setup("state", "state/4", 6, 48),
  _setup("state_drafts", "state2/4", 12, 48, drafts=2),
  _setup("state_external", "state1/4", 9, 48, **ELSEWHERE),
  _setup("state_latest", "state/4", 6, 48, prefix_retention_interval=0),
  _setup("state_kept", "state/4", 6, 48, prefix_retention_interval=8),
  # Two kinds, or twice the same.
  _setup("two_full", "full/4 full/4", 36, 40),
  _setup("two_full_sizes", "full/2 full/4", 44, 40),
  _setup("two_full_eagle", "full/2 full/4", 44, 40, drafts=2, **EAGLE),
  _setup("full_window", "full/4 window6/4", 32, 48),
  _setup("full_window_cap", "full/4 window6/4", 30, 48, max_in_flight=8),
  _setup("full_window_sizes", "full/8 window6/2", 34, 48),
  _setup("window_full_sizes", "window9/8 full/4", 30, 48),
  _setup("full_window_eagle", "full/4 window6/4", 32, 48, drafts=2, **EAGLE),
  _setup("full_window_sizes_eagle", "full/8 window5/2", 34, 48, **EAGLE),
  _setup("full_window_external", "full/4 window6/4", 32, 48, **ELSEWHERE),
  _setup(
    "full_window_latest",
    "full/8 window5/2",
    34,
    48,
    prefix_retention_interval=0,
  ),
  _setup(
    "full_window_kept", "full/8 window5/2", 34, 48, prefix_retention_interval=16
  ),
  _setup(
    "full_window_kept_eagle",
    "full/8 window5/2",
    34,
    48,
    prefix_retention_interval=16,
    drafts=2,
    **EAGLE,
  ),
  _setup(
    "full_window_host", "full/4 window6/4", 24, 48, offload_pages=20, **EAGLE
  ),
  _setup(
    "full_window_host_costs",
    "full/4 full/4 window6/4",
    40,
    48,
    offload_pages=12,
    # One page of a column is worth its return.
    offload_policy=OffloadPolicy(5.0, 4.0),
    page_bytes=4,
  ),
  _setup("full_window_watermark", "full/4 window6/4", 32, 48, watermark=0.1),
  _setup("full_window_off", "full/4 window6/4", 30, 48, drafts=2, **OFF),
  _setup("full_chunk", "full/4 chunk8/4", 32, 48),
  _setup("full_chunk_external", "full/4 chunk12/4", 32, 48, **ELSEWHERE),
  _setup("full_state", "full/4 state/4", 28, 48),
  _setup("full_state_sizes", "full/8 state/4", 18, 48),
  _setup("full_state_drafts", "full/4 state2/4", 32, 48, drafts=2),
  _setup("full_state_eagle", "full/4 state1/4", 30, 48, drafts=1, **EAGLE),
  _setup("full_state_external", "full/4 state/4", 28, 48, **ELSEWHERE),
  _setup(
    "full_state_latest", "full/4 state/4", 28, 48, prefix_retention_interval=0
  ),
  _setup(
    "full_state_kept_eagle",
    "full/4 state1/4",
    30,
    48,
    prefix_retention_interval=8,
    drafts=1,
    **EAGLE,
  ),
  _setup("two_windows", "window5/4 window11/4", 24, 48),
  _setup("full_cross", "full/4 cross/4", 28, 32, encoder=20, drafts=2, **OFF),
  _setup("cross_full_sizes", "cross/8 full/4", 24, 32, encoder=60, **OFF),
  # Three.
  _setup("full_two_windows", "full/4 window6/4 window6/4", 44, 48),
  _setup("three_windows", "full/8 window5/2 window12/4", 48, 48),
  _setup("three_windows_eagle", "full/8 window5/2 window12/4", 48, 48, **EAGLE),
  _setup("three_eagle", "full/2 window3/2 window8/2", 60, 24, **EAGLE),
  _setup("two_full_window", "full/4 full/8 window6/4", 40, 48),
  _setup("three_external", "full/4 window6/4 window10/4", 44, 48, **ELSEWHERE),
  _setup(
    "three_latest",
    "full/8 window5/2 window12/4",
    60,
    48,
    prefix_retention_interval=0,
    drafts=2,
  ),
  _setup("full_window_state", "full/4 window6/4 state1/4", 44, 48, drafts=1),
  _setup(
    "full_window_state_eagle", "full/4 window6/4 state/4", 40, 48, **EAGLE
  ),
  _setup("full_window_chunk", "full/4 window6/4 chunk8/4", 44, 48),
  _setup(
    "full_window_cross",
    "full/4 window6/4 cross/4",
    34,
    48,
    encoder=16,
    watermark=0.1,
    max_in_flight=12,
    **OFF,
    **ELSEWHERE,
  ),
  _setup("everything", "full/8 window5/4 state1/4", 36, 64, drafts=1),
)

SETUPS = {setup.name: setup for setup in _ALL}
