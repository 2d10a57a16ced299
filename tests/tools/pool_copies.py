"""Does a compiled program copy or rewrite whole pools?"""

import math
import re

# A scatter or a dynamic update writes into its operand; these make a new one.
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
  """Instructions that produce as many elements as a pool, or more."""
  smallest = math.prod(pool_shape)
  found = []
  for line in compiled.as_text().splitlines():
    match = re.search(r"= \w+\[([\d,]*)\]\S* ([\w-]+)\(", line)
    if match is None or match[2] not in _REWRITES:
      continue
    if math.prod(int(n) for n in match[1].split(",") if n) >= smallest:
      found.append(line.strip()[:120])
  return found


def assert_in_place(compiled, pools) -> None:
  """All pools are updated in place, and no temporary is as large as one."""
  assert pool_sized_rewrites(compiled, pools[0].shape) == []
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes >= sum(pool.nbytes for pool in pools)
  assert memory.temp_size_in_bytes < pools[0].nbytes // 4
