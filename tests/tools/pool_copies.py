"""Finds copies of whole pools in a compiled program."""

import math
import re

# A scatter or a dynamic update writes into its operand; these make a new array.
_REWRITES = {
  "add",
  "bitcast-convert",
  "broadcast",
  "concatenate",
  "convert",
  "copy",
  "gather",
  "multiply",
  "pad",
  "reduce-precision",
  "select",
  "slice",
  "dynamic-slice",
  "transpose",
}


def pool_sized_rewrites(compiled, pool_shape: tuple[int, ...]) -> list[str]:
  """Returns the instructions whose result is at least as large as a pool."""
  smallest = math.prod(pool_shape)
  lines = []
  for line in compiled.as_text().splitlines():
    match = re.search(r"= \w+\[([\d,]*)\]\S* ([\w-]+)\(", line)
    if match is None or match[2] not in _REWRITES:
      continue
    if math.prod(int(n) for n in match[1].split(",") if n) >= smallest:
      lines.append(line.strip()[:120])
  return lines


def assert_in_place(compiled, pools) -> None:
  """Checks that all pools are updated in place, without large temporaries."""
  assert pool_sized_rewrites(compiled, pools[0].shape) == []
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes >= sum(pool.nbytes for pool in pools)
  assert memory.temp_size_in_bytes < pools[0].nbytes // 4
