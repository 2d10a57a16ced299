"""The requests that hold pages, and their slots in the device state."""

from typing import Any

from jaxkv._src.host.prefix_nodes import PrefixNode


class HeldSequence:
  """The pages of a request.

  Attributes:
    request_id: the name of the request.
    slot: its row in the device state.
    request: the scheduler's object at the last call.
    tables: a list of page numbers for each group; 0 for the null page.
    skipped: the number of leading null pages of each table.
    length: the number of published tokens.
    room: the number of tokens that fit the tables.
    root: the node before the first page; None without prefix caching.
    nodes: a node for each S published tokens.
    prompt_length, boundary: as in `SlotHashes`.
  """

  # Once a request is in `HostState.held`, the undo log records each change of a
  # field, except that of `request`.
  __slots__ = (
    "boundary",
    "length",
    "nodes",
    "prompt_length",
    "request",
    "request_id",
    "room",
    "root",
    "skipped",
    "slot",
    "tables",
  )

  def __init__(self, request_id: str, slot: int, num_groups: int):
    self.request_id = request_id
    self.slot = slot
    self.request: Any = None
    self.tables: list[list[int]] = [[] for _ in range(num_groups)]
    self.skipped = [0] * num_groups
    self.length = 0
    self.room = 0
    self.root: PrefixNode | None = None
    self.nodes: list[PrefixNode] = []
    self.prompt_length = 0
    self.boundary = 0
