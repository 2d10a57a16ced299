"""Texts that are hard for a tokenizer."""

import random
from collections.abc import Iterator

_PIECES = (
  "The quick brown fox, it's 1,024 o'clock!  ",
  "def f(x):\n\treturn x ** 2  # comment\n",
  "für größere Übel — “quoted” …",
  "Съешь ещё этих мягких французских булок. ",
  "敏捷的棕色狐狸 跳过了懒狗。",
  "いろはにほへと ちりぬるを",
  "نص عربي مع أرقام ١٢٣",
  "हिन्दी में पाठ",
  "👩‍👩‍👧‍👦🏳️‍🌈 emoji 🎉",
  "e\u0301 composed é",
  "<|im_start|>user\nhi<|im_end|>",
  "\r\n\r\n   \t\u00a0\u3000",
  '{"key": [1, 22, 333, 4444]}',
)


def lines(count: int) -> Iterator[str]:
  """Lines of mixed scripts, code and emoji."""
  draw = random.Random(0)
  for _ in range(count):
    pieces = draw.choices(_PIECES, k=draw.randint(1, 4))
    cuts = [piece[draw.randint(0, len(piece) // 2) :] for piece in pieces]
    code = chr(
      draw.choice((0x20, 0x4E00, 0x1F600, 0xAC00)) + draw.randint(0, 80)
    )
    yield "".join(cuts) + code * draw.randint(0, 3)
