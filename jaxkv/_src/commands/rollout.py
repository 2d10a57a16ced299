"""`python -m jaxkv rollout`: generates text from prompts in a jitted loop.

By default, a small character model continues prompts that share a preamble. The
model is trained once on this machine. The compiled loop allocates, shares,
publishes, evicts and frees pages, and reuses cached pages. Then the log-prob of
every drawn token is compared with that of a forward pass without a cache.

With `--model`, a pretrained model answers the prompts, without this comparison.
"""

import argparse
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

import jaxkv
from jaxkv import models
from jaxkv import rollout
from jaxkv._src.commands import characters
from jaxkv._src.commands import output
from jaxkv._src.commands import processes
from jaxkv._src.commands.output import CommandError

CLOSE = 1e-3
"""Log-probs count as equal if they differ by less than this.

Summing float32 values in another order changes log-probs by about 1e-5. Reading
a wrong page changes them by about 0.1.
"""

_MAX_PRINTED = 8
_PREFILL_CHUNK = 64
_NUM_PROMPTS = 24
_PREAMBLE = 224
_OPENING = 40
_LIMIT = 2**22


Prompts = dict[str, str]
"""The prompts, by a name that error messages use, such as "--prompt 1"."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the command's arguments to its parser."""
  add = parser.add_argument
  count = output.whole_number(1, _LIMIT)
  num_pages = output.whole_number(2, _LIMIT)
  seed = output.whole_number(0, 2**32 - 1)
  default = "(default: %(default)s)"
  add(
    "--model",
    metavar="M",
    help="a folder, a .gguf file or a hub id; default: a small character model",
  )
  add("--prompt", metavar="TEXT", action="append", help="may be repeated")
  add("--prompts", metavar="FILE", help="one prompt a line, UTF-8")
  add("--chat", action="store_true", help="apply the chat template")
  samples = "answers to each prompt (default: 4, or 1 with --model)"
  add("--samples", metavar="G", type=count, help=samples)
  add("--max-tokens", metavar="T", type=count, default=96, help=default)
  add("--temperature", type=float, default=0.8, help=f"0 is greedy {default}")
  add("--seed", metavar="I", type=seed, default=0, help=default)
  slots = f"sequences that run at once {default}"
  add("--slots", metavar="B", type=count, default=8, help=slots)
  add(
    "--pages", metavar="N", type=num_pages, help="of all pools; default: enough"
  )
  add("--page-size", metavar="S", type=count, default=16, help=default)
  add("--json", metavar="FILE", help="also write texts and figures here")
  add(
    "--processes",
    metavar="ADDRESS,N,ID",
    type=processes.parse,
    help="run as process ID of N, which share the prompts; process 0 listens "
    "at ADDRESS",
  )


def run(args: argparse.Namespace) -> int:
  """Generates answers, and prints them with a table of figures.

  Returns the exit status: 1 if a log-prob differs by `CLOSE` or more, else 0.
  With `--processes`, only process 0 returns 1.
  """
  # All checks precede the compilation. Only files can be checked before the
  # model is loaded or trained, because the other checks need the model.
  is_writer = not args.processes or args.processes.process_index == 0
  path = args.json if is_writer else None
  output.check_writable(path, args.prompts, args.model)
  if args.processes:
    processes.start(args.processes)
  model = _model(args)
  if args.max_tokens >= model.max_length:
    raise CommandError(
      f"--max-tokens must be below {model.max_length}, the longest sequence "
      f"that the model was made for, not {args.max_tokens}"
    )
  prompts = chosen_prompts(args, model.tokenizer)
  if args.processes and len(prompts) < args.processes.num_processes:
    raise CommandError(
      f"--processes: {args.processes.num_processes} processes need at least "
      f"as many prompts, got {len(prompts)}; use fewer processes"
    )
  if args.samples is None:
    args.samples = 4 if args.model is None else 1
  state, seconds = _generate(args, model, _encoded(args, model, prompts))
  jaxkv.check(state.memory.cache)
  result = seconds | _metrics(state)
  if args.model is None:
    print("comparing with a forward pass without a cache ...", file=sys.stderr)
    result["largest_difference"] = largest_difference(model, state)
  results = rollout.generated(state)
  if args.processes:
    results, result = processes.gathered(results, result)
    if not is_writer:
      return 0
  result["texts"] = _texts(
    list(prompts.values()), results, args.samples, model.tokenizer
  )
  output.write_json(args.json, result)
  output.print_table(*_rows(result), text=_printed_texts(result["texts"]))
  return 0 if result.get("largest_difference", 0.0) < CLOSE else 1


def _model(args: argparse.Namespace) -> models.Pretrained:
  # A CPU converts bfloat16 to float32 for each operation, so float32 is faster.
  dtype = "float32" if jax.default_backend() == "cpu" else None
  try:
    if args.model is None:
      return characters.character_model()
    model = models.load(args.model, dtype=dtype, progress=True)
    # The tokenizer is read here, so that a missing one is reported before the
    # compilation.
    _ = model.tokenizer
    return model
  except (ImportError, ValueError) as error:
    raise CommandError(f"--model: {_text_of(error)}") from error
  except OSError as error:
    advice = "" if args.model else "; set JAXKV_CACHE to a writable folder"
    raise CommandError(f"the model: {_text_of(error)}{advice}") from error


def _text_of(error: Exception) -> str:
  return " ".join(str(error).split()).rstrip(".").replace("`", "")


def chosen_prompts(
  args: argparse.Namespace, tokenizer: models.Tokenizer
) -> Prompts:
  """Returns the prompts of `--prompt` and `--prompts`, or the default ones."""
  prompts: Prompts = {
    f"--prompt {index}": text
    for index, text in enumerate(args.prompt or (), start=1)
  }
  if args.prompts is not None:
    prompts |= {
      f"{args.prompts} line {index}": line
      for index, line in enumerate(output.read_lines(args.prompts), start=1)
      if line.strip()
    }
  elif not prompts and isinstance(tokenizer, characters.Vocabulary):
    return default_prompts(characters.reference_text())
  elif not prompts:
    return {"the default prompt": "What is the capital of France?"}
  if not prompts:
    raise CommandError(f"{args.prompts} has no prompt; write one a line")
  return prompts


def default_prompts(text: str) -> Prompts:
  """Returns prompts that join the text's start and a paragraph's start."""
  preamble = text[:_PREAMBLE].rstrip() + "\n\n"
  paragraphs = [part.strip() for part in text.split("\n\n")]
  paragraphs = [part for part in paragraphs if len(part) > 2 * _OPENING]
  stride = max(1, len(paragraphs) // _NUM_PROMPTS)
  # Openings differ in length, so that prompts end at different page offsets.
  return {
    f"default prompt {index}": preamble + part[: _OPENING - index % 7]
    for index, part in enumerate(paragraphs[::stride][:_NUM_PROMPTS])
  }


def _encoded(
  args: argparse.Namespace, model: models.Pretrained, prompts: Prompts
) -> list[np.ndarray]:
  """Returns the tokens of each prompt."""
  rows = []
  room = model.max_length - args.max_tokens
  for label, text in prompts.items():
    try:
      if args.chat:
        message = {"role": "user", "content": text}
        row = model.tokenizer.encode_chat([message])
      else:
        row = model.tokenizer.encode(text)
    except (ImportError, ValueError) as error:
      raise CommandError(f"{label}: {_text_of(error)}") from error
    if not 0 < len(row) <= room:
      raise CommandError(
        f"{label}: a prompt must have 1 to {room} tokens, the model's maximum "
        f"of {model.max_length} less --max-tokens, not {len(row)}; change the "
        "prompt or lower --max-tokens"
      )
    rows.append(row)
  return rows


def _generate(
  args: argparse.Namespace, model: models.Pretrained, prompts: list[np.ndarray]
) -> tuple[rollout.RolloutState, dict[str, float]]:
  """Returns the state after all samples, and the durations in seconds."""
  # Arrays must have equal widths in all processes to be gathered.
  longest = max(map(len, prompts)) + args.max_tokens
  first_sequence = 0
  if args.processes:
    part = args.processes.part_of(len(prompts))
    prompts = prompts[part]
    first_sequence = part.start * args.samples
  config = rollout.RolloutConfig(
    num_samples=args.samples,
    max_new_tokens=args.max_tokens,
    max_length=longest,
    prefill_chunk=_PREFILL_CHUNK,
    # Raw log-probs do not depend on the temperature. `largest_difference`
    # compares them with a forward pass.
    raw_log_probs=True,
  )
  num_sequences = len(prompts) * args.samples
  try:
    engine = rollout.Engine(
      model.params,
      model,
      model.cache_config(
        # More slots would only cost time in each step.
        num_slots=min(args.slots, num_sequences),
        max_length=longest,
        page_size=min(args.page_size, longest),
        num_pages=args.pages,
        prefill_chunk=_PREFILL_CHUNK,
      ),
      config,
      num_prompts=len(prompts),
      key=jax.random.key(args.seed),
      first_sequence=first_sequence,
    )
    engine.submit(
      prompts, sampling=rollout.Sampling(temperature=args.temperature)
    )
  except ValueError as error:
    raise CommandError(f"{_text_of(error)} (--pages, --temperature)") from error
  print("compiling the loop ...", file=sys.stderr, flush=True)
  times = [time.perf_counter()]
  engine.step(1)
  times.append(time.perf_counter())
  # Most sequences end before they have `max_tokens` tokens.
  with tqdm.tqdm(
    total=num_sequences * args.max_tokens,
    desc="rollout",
    bar_format="{l_bar}{bar}| {elapsed}",
  ) as bar:
    while engine.step():
      bar.update(int(engine.counters.generated) - bar.n)
    bar.update(bar.total - bar.n)
  times.append(time.perf_counter())
  compile_seconds, seconds = np.diff(times).tolist()
  return engine.state, {"seconds": seconds, "compile_seconds": compile_seconds}


def largest_difference(
  model: models.Pretrained, state: rollout.RolloutState
) -> float:
  """Recomputes the log-probs of all drawn tokens without a cache.

  Returns the largest difference from those of the rollout, in nats.
  """
  groups = rollout.grouped(rollout.generated(state))
  assert groups.records.raw_log_probs is not None
  log_probs = models.grouped_log_probs(
    model.params,
    groups.prompts,
    groups.prompt_lengths,
    groups.completions,
    groups.completion_lengths,
    config=model.config,
  )
  differences = jnp.abs(log_probs - groups.records.raw_log_probs)
  # `max` keeps NaN, which then fails the comparison with `CLOSE`.
  return float(jnp.max(jnp.where(groups.mask, differences, 0)))


def _metrics(state: rollout.RolloutState) -> dict[str, Any]:
  """Returns the sizes and counters of the rollout and its cache."""
  config = state.memory.cache.config
  stats = vars(state.memory.cache.stats)
  counts = vars(state.counters) | {
    name: count for name, count in stats.items() if count is not None
  }
  return {
    "sequences": state.queue.size,
    "slots": config.num_slots,
    "pages": config.num_pages,
    "page_size": config.page_size,
    "page_bytes": jaxkv.kv.page_bytes(state.memory.kv),
    "prompt_tokens": int(jnp.sum(state.queue.prompt_length)),
    **{
      name: np.asarray(count).tolist()
      for name, count in counts.items()
      if name != "calls"
    },
  }


def _texts(
  prompts: list[str],
  results: rollout.Generated,
  num_samples: int,
  tokenizer: models.Tokenizer,
) -> list[dict[str, Any]]:
  """Returns a record of each answer."""
  done = jax.tree.map(np.asarray, results)
  texts = []
  for index, (row, mask) in enumerate(zip(done.tokens, done.mask, strict=True)):
    prompt_index, sample = divmod(index, num_samples)
    texts.append(
      {
        "prompt_number": prompt_index,
        "sample": sample,
        "prompt": prompts[prompt_index],
        "text": tokenizer.decode(row[mask]),
        "finish": rollout.Finish(int(done.finish[index])).name.lower(),
        "tokens": row[mask].tolist(),
        "log_probs": done.log_probs[index][mask].astype(float).tolist(),
      }
    )
  return texts


def _printed_texts(texts: list[dict[str, Any]]) -> str:
  """Formats the first texts for printing."""
  lines = []
  for text in texts[:_MAX_PRINTED]:
    label = f"prompt {text['prompt_number']}, sample {text['sample']}"
    lines += [f"--- {label} ({text['finish']})"]
    lines += [f"...{text['prompt'][-60:]}[{text['text']}]"]
  if len(texts) > _MAX_PRINTED:
    lines += [f"--- and {len(texts) - _MAX_PRINTED} more (--json has all)"]
  return "\n".join(lines) + "\n\n"


def _bytes_used(f: dict[str, Any]) -> str:
  """Returns the bytes of pages in use, at the peak of each pool."""
  num_bytes = np.multiply(f["peak_pages"], f["page_bytes"], dtype=np.int64)
  suffix = "" if num_bytes.ndim == 0 else " of each pool"
  return f"{num_bytes.sum():,} at the peak{suffix}"


def _rows(f: dict[str, Any]) -> list[tuple[str, str]]:
  """Returns the rows of the printed table, pairs of name and value."""
  hits = f["hit_tokens"] / max(f["queried_tokens"], 1)
  rows = [
    ("sequences", f"{f['sequences']} in {f['slots']} slots"),
    (
      "tokens/s",
      f"{f['generated'] / f['seconds']:,.0f} ({f['generated']:,} in "
      f"{f['seconds']:.2f} s, {f['steps']:,} steps; compiled in "
      f"{f['compile_seconds']:.1f} s)",
    ),
    (
      "prompt tokens",
      f"{f['prompt_tokens']:,}, of which {f['prefilled']:,} were computed",
    ),
    ("prefix hit rate", f"{hits:.1%} of {f['queried_tokens']:,} tokens"),
    ("sequences forked", f"{f['forked']:,}; {f['preempted']:,} were preempted"),
    (
      "pages",
      f"{f['published_pages']:,} published, {f['evicted_pages']:,} evicted, "
      f"{f['peak_shared']:,} shared at the peak",
    ),
    ("K/V bytes used", _bytes_used(f)),
  ]
  if "largest_difference" in f:
    verdict = "yes" if f["largest_difference"] < CLOSE else "NO"
    rows.append(
      (
        "equals uncached",
        f"{verdict}, log-probs within {f['largest_difference']:.1g} of a "
        "forward pass without a cache",
      )
    )
  return rows
