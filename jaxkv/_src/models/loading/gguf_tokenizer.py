"""Builds a tokenizer from the vocabulary in a GGUF file."""

from typing import Any

from jaxkv._src.extras import extra_package
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.tokenizer import SPACE
from jaxkv._src.models.loading.tokenizer import TASK
from jaxkv._src.models.loading.tokenizer import Tokenizer

_GGML = "tokenizer.ggml."
# Token types of llama.cpp.
_CONTROL = 3
_USER_DEFINED = 4
_BYTE = 6
# GPT-4's regular expression for words. An expression for digits replaces `%s`.
_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Each pre-tokenizer's expression for digits. None selects GPT-2's regular
# expression for words. llama.cpp's "default", which also replaces a missing
# name, is a guess that gives the wrong tokens for most models.
_DIGITS = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}
_DIGITS |= dict.fromkeys(("gpt-2", "smollm"))


def open_tokenizer(metadata: ConfigFile) -> Tokenizer:
  """Builds the tokenizer. Raises the errors of `Pretrained.tokenizer`."""
  library = extra_package("tokenizers", install="jaxkv[gguf]", task=TASK)
  metadata.only(f"{_GGML}model", "gpt2", "llama")
  is_sentence_piece = metadata.get(f"{_GGML}model") == "llama"
  tokens = metadata.items(f"{_GGML}tokens", str)
  kinds = metadata.items(f"{_GGML}token_type", int, [])
  special = {}
  # Templates use the names of transformers.
  names = {"unknown": "unk", "padding": "pad"}
  for role in ("bos", "eos", "unknown", "padding", "eot"):
    key = f"{_GGML}{role}_token_id"
    token_id = metadata.count(key, None)
    if token_id is not None and token_id >= len(tokens):
      raise metadata.wrong(key, f"below {len(tokens)}")
    if token_id is not None:
      special[f"{names.get(role, role)}_token"] = tokens[token_id]
  vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
  if is_sentence_piece:
    unknown = special.get("unk_token")
    core = _sentence_piece(library, metadata, vocabulary, unknown)
  else:
    core = _byte_level(library, metadata, vocabulary)
  # Control and user-defined tokens are added separately, because they must be
  # recognized before the text is split into words.
  for token_type, add in (
    (_CONTROL, core.add_special_tokens),
    (_USER_DEFINED, core.add_tokens),
  ):
    pairs = zip(tokens, kinds, strict=False)
    names = [token for token, token_kind in pairs if token_kind == token_type]
    add([library.AddedToken(name, normalized=False) for name in names])
  # The flags `add_bos_token` and `add_eos_token` have the same defaults as in
  # llama.cpp.
  adds_bos = (
    is_sentence_piece or metadata.get(f"{_GGML}pre", None) == "llama-bpe"
  )
  ends = [
    special.get(key) if metadata.flag(f"{_GGML}add_{key}", default) else None
    for key, default in (("bos_token", adds_bos), ("eos_token", False))
  ]
  if any(ends):
    single = [token for token in (ends[0], "$A", ends[1]) if token]
    core.post_processor = library.processors.TemplateProcessing(
      single=single,
      special_tokens=[(token, vocabulary[token]) for token in ends if token],
    )
  template = metadata.get("tokenizer.chat_template", None)
  return Tokenizer(core, template=template, variables=special)


def _byte_level(
  library: Any, metadata: ConfigFile, vocabulary: dict[str, int]
) -> Any:
  """Builds a byte-level BPE ("gpt2" in GGUF) with the file's merges."""
  metadata.only(f"{_GGML}pre", *_DIGITS)
  pre_tokenizer = metadata.get(f"{_GGML}pre")
  merges = metadata.items(f"{_GGML}merges", str)
  pairs = [tuple(pair.split(" ", 1)) for pair in merges]
  model = library.models.BPE(vocabulary, pairs)
  # In llama-bpe, a word that is in the vocabulary is one token without merges.
  model.ignore_merges = pre_tokenizer == "llama-bpe"
  core = library.Tokenizer(model)
  if pre_tokenizer == "qwen2":
    core.normalizer = library.normalizers.NFC()
  split = library.pre_tokenizers
  digits = _DIGITS[pre_tokenizer]
  steps = [split.ByteLevel(add_prefix_space=False, use_regex=not digits)]
  if digits:
    words = library.Regex(_WORDS % digits)
    steps.insert(0, split.Split(words, "isolated"))
  elif pre_tokenizer == "smollm":
    steps.insert(0, split.Digits(individual_digits=True))
  core.pre_tokenizer = split.Sequence(steps)
  core.decoder = library.decoders.ByteLevel()
  return core


def _sentence_piece(
  library: Any, metadata: ConfigFile, vocabulary: dict[str, int], unknown: Any
) -> Any:
  """Builds a SentencePiece BPE ("llama" in GGUF) with merges from scores."""
  scores = metadata.items(f"{_GGML}scores", float)
  kinds = metadata.items(f"{_GGML}token_type", int)
  ranks = {
    token: (-scores[token_id], token_id)
    for token, token_id in vocabulary.items()
    # Merges never produce tokens of these kinds.
    if kinds[token_id] not in (_CONTROL, _USER_DEFINED, _BYTE)
  }
  model = library.models.BPE(vocabulary, _merges(ranks), unk_token=unknown)
  model.byte_fallback = model.fuse_unk = True
  core = library.Tokenizer(model)
  normalize = library.normalizers
  decode = library.decoders
  encoding = [normalize.Replace(" ", SPACE)]
  decoding = [decode.Replace(SPACE, " "), decode.ByteFallback(), decode.Fuse()]
  if metadata.flag(f"{_GGML}add_space_prefix", True):
    encoding.insert(0, normalize.Prepend(SPACE))
    decoding.append(decode.Strip(" ", 1, 0))
  core.normalizer = normalize.Sequence(encoding)
  core.decoder = decode.Sequence(decoding)
  return core


def _merges(ranks: dict[str, tuple[float, int]]) -> list[tuple[str, str]]:
  """Returns the pairs that SentencePiece merges, ordered by rank."""
  # SentencePiece has no list of merges. It merges any two adjacent pieces whose
  # concatenation is a piece, in the order of the concatenations' scores.
  merges = []
  for token, rank in ranks.items():
    for middle in range(1, len(token)):
      pair = token[:middle], token[middle:]
      if pair[0] in ranks and pair[1] in ranks:
        merges.append((rank, ranks[pair[0]][1], ranks[pair[1]][1], pair))
  return [pair for *_, pair in sorted(merges)]
