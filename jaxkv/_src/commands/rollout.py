"""`python -m jaxkv rollout`: real prompts through the jitted loop.

A small character model, trained once on this machine, continues prompts that
share a preamble. Pages are allocated, shared, published, hit, evicted and
released inside compiled spans of a `while_loop`. A second run uses a dense
cache, and the tokens of both runs are compared one by one.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxkv
from jaxkv import models
from jaxkv import rollout
from jaxkv._src.commands import json_file
from jaxkv._src.commands import pretrained
from jaxkv._src.commands import prompts as prompt_files
from jaxkv._src.commands import report
from jaxkv._src.commands import results
from jaxkv._src.commands import spans
from jaxkv._src.commands.errors import CommandError
from jaxkv._src.commands.prompts import Prompts
from jaxkv._src.commands.spans import Timed
from jaxkv._src.temperature import as_temperature
from jaxkv.models import CharacterModel
from jaxkv.rollout import RolloutConfig
from jaxkv.rollout import RolloutState

SLOT_TOKENS = 512
"""The most tokens of a prompt and its continuation together."""

# With the model's 512 bytes a token, 2 GiB of K/V in either cache.
_MOST_TOKENS = 2**22
_MOST_SEQUENCES = 2**16
_RANGES = {
  "samples": (1, _MOST_SEQUENCES),
  "slots": (1, _MOST_TOKENS // SLOT_TOKENS),
  "pages": (2, _MOST_TOKENS),
  "page_size": (1, SLOT_TOKENS),
  "max_tokens": (1, SLOT_TOKENS - 1),
  "seed": (0, 2**32 - 1),
  "span": (0, 2**31 - 1),
}
"""The smallest and the largest value of each whole number."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the command's arguments to its parser."""
  add = parser.add_argument
  add("--prompts", metavar="FILE", help="one prompt a line; default: real text")
  pretrained.add_arguments(parser)
  add("--samples", metavar="G", type=int, help="a prompt (4; with --model 1)")
  add("--slots", metavar="B", type=int, default=8, help="batch (%(default)s)")
  add("--pages", metavar="N", type=int, help="pool (160; with --model enough)")
  add("--page-size", metavar="S", type=int, default=16, help="(%(default)s)")
  add("--max-tokens", metavar="T", type=int, default=96, help="(%(default)s)")
  add("--seed", metavar="I", type=int, default=0, help="(%(default)s)")
  add(
    "--temperature", type=float, default=0.8, help="0 is greedy (%(default)s)"
  )
  add(
    "--span",
    metavar="STEPS",
    type=int,
    default=200,
    help="steps between progress reports; 0 runs in one call (%(default)s)",
  )
  add(
    "--arrival",
    action="store_true",
    help="run again in the order of arrival, and compare",
  )
  add("--json", metavar="FILE", help="also write texts and figures here")


def run(args: argparse.Namespace) -> int:
  """Generates, prints texts and a table, and compares with a dense cache.

  Args:
    args: what `add_arguments` describes.

  Returns:
    The exit code: 0, or 1 if the tokens differ from those of the dense run.

  Raises:
    CommandError: an argument or a prompt cannot be used.
  """
  if args.model is not None:
    return pretrained.run(args)
  pretrained.check_unused(args)
  args.samples = 4 if args.samples is None else args.samples
  args.pages = 160 if args.pages is None else args.pages
  _check(args)
  with contextlib.ExitStack() as stack:
    write = (
      stack.enter_context(json_file.opened(args.json))
      if args.json is not None
      else None
    )
    result = _result(args)
    if write is not None:
      write(result)
  with results.printed():
    report.show(result)
  return 0 if result["equals_dense"] else 1


def _result(args: argparse.Namespace) -> dict[str, Any]:
  """Generates with both caches; see `report.collect`."""
  model = _model()
  prompts = _prompts(args, model)
  config = RolloutConfig(
    num_samples=args.samples,
    max_new_tokens=args.max_tokens,
    stop_token=model.vocabulary.stop_token,
    prefill_chunk=64,
  )
  paged = _paged(args, model, prompts, config)
  dense = _dense(args, model, prompts, config)
  jaxkv.check(paged.value.cache)
  arrival = None
  if args.arrival:
    in_order = dataclasses.replace(config, window=1, max_overtaken=0)
    arrival = _paged(args, model, prompts, in_order).value
  return report.collect(
    paged.value,
    model,
    num_samples=args.samples,
    seconds=paged.seconds,
    compile_seconds=paged.compile_seconds,
    dense_seconds=dense.seconds,
    equals_dense=bool(
      np.array_equal(paged.value.sequences.tokens, dense.value.tokens)
    ),
    arrival=arrival,
  )


def _model() -> CharacterModel:
  """The model; a folder that cannot keep it is told before a minute's work."""
  with warnings.catch_warnings():
    warnings.simplefilter("error", models.NotKeptWarning)
    try:
      return models.character_model()
    except models.NotKeptWarning as warning:
      raise CommandError(str(warning).rstrip(".")) from warning


def _check(args: argparse.Namespace) -> None:
  for name, (least, most) in _RANGES.items():
    value = getattr(args, name)
    if not least <= value <= most:
      flag = "--" + name.replace("_", "-")
      raise CommandError(f"{flag} must be {least} .. {most}, not {value}")
  if args.pages * args.page_size > _MOST_TOKENS:
    raise CommandError(
      f"--pages must be at most {_MOST_TOKENS // args.page_size} with "
      f"--page-size {args.page_size}, not {args.pages}"
    )
  try:
    as_temperature(args.temperature)
  except ValueError as error:
    raise CommandError(f"--temperature: {str(error).rstrip('.')}") from error
  if args.json and args.prompts and _same_file(args.json, args.prompts):
    raise CommandError(f"--json {args.json} would overwrite the prompts")


def _same_file(a: str, b: str) -> bool:
  return os.path.exists(a) and os.path.exists(b) and os.path.samefile(a, b)


def _prompts(args: argparse.Namespace, model: CharacterModel) -> Prompts:
  if args.prompts is None:
    text = models.reference_text()
    encoded = prompt_files.default(text, model.vocabulary)
  else:
    encoded = prompt_files.read(args.prompts, model.vocabulary)
  width = SLOT_TOKENS - args.max_tokens
  prompts = prompt_files.padded(encoded, width, args.prompts)
  if len(prompts.lengths) > _MOST_SEQUENCES // args.samples:
    raise CommandError(
      f"--samples {args.samples} of {len(prompts.lengths)} prompts must be at "
      f"most {_MOST_SEQUENCES} sequences; lower --samples"
    )
  longest = int(prompts.lengths.max()) + args.max_tokens
  needed = -(-longest // args.page_size)
  if needed > args.pages - 1:
    raise CommandError(
      f"the longest sequence, {longest} tokens, needs {needed} pages of "
      f"{args.page_size} and --pages {args.pages} leaves {args.pages - 1} "
      "beside the null page; raise --pages"
    )
  return prompts


def _paged(
  args: argparse.Namespace,
  model: CharacterModel,
  prompts: Prompts,
  config: RolloutConfig,
) -> Timed:
  """Runs the loop in spans, with a progress bar over sequences."""
  state = _initial(args, model, prompts, config)
  forward = functools.partial(models.forward, config=model.config)
  return spans.generate(model.params, state, model=forward, steps=args.span)


def _initial(
  args: argparse.Namespace,
  model: CharacterModel,
  prompts: Prompts,
  config: RolloutConfig,
) -> RolloutState:
  sizes = _sizes(args)
  kv = models.init_kv(model.config, sizes)
  cache = jaxkv.init(sizes)
  sampling = rollout.Sampling(temperature=args.temperature)
  arrays = _arrays(args, prompts)
  return rollout.init(cache, kv, *arrays, config, sampling=sampling)


def _sizes(args: argparse.Namespace) -> jaxkv.CacheConfig:
  return jaxkv.CacheConfig(
    num_pages=args.pages,
    page_size=args.page_size,
    num_slots=args.slots,
    pages_per_slot=-(-SLOT_TOKENS // args.page_size),
  )


def _arrays(
  args: argparse.Namespace, prompts: Prompts
) -> tuple[Array, Array, Array]:
  return (
    jnp.asarray(prompts.tokens),
    jnp.asarray(prompts.lengths),
    jax.random.key(args.seed),
  )


def _dense(
  args: argparse.Namespace,
  model: CharacterModel,
  prompts: Prompts,
  config: RolloutConfig,
) -> Timed:
  """The same sequences with a dense cache."""
  sequences = rollout.from_prompts(*_arrays(args, prompts), config)
  memory = models.init_dense(
    model.config, batch_size=args.slots, max_len=SLOT_TOKENS
  )
  forward = functools.partial(
    models.forward_dense, config=model.config, logits="last"
  )
  program = functools.partial(
    rollout.generate_dense, batch_size=args.slots, model=forward, config=config
  )
  inputs = (model.params, memory, sequences, jnp.float32(args.temperature))
  begin = time.perf_counter()
  compiled = jax.jit(program).lower(*inputs).compile()
  ready = time.perf_counter()
  sequences = jax.block_until_ready(compiled(*inputs))
  return Timed(sequences, time.perf_counter() - ready, ready - begin)
