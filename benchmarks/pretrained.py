"""A pretrained model: tokens a second beside `transformers`, and its memory.

| workload   | what                                                   | bound |
|------------|--------------------------------------------------------|-------|
| batch      | 8 and 16 prompts, 64 greedy tokens each: tokens/s      | 1.0   |
|            | against those of `transformers`                        |       |
| 8 x 8      | 8 samples of 8 prompts that begin with 300 common      | 3.0   |
|            | tokens; answers of 20 to 200 tokens                    |       |

The model is the folder or .gguf file of `--model`, in float32 on both sides;
tests/tools/named_models.py fetches one. Both compute whole batches to the end;
`transformers` takes the prompts of a batch padded on the left, and goes on
until the longest answer is there. The sides take turns. What compiles or warms
up is run once before, with fewer tokens.

Needs `pip install "jaxkv[hf,gguf]" torch transformers safetensors`.

  python benchmarks/pretrained.py --model M [--quick] [--json FILE]
"""

import functools
import pathlib
import statistics
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import command
import jax
import jax.numpy as jnp
import numpy as np
from rollout_rows import Row
from rollout_rows import at_least
from rollout_rows import report

import jaxkv
from jaxkv import models
from jaxkv import rollout

_PAGE = 16
_TEXT = (
  "You are a careful assistant who answers questions about rivers, cities, "
  "history and the sea. Name your sources, keep to the question, and say so if "
  "you do not know. "
)


class Work(NamedTuple):
  """A workload.

  Attributes:
    name: of its row.
    prompts: tokens of each prompt.
    samples: of each prompt.
    answers: int[Q], tokens to draw for each sequence.
    slots: of the cache.
    bound: of the ratio.
  """

  name: str
  prompts: list[np.ndarray]
  samples: int
  answers: np.ndarray
  slots: int
  bound: float


def _works(model: models.Pretrained, quick: bool) -> Iterator[Work]:
  encode = model.tokenizer.encode
  new = 8 if quick else 64
  for count in (8, 16):
    texts = [f"{number} things to know about the sea:" for number in range(20)]
    prompts = [encode(text) for text in texts[:count]]
    answers = np.full(count, new)
    yield Work(f"batch of {count}", prompts, 1, answers, count, 1.0)
  common = encode(_TEXT * 20)[: 40 if quick else 300]
  prompts = [
    np.concatenate([common, encode(f"\nQuestion {number}: what is {number}?")])
    for number in range(8)
  ]
  draw = np.random.default_rng(0)
  answers = draw.integers(*(2, 10) if quick else (20, 201), 64)
  yield Work("8 x 8", prompts, 8, answers, 64, 3.0)


def _ours(model: models.Pretrained, work: Work) -> Callable[[], int]:
  """A function that generates all of it; tokens that it computed."""
  lengths = np.asarray([len(prompt) for prompt in work.prompts], np.int32)
  prompts = np.zeros((len(lengths), lengths.max()), np.int32)
  for row, tokens in zip(prompts, work.prompts, strict=True):
    row[: len(tokens)] = tokens
  longest = int(lengths.max() + work.answers.max())
  pages = 1 + work.slots * (1 + -(-longest // _PAGE))
  sizes = model.cache_config(
    num_pages=pages, num_slots=work.slots, page_size=_PAGE, max_length=longest
  )
  config = rollout.RolloutConfig(
    num_samples=work.samples,
    max_new_tokens=int(work.answers.max()),
    prefill_chunk=128,
  )
  program = jax.jit(
    functools.partial(rollout.generate, model=model.forward), donate_argnums=1
  )

  def run(answers: np.ndarray = work.answers) -> int:
    state = rollout.init(
      jaxkv.init(sizes),
      model.init_kv(sizes),
      jnp.asarray(prompts),
      jnp.asarray(lengths),
      jax.random.key(0),
      config,
      sampling=rollout.Sampling(
        temperature=0.0, max_tokens=np.asarray(answers, np.int32)
      ),
    )
    state = program(model.params, state)
    return int(state.counters.generated)

  run(np.ones_like(work.answers))
  return run


def _theirs(model: Any, torch: Any, work: Work) -> Callable[[], int]:
  """The same by `transformers`: one batch, padded on the left."""
  longest = max(len(prompt) for prompt in work.prompts)
  rows = [prompt for prompt in work.prompts for _ in range(work.samples)]
  tokens = torch.zeros((len(rows), longest), dtype=torch.long)
  mask = torch.zeros_like(tokens)
  for row, prompt in enumerate(rows):
    tokens[row, longest - len(prompt) :] = torch.from_numpy(prompt).long()
    mask[row, longest - len(prompt) :] = 1

  def run(new: int = int(work.answers.max())) -> int:
    model.generate(
      tokens,
      attention_mask=mask,
      do_sample=False,
      min_new_tokens=new,
      max_new_tokens=new,
      pad_token_id=0,
    )
    # What is drawn beyond an answer's end is of no use.
    return int(work.answers.sum())

  with torch.inference_mode():
    run(2)
  return torch.inference_mode()(run)


def _timed(run: Callable[[], int]) -> float:
  """Tokens a second."""
  begin = time.perf_counter()
  return run() / (time.perf_counter() - begin)


def _rows(source: str, quick: bool, rounds: int) -> Iterator[Row]:
  import torch  # pyright: ignore[reportMissingImports]
  import transformers  # pyright: ignore[reportMissingImports]

  ours, path = models.load(source, dtype=jnp.float32), pathlib.Path(source)
  where = (
    {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    if path.suffix == ".gguf"
    else {"pretrained_model_name_or_path": path}
  )
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    **where, dtype=torch.float32
  )
  for work in _works(ours, quick):
    sides = _ours(ours, work), _theirs(theirs, torch, work)
    speeds = [[_timed(side) for side in sides] for _ in range(rounds)]
    own, other = (statistics.median(side) for side in zip(*speeds, strict=True))
    yield Row(work.name, "tokens/s", own)
    yield Row(work.name, "tokens/s of transformers", other)
    ratio = statistics.median(own / other for own, other in speeds)
    yield at_least(work.name, "times as fast", ratio, work.bound)


def measured(quick: bool, rounds: int, model: str) -> dict[str, Any]:
  """All rows, printed as they come."""
  return report(_rows(model, quick, rounds))


def main() -> None:
  command.run(
    __doc__,
    measured,
    rounds=3,
    quick_rounds=1,
    not_measured="compilation, accelerators, other dtypes",
    arguments={"--model": {"required": True, "metavar": "M"}},
  )


if __name__ == "__main__":
  main()
