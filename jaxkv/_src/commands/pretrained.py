"""`python -m jaxkv rollout --model`: prompts through a pretrained model."""

import argparse
import contextlib
import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import models
from jaxkv import rollout
from jaxkv._src.commands import json_file
from jaxkv._src.commands import results
from jaxkv._src.commands import spans
from jaxkv._src.commands import text_prompts
from jaxkv._src.commands.errors import CommandError
from jaxkv._src.commands.spans import Timed
from jaxkv._src.commands.text_prompts import TextPrompt
from jaxkv._src.rollout.settings import as_sampling
from jaxkv.models import Pretrained
from jaxkv.rollout import RolloutConfig
from jaxkv.rollout import RolloutState
from jaxkv.rollout import Sampling

_ONLY_HERE = ("chat", "prompt", "stop", "top_k", "top_p", "out", "dtype")
_NOT_HERE = ("arrival", "json")
_LEAST = {"samples": 1, "slots": 1, "pages": 2, "page_size": 1, "max_tokens": 1}
_MOST_TOKENS = 2**24
_DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the arguments that only a pretrained model has."""
  add = parser.add_argument
  add("--model", metavar="M", help="smollm2, gemma3-270m, a folder or a .gguf")
  add("--chat", action="store_true", help="prompts are messages to the model")
  add("--prompt", metavar="TEXT", action="append", help="may be repeated")
  add("--stop", metavar="TEXT", action="append", help="ends an answer")
  add("--top-k", metavar="K", type=int, help="draw from the K most likely")
  add("--top-p", metavar="P", type=float, help="draw from this probability")
  add("--dtype", choices=_DTYPES, help="default: float32 on a CPU")
  add("--out", metavar="FILE", help="also write answers here, a JSON a line")


def check_unused(args: argparse.Namespace) -> None:
  """Refuses arguments that need a pretrained model.

  Raises:
    CommandError: one was given.
  """
  for name in _ONLY_HERE:
    if getattr(args, name) not in (None, False):
      raise CommandError(f"--{name.replace('_', '-')} needs --model")


def run(args: argparse.Namespace) -> int:
  """Generates, and prints answers and figures.

  Args:
    args: what `rollout.add_arguments` describes.

  Returns:
    The exit code, 0.

  Raises:
    CommandError: an argument, a prompt or the model cannot be used.
  """
  _check(args)
  prompts = text_prompts.chosen(args.prompt, args.prompts, chat=args.chat)
  with contextlib.ExitStack() as stack:
    write = None
    if args.out is not None:
      opened = json_file.opened(args.out, flag="--out", lines=True)
      write = stack.enter_context(opened)
    model = _model(args)
    done = _generated(args, model, prompts)
    answers = _answers(args, model, prompts, done.value)
    if write is not None:
      write(answers)
  with results.printed():
    _show(answers, done)
  return 0


def _check(args: argparse.Namespace) -> None:
  for name in _NOT_HERE:
    if getattr(args, name) not in (None, False):
      raise CommandError(f"--{name} must be left out with --model")
  args.samples = 1 if args.samples is None else args.samples
  for name, least in _LEAST.items():
    value = getattr(args, name)
    if value is not None and not least <= value <= _MOST_TOKENS:
      flag = "--" + name.replace("_", "-")
      raise CommandError(
        f"{flag} must be {least} .. {_MOST_TOKENS}, not {value}"
      )
  _check_draws(args)
  if args.out and args.prompts and _same_file(args.out, args.prompts):
    raise CommandError(f"--out {args.out} would overwrite the prompts")


def _check_draws(args: argparse.Namespace) -> None:
  if args.span < 0 or not 0 <= args.seed < 2**32:
    raise CommandError("--span and --seed must not be negative or too large")
  try:
    as_sampling(_sampling(args), 1)
  except ValueError as error:
    raise CommandError(str(error).rstrip(".").replace("`", "")) from error
  if args.stop and not all(args.stop):
    raise CommandError("--stop must not be empty")


def _same_file(a: str, b: str) -> bool:
  return os.path.exists(a) and os.path.exists(b) and os.path.samefile(a, b)


def _model(args: argparse.Namespace) -> Pretrained:
  dtype = args.dtype
  if dtype is None and jax.default_backend() == "cpu":
    dtype = "float32"
  try:
    model = models.load(args.model, dtype=dtype, progress=True)
    _ = model.tokenizer  # Missing ones are told before anything is compiled.
    return model
  except (ImportError, OSError, RuntimeError, ValueError) as error:
    raise CommandError(f"--model: {_line(error)}") from error


def _line(error: Exception) -> str:
  return " ".join(str(error).split()).rstrip(".")


def _sampling(args: argparse.Namespace) -> Sampling:
  return Sampling(
    temperature=args.temperature, top_k=args.top_k, top_p=args.top_p
  )


def _generated(
  args: argparse.Namespace, model: Pretrained, prompts: list[TextPrompt]
) -> Timed:
  encoded = text_prompts.encoded(prompts, model)
  lengths = np.asarray([len(tokens) for tokens in encoded], np.int32)
  room = model.max_length - args.max_tokens
  for prompt, length in zip(prompts, lengths.tolist(), strict=True):
    if length > room:
      raise CommandError(
        f"{prompt.place}: a prompt of {length} tokens is longer than {room}, "
        f"which --max-tokens leaves of the {model.max_length} that the model "
        "was made for; shorten it or lower --max-tokens"
      )
  tokens = np.zeros((len(encoded), int(lengths.max())), np.int32)
  for row, prompt in zip(tokens, encoded, strict=True):
    row[: len(prompt)] = prompt
  sampling = dataclasses.replace(
    _sampling(args),
    stop_tokens=list(model.stop_tokens) or None,
    stop_strings=_stop_strings(args, model),
  )
  config = RolloutConfig(
    num_samples=args.samples,
    max_new_tokens=args.max_tokens,
    prefill_chunk=64,
  )
  sizes = _sizes(args, model, len(encoded), tokens.shape[1])
  try:
    state = rollout.init(
      jaxkv.init(sizes),
      model.init_kv(sizes),
      jnp.asarray(tokens),
      jnp.asarray(lengths),
      jax.random.key(args.seed),
      config,
      sampling=sampling,
    )
  except ValueError as error:
    raise CommandError(f"{_line(error)}; raise --pages") from error
  return spans.generate(
    model.params,
    state,
    model=model.forward,
    steps=args.span,
  )


def _stop_strings(args: argparse.Namespace, model: Pretrained) -> Any:
  if not args.stop:
    return None
  pieces = model.tokenizer.token_bytes()
  size = model.config.vocab_size
  tokens = rollout.token_bytes(pieces[:size], vocab_size=size)
  return rollout.stop_strings(args.stop, tokens)


def _sizes(
  args: argparse.Namespace, model: Pretrained, prompts: int, width: int
) -> jaxkv.CacheConfig:
  """A cache with room for all slots, unless --pages says otherwise."""
  slots = min(args.slots, prompts * args.samples)
  longest = width + args.max_tokens
  groups = len(models.cache_groups(model.config))
  needed = 1 + slots * groups * (1 + -(-longest // args.page_size))
  return model.cache_config(
    num_pages=needed if args.pages is None else args.pages,
    num_slots=slots,
    page_size=args.page_size,
    max_length=longest,
  )


def _answers(
  args: argparse.Namespace,
  model: Pretrained,
  prompts: list[TextPrompt],
  state: RolloutState,
) -> list[dict[str, Any]]:
  """What is written for each sequence."""
  done = jax.tree.map(np.asarray, rollout.generated(state))
  answers = []
  for number, (row, mask) in enumerate(
    zip(done.tokens, done.mask, strict=True)
  ):
    drawn = row[mask]
    text = model.tokenizer.decode(drawn)
    answers.append(
      {
        "prompt_number": number // args.samples,
        "sample": number % args.samples,
        "prompt": prompts[number // args.samples].text,
        "text": text,
        "finish": rollout.Finish(int(done.finish[number])).name.lower(),
        "tokens": drawn.tolist(),
        "log_probs": done.log_probs[number][mask].astype(np.float64).tolist(),
      }
    )
  return answers


def _show(answers: list[dict[str, Any]], done: Timed) -> None:
  for answer in answers:
    print(
      f"--- prompt {answer['prompt_number']}, sample {answer['sample']} "
      f"({answer['finish']})"
    )
    print(f"{answer['prompt']}\n[{answer['text']}]")
  counters, stats = done.value.counters, done.value.cache.stats
  generated = int(counters.generated)
  print()
  print(
    f"{generated:,} tokens in {done.seconds:.2f} s, "
    f"{generated / done.seconds:,.0f} a second; compiled in "
    f"{done.compile_seconds:.1f} s"
  )
  print(
    f"{int(counters.prefilled):,} prompt tokens were computed; of "
    f"{int(stats.queried_tokens):,} looked up {int(stats.hit_tokens):,} were "
    "cached"
  )
