"""A small character model, trained on this machine and stored in a file.

With random weights, the two largest logits are almost equal at every position,
so a rounding error changes tokens as easily as a cache bug does. Training
separates these logits. It takes about a minute and runs once. The training text
ships with Python, so examples and tests need no download.
"""

import functools
import hashlib
import pathlib
import pydoc_data.topics
import re
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm

from jaxkv import models
from jaxkv._src.commands import output
from jaxkv._src.compilation_cache import cache_folder

MAX_LENGTH = 512
"""Length of the longest training sequences, in tokens."""

_SPAN = 25
"""Optimizer steps in one call of the compiled program."""
_LEARNING_RATE = 9e-3
_WARMUP = 50
_BLANK_LINE = re.compile(r"\n\n+")

Sizes = tuple[tuple[int, int], ...]
"""Pairs (tokens per sequence, sequences per step), one for each span."""

# Most steps use short sequences, which are cheap. Without the steps that use
# long sequences, the loss beyond position 128 is 1 nat per token higher.
_SIZES = ((64, 32),) * 16 + ((192, 10),) * 4 + ((MAX_LENGTH, 4),) * 4


class Vocabulary(models.Tokenizer):
  """A tokenizer with one token for each character, and a stop token.

  Attributes:
    characters: the distinct characters; token i is `characters[i]`.

  Examples:
    >>> vocabulary = Vocabulary("abc")
    >>> vocabulary.encode("cab")
    array([2, 0, 1], dtype=int32)
    >>> vocabulary.decode([2, 0, 1, vocabulary.stop_token])
    'cab'
  """

  def __init__(self, characters: str):
    super().__init__(None)
    self.characters = characters
    self._tokens = {character: i for i, character in enumerate(characters)}

  @property
  def stop_token(self) -> int:
    """The token that ends a text, the last of the vocabulary."""
    return len(self.characters)

  @property
  def vocab_size(self) -> int:
    """Number of tokens, the stop token included."""
    return len(self.characters) + 1

  def encode(self, text: str, *, special: bool = True) -> np.ndarray:
    """Returns the tokens of a text, int32[T], without a stop token.

    Raises:
      ValueError: a character is not in the vocabulary.
    """
    del special
    for i, character in enumerate(text):
      if character not in self._tokens:
        raise ValueError(
          f"`text` must have characters of the vocabulary, got {character!r} "
          f"at position {i}; remove it."
        )
    return np.array([self._tokens[character] for character in text], np.int32)

  def decode(
    self, tokens: Sequence[int] | np.ndarray, *, special: bool = False
  ) -> str:
    """Returns the text of int[T] tokens, without stop tokens."""
    del special
    ids = np.asarray(tokens).tolist()
    return "".join(self.characters[i] for i in ids if i != self.stop_token)


def character_model(
  *,
  sizes: Sizes = _SIZES,
  text: str | None = None,
  folder: pathlib.Path | None = None,
) -> models.Pretrained:
  """Loads the character model, or trains it and stores it in a cache folder.

  The model, in float32, has about 0.1 M parameters, and a `Vocabulary` as its
  tokenizer. The first call takes about a minute on two CPU cores. Equal
  arguments give equal weights on the same machine. A single span in `sizes`
  gives a bad model quickly. `text` is longer than the longest sequence; None
  for `reference_text`. `folder` is None for JAXKV_CACHE, if that environment
  variable is set, else for `jaxkv` in the user's cache folder.

  Raises:
    OSError: the file cannot be written; raised before the training if the
      folder is read-only.
  """
  text = reference_text() if text is None else text
  vocabulary = Vocabulary("".join(sorted(set(text))))
  config = models.llama(
    vocab_size=vocabulary.vocab_size,
    num_layers=2,
    embed_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=176,
  )
  # The recipe and the text determine the weights. The file name contains a
  # digest of both, so a call with other arguments reads another file.
  recipe = (config, sizes, _SPAN, _LEARNING_RATE, _WARMUP)
  digest = hashlib.sha256(f"{recipe}{text}".encode()).hexdigest()
  path = (folder or cache_folder()) / f"characters-{digest[:16]}.npz"
  params = _load(path, config)
  if params is None:
    # Raises before the minute of training if the folder is not writable.
    path.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path.parent).close()
    params = train(training_tokens(text, vocabulary), config, sizes)
    # The file is replaced as a whole, because several processes can share it.
    with output.replacing(path) as part, open(part, "wb") as file:
      np.savez(file, *jax.tree.leaves(params))
  return models.Pretrained(
    config=config,
    params=params,
    max_length=MAX_LENGTH,
    stop_tokens=(vocabulary.stop_token,),
    open_tokenizer=lambda: vocabulary,
  )


def reference_text() -> str:
  """Returns the language reference that ships with Python, about 465 KB.

  The text differs a little between versions of Python.
  """
  topics = pydoc_data.topics.topics
  return "\n".join(topics[name] for name in sorted(topics))


def training_tokens(text: str, vocabulary: Vocabulary) -> np.ndarray:
  r"""Encodes a text, with a stop token after every second blank line.

  Half of the paragraphs end with a stop token, so a trained model gives answers
  of different lengths. The others do not, so a prompt can have more than one
  paragraph. Returns int32[T], with a stop token at the end.

  Examples:
    >>> tokens = training_tokens("a\n\nb\n\nc", Vocabulary("\nabc"))
    >>> tokens.tolist()
    [1, 0, 0, 2, 0, 0, 4, 3, 4]
  """
  ends = [match.end() for match in _BLANK_LINE.finditer(text)][1::2]
  stops = np.array([*ends, len(text)], np.int64)
  tokens = vocabulary.encode(text)
  return np.insert(tokens, stops, np.int32(vocabulary.stop_token))


def _load(path: pathlib.Path, config: models.Decoder) -> Any:
  """Returns the weights in the file, or None if it is missing or damaged."""
  if not path.exists():
    return None
  shapes = jax.eval_shape(lambda: models.init_params(jax.random.key(0), config))
  try:
    with open(path, "rb") as file, np.load(file) as arrays:
      leaves = [jnp.asarray(arrays[name]) for name in arrays.files]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)
  # A damaged file can raise any exception. The archive has a checksum of each
  # array, so a damaged array raises, too.
  except Exception as error:
    warnings.warn(
      f"{path} cannot be used ({error}); training the model again.",
      stacklevel=3,
    )
    return None


def train(tokens: np.ndarray, config: models.Decoder, sizes: Sizes) -> Any:
  """Returns parameters trained on random sections of one token stream."""
  steps = _SPAN * len(sizes)
  schedule = optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=_LEARNING_RATE,
    warmup_steps=min(_WARMUP, steps // 2),
    decay_steps=steps,
    end_value=0.05 * _LEARNING_RATE,
  )
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(schedule, b2=0.99, weight_decay=0.1),
  )

  @functools.partial(
    jax.jit, static_argnames=("context", "batch_size"), donate_argnums=0
  )
  def run_span(
    state: Any, data: Any, step_indices: Any, context: int, batch_size: int
  ) -> Any:
    def step(state: Any, step_index: jax.Array) -> tuple[Any, None]:
      params, opt_state = state
      # The key depends on the step, so that steps draw different batches.
      key = jax.random.fold_in(jax.random.key(1), step_index)
      starts = jax.random.randint(
        key, (batch_size,), 0, data.size - context, jnp.int32
      )
      offsets = jnp.arange(context + 1, dtype=jnp.int32)
      batch = data.at[starts[:, None] + offsets[None]].get(mode="fill")
      gradients = jax.grad(_loss)(params, batch, config)
      # adamw mixes a Python float with an int32 count, which raises if the
      # caller has set strict dtype promotion.
      with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = optimizer.update(gradients, opt_state, params)
      return (optax.apply_updates(params, updates), opt_state), None

    return jax.lax.scan(step, state, step_indices)[0]

  params = models.init_params(jax.random.key(0), config)
  state = (params, optimizer.init(params))
  data = jnp.asarray(tokens, jnp.int32)
  for index, size in enumerate(tqdm.tqdm(sizes, desc="training")):
    step_indices = index * _SPAN + jnp.arange(_SPAN, dtype=jnp.int32)
    state = jax.block_until_ready(run_span(state, data, step_indices, *size))
  return state[0]


def _loss(params: Any, batch: jax.Array, config: models.Decoder) -> jax.Array:
  """Returns the mean loss of the tokens after the first, in nats."""
  inputs = batch[:, :-1]
  positions = jnp.arange(inputs.shape[1], dtype=jnp.int32)
  positions = jnp.broadcast_to(positions[None], inputs.shape)
  logits = models.forward_uncached(params, inputs, positions, config=config)
  return jnp.mean(
    optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
  )
