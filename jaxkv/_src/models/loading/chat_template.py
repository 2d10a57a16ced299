"""Renders chat templates, which are Jinja programs, in a sandbox."""

import datetime
import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from jaxkv._src.extras import extra_package

# Templates mark the model's answers with this tag, from which transformers
# computes a mask for training. It renders its content, as `with` does.
_GENERATION = re.compile(r"(\{%[-+]?\s*(?:end)?)generation(?=\s*[-+]?%\})")


def render(template: str, variables: Mapping[str, Any]) -> str:
  """Renders a template with the given variables, such as `messages`."""
  task = "To render a chat template"
  sandbox = extra_package("jinja2.sandbox", install="jaxkv[hf]", task=task)
  # A template is a program of a third party, so it runs in a sandbox. The
  # options, filters and functions below are those that transformers offers,
  # because templates are written for transformers.
  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
  )
  # Jinja's own filter `tojson` escapes characters for HTML.
  to_json = functools.partial(json.dumps, ensure_ascii=False)
  environment.filters["tojson"] = to_json
  environment.globals["raise_exception"] = _refuse
  environment.globals["strftime_now"] = _now
  try:
    template = _GENERATION.sub(r"\1with", template)
    return environment.from_string(template).render(**variables)
  except _RefusedError as error:
    raise ValueError(str(error)) from error
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
  raise _RefusedError(
    f"the chat template refuses the conversation: {message}; change the "
    "messages."
  )


def _now(form: str) -> str:
  return datetime.datetime.now().strftime(form)
