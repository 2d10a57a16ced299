"""Renders chat templates, which are Jinja programs, in a sandbox.

Templates are written for `apply_chat_template` of transformers, so they get the
variables, filters and functions that transformers 5.24 gives them.
"""

import dataclasses
import datetime
import json
import re
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv._src.extras import extra_package
from jaxkv._src.models.loading.control_tokens import MARKS

# Templates mark the model's answers with this tag, from which transformers
# computes a mask for training. It renders its content, as `with` does.
_GENERATION = re.compile(r"(\{%[-+]?\s*(?:end)?)generation(?=\s*[-+]?%\})")

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of a message's reasoning; the first one that has a value counts."""


def inputs(
  messages: Any, *, answer: bool, tools: Any, documents: Any, **variables: Any
) -> dict[str, Any]:
  """Returns the variables of a template, as JSON values, or raises."""
  remedy = 'write [{"role": "user", "content": text}]'
  messages = [*map(_message, _mappings("messages", messages, remedy))]
  if not messages:
    raise ValueError(f"`messages` must not be empty, got []; {remedy}.")
  # A template can ask whether these are None, so they are always defined.
  if tools is not None:
    tools = _mappings("tools", tools, "give a JSON schema for each tool")
  if documents is not None:
    remedy = 'write [{"title": title, "text": text}]'
    documents = _mappings("documents", documents, remedy)
  return plain(variables) | {
    "messages": messages,
    "tools": tools,
    "documents": documents,
    "add_generation_prompt": answer,
  }


def _mappings(name: str, values: Any, remedy: str) -> list[dict[str, Any]]:
  """Converts a list of mappings to JSON values; raises TypeError for others."""
  is_list = isinstance(values, Sequence) and not isinstance(values, str)
  mappings: list[Any] = plain([*values]) if is_list else [None]
  if not all(isinstance(mapping, dict) for mapping in mappings):
    raise TypeError(
      f"`{name}` must be a list of mappings, got {values!r}; {remedy}."
    )
  return mappings


def _message(message: dict[str, Any]) -> dict[str, Any]:
  """Returns a message as templates expect it."""
  # Clients return messages with `"tool_calls": None` and the like. Templates
  # test whether a key exists, and would print "None".
  message = {key: value for key, value in message.items() if value is not None}
  for key in _REASONING:
    if key in message:
      reasoning = message[key]
      # gpt-oss reads "thinking", most other templates "reasoning_content".
      return {"thinking": reasoning} | message | {_REASONING[0]: reasoning}
  return message


def plain(value: Any) -> Any:
  """Converts a value to JSON types; a value without one becomes "<its type>".

  Templates are programs of third parties, so they get no objects with methods.
  """
  if isinstance(value, np.generic):
    value = value.item()
  if value is None or isinstance(value, bool):
    return value
  for cls in (str, int, float):
    # An enum's member is also a str or an int.
    if isinstance(value, cls):
      return getattr(cls, f"__{cls.__name__}__")(value)
  if isinstance(value, Mapping):
    return {plain(key): plain(item) for key, item in value.items()}
  if isinstance(value, list):
    return [plain(item) for item in value]
  if isinstance(value, tuple):
    return tuple(plain(item) for item in value)
  return _plain_fields(value)


def _plain_fields(value: Any) -> Any:
  """Converts a dataclass or a Pydantic model; see `plain`."""
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    names = [field.name for field in dataclasses.fields(value)]
    return {name: plain(getattr(value, name)) for name in names}
  # Messages of clients such as OpenAI's are Pydantic models.
  dump = getattr(value, "model_dump", None)
  return plain(dump()) if callable(dump) else f"<{type(value).__name__}>"


def choose(template: str | Mapping[str, str] | None, has_tools: bool) -> str:
  """Returns the template for a conversation; raises if there is none."""
  if template is None:
    raise ValueError(
      "the checkpoint has no chat template; write the text of the "
      "conversation yourself, or use a model that was trained to chat."
    )
  if isinstance(template, str):
    return template
  if has_tools and "tool_use" in template:
    return template["tool_use"]
  if "default" not in template:
    raise ValueError(
      f"the checkpoint has the chat templates {sorted(template)} and no "
      '"default"; set `template` of the tokenizer to one of them.'
    )
  return template["default"]


def render(template: str, variables: Mapping[str, Any]) -> str:
  """Renders a template with the given variables, such as `messages`."""
  # A template is a program of a third party, so it runs in a sandbox.
  sandbox = extra_package(
    "jinja2.sandbox", install="jaxkv[hf]", task="To render a chat template"
  )
  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
  )
  # Jinja's own filter `tojson` escapes characters for HTML.
  environment.filters["tojson"] = _to_json
  environment.globals["raise_exception"] = _refuse
  now = datetime.datetime.now()
  environment.globals["strftime_now"] = now.strftime
  template = _GENERATION.sub(r"\1with", template)
  try:
    return environment.from_string(template).render(**variables)
  except _RefusedError as error:
    raise ValueError(
      f"the chat template refuses the conversation: {error}; change the "
      "messages."
    ) from error
  # A template can raise any exception.
  except Exception as error:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    raise ValueError(
      f"the chat template cannot be rendered: {reason}; change the messages or "
      "the template."
    ) from error


class _RefusedError(Exception):
  """The template called `raise_exception`."""


def _refuse(message: str) -> None:
  raise _RefusedError(message)


def _to_json(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  text = json.dumps(
    value,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )
  for mark in MARKS if ensure_ascii else ():
    # An escaped mark would no longer protect the text within.
    text = text.replace(json.dumps(mark)[1:-1], mark)
  return text
