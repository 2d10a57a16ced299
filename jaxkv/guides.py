"""Guided decoding: texts that match a regular expression or a JSON schema.

| name | purpose |
|---|---|
| `regex`, `json_schema` | make a `Grammar` of texts |
| `token_bytes` | the bytes of each token of a tokenizer, `TokenBytes` |
| `guide` | compiles grammars to a `Guide` |

A `Guide` is a `jaxkv.rollout.Process`. At each token, it permits only those
after which the text can still match the grammar of its sequence, inside `jit`.
A sequence ends only when its text matches.

Strings that end a sequence need no guide, see `jaxkv.rollout.stop_strings`.
"""

from jaxkv._src.guides.grammars import Grammar
from jaxkv._src.guides.guide import Guide
from jaxkv._src.guides.guide import guide
from jaxkv._src.guides.regex import regex
from jaxkv._src.guides.schema import json_schema
from jaxkv._src.guides.token_bytes import TokenBytes
from jaxkv._src.guides.token_bytes import token_bytes

__all__ = [
  "Grammar",
  "Guide",
  "TokenBytes",
  "guide",
  "json_schema",
  "regex",
  "token_bytes",
]
