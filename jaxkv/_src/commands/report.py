"""Collects and prints the results of `python -m jaxkv rollout`."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxkv.models import CharacterModel
from jaxkv.rollout import RolloutState

_SHOWN = 8


def collect(
  state: RolloutState,
  model: CharacterModel,
  *,
  num_samples: int,
  seconds: float,
  compile_seconds: float,
  dense_seconds: float,
  equals_dense: bool,
  arrival: RolloutState | None = None,
) -> dict[str, Any]:
  """The figures and texts of a finished rollout.

  Args:
    state: the end of the rollout.
    model: decodes its tokens.
    num_samples: sequences of each prompt.
    seconds: the loop's time, without compilation.
    compile_seconds: the time of its compilation.
    dense_seconds: the dense run's time, without compilation.
    equals_dense: whether all tokens equal those of the dense run.
    arrival: the end of the same rollout in the order of arrival.

  Returns:
    The contents of the JSON file.
  """
  cache, counters, stats = state.cache, state.counters, state.cache.stats
  sizes = cache.config
  kv_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.kv))
  page_bytes = kv_bytes // sizes.num_pages
  queries, hits = int(stats.queried_tokens), int(stats.hit_tokens)
  generated, prefilled = int(counters.generated), int(counters.prefilled)
  return {
    "sequences": int(state.sequences.length.shape[0]),
    "slots": sizes.num_slots,
    "pages": sizes.num_pages,
    "page_size": sizes.page_size,
    "steps": int(counters.steps),
    "generated_tokens": generated,
    "seconds": seconds,
    "compile_seconds": compile_seconds,
    "tokens_per_second": generated / seconds,
    "dense_seconds": dense_seconds,
    "prompt_tokens": int(np.sum(state.sequences.prompt_length)),
    "prefilled_tokens": prefilled,
    "least_prefilled_tokens": _least_prefilled(state, num_samples),
    "recomputed_tokens": int(counters.recomputed),
    "computed_rows": int(counters.rows),
    "useful_rows": generated + prefilled,
    "busy_slots": generated / (int(counters.steps) * sizes.num_slots),
    "forked_sequences": int(counters.forked),
    "queried_tokens": queries,
    "hit_tokens": hits,
    "hit_rate": _hit_rate(state),
    "arrival_hit_rate": None if arrival is None else _hit_rate(arrival),
    "arrival_prefilled_tokens": None
    if arrival is None
    else int(arrival.counters.prefilled),
    "pages_published": int(stats.published_pages),
    "pages_shared": int(counters.peak_shared),
    "pages_evicted": int(stats.evicted_pages),
    "preempted": int(counters.preempted),
    "kv_bytes_used": int(counters.peak_pages) * page_bytes,
    "kv_bytes_dense": sizes.num_slots * sizes.pages_per_slot * page_bytes,
    "equals_dense": equals_dense,
    "texts": _texts(state, model, num_samples),
  }


def show(result: dict[str, Any]) -> None:
  """Prints texts, then the table of figures."""
  for text in result["texts"][:_SHOWN]:
    print(f"--- prompt {text['prompt_number']}, sample {text['sample']}")
    print(f"...{text['prompt'][-60:]}[{text['completion']}]")
  if len(result["texts"]) > _SHOWN:
    print(f"--- and {len(result['texts']) - _SHOWN} more (--json has all)")
  print()
  rows = _rows(result)
  width = max(len(name) for name, _ in rows)
  for name, value in rows:
    print(f"{name:<{width}}  {value}")


def _hit_rate(state: RolloutState) -> float:
  stats = state.cache.stats
  return int(stats.hit_tokens) / max(int(stats.queried_tokens), 1)


def _rows(result: dict[str, Any]) -> list[tuple[str, str]]:
  used, dense = result["kv_bytes_used"], result["kv_bytes_dense"]
  hits, prefilled = "", ""
  if result["arrival_hit_rate"] is not None:
    hits = f"; {result['arrival_hit_rate']:.1%} in the order of arrival"
    prefilled = (
      f"; {result['arrival_prefilled_tokens']:,} in the order of arrival"
    )
  return [
    (
      "sequences",
      f"{result['sequences']} in {result['slots']} slots, "
      f"{result['steps']} steps",
    ),
    (
      "tokens/s",
      f"{result['tokens_per_second']:,.0f} ({result['generated_tokens']:,} in "
      f"{result['seconds']:.2f} s; compiled in "
      f"{result['compile_seconds']:.1f} s)",
    ),
    (
      "prefix hit rate",
      f"{result['hit_rate']:.1%} of {result['queried_tokens']:,} tokens "
      f"looked up{hits}",
    ),
    (
      "prompt tokens",
      f"{result['prompt_tokens']:,}, of which {result['prefilled_tokens']:,} "
      f"were computed{prefilled}; {result['least_prefilled_tokens']:,} is the "
      "least",
    ),
    (
      "rows computed",
      f"{result['computed_rows']:,}, "
      f"{result['computed_rows'] / result['useful_rows']:.2f} for each useful "
      f"one; {result['recomputed_tokens']:,} computed again",
    ),
    ("slots that drew", f"{result['busy_slots']:.1%} of all, in all steps"),
    ("pages published", f"{result['pages_published']:,}"),
    ("pages shared", f"{result['pages_shared']:,} at the peak"),
    ("pages evicted", f"{result['pages_evicted']:,}"),
    ("forked", f"{result['forked_sequences']:,}"),
    ("preempted", f"{result['preempted']:,}"),
    (
      "K/V bytes used",
      f"{used:,} at the peak; a dense cache: {dense:,} ({used / dense:.0%})",
    ),
    (
      "equals dense run",
      "yes, token by token" if result["equals_dense"] else "NO",
    ),
  ]


def least_prefilled(
  sequences: Iterable[tuple[list[int], int]], num_samples: int, page_size: int
) -> int:
  """The fewest prompt tokens that a rollout can compute, in any order.

  As `Counters.prefilled` counts them, with a cache that is empty at first. A
  page that several prompts begin with is computed once, and not at all if
  another sequence generates it or ends its prompt with it. The tokens after a
  prompt's last full page are computed once for all its samples, which fork. The
  last token of a prompt is not counted, and the page that it fills is not taken
  from the cache.

  Args:
    sequences: the tokens of each one, answer included, and the length of its
      prompt; the samples of a prompt one after the other.
    num_samples: G, sequences of each prompt.
    page_size: S.
  """
  # A page is known by the page before it and its tokens.
  pages: dict[tuple[int, tuple[int, ...]], int] = {}
  rest, hit, given = 0, set(), set()
  for number, (tokens, length) in enumerate(sequences):
    if number % num_samples == 0:
      rest += (length - 1) % page_size
    page = 0
    # The last token of an answer is not computed.
    for end in range(page_size, len(tokens), page_size):
      key = page, tuple(tokens[end - page_size : end])
      page = pages.setdefault(key, len(pages) + 1)
      (hit if end < length else given).add(page)
  return rest + page_size * len(hit - given)


def _least_prefilled(state: RolloutState, num_samples: int) -> int:
  sequences = state.sequences
  rows = zip(
    np.asarray(sequences.tokens),
    np.asarray(sequences.length).tolist(),
    np.asarray(sequences.prompt_length).tolist(),
    strict=True,
  )
  return least_prefilled(
    ((row[:length].tolist(), begin) for row, length, begin in rows),
    num_samples,
    state.cache.config.page_size,
  )


def _texts(
  state: RolloutState, model: CharacterModel, num_samples: int
) -> list[dict[str, Any]]:
  sequences = state.sequences
  tokens = np.asarray(sequences.tokens)
  begins = np.asarray(sequences.prompt_length)
  ends = np.asarray(sequences.length)
  log_probs = np.asarray(sequences.log_probs, np.float64)
  texts = []
  rows = zip(tokens, begins, ends, log_probs, strict=True)
  for number, (row, begin, end, scores) in enumerate(rows):
    texts.append(
      {
        "prompt_number": number // num_samples,
        "sample": number % num_samples,
        "prompt": model.vocabulary.decode(row[:begin]),
        "completion": model.vocabulary.decode(row[begin:end]),
        "tokens": row[begin:end].tolist(),
        "log_probs": scores[: end - begin].tolist(),
      }
    )
  return texts
