"""Schemas of arguments of tools that agents call."""

from typing import Any

_TEXT = {"type": "string"}

TOOLS: dict[str, Any] = {
  "get_current_weather": {
    "type": "object",
    "properties": {
      "location": {
        "type": "string",
        "description": "The city and state, e.g. San Francisco, CA",
      },
      "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["location"],
  },
  "edit_file": {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
      "path": _TEXT,
      "edits": {
        "type": "array",
        "items": {
          "type": "object",
          "properties": {"oldText": _TEXT, "newText": _TEXT},
          "required": ["oldText", "newText"],
          "additionalProperties": False,
        },
      },
      "dryRun": {"type": "boolean", "default": False},
    },
    "required": ["path", "edits"],
    "additionalProperties": False,
  },
  "create_issue": {
    "type": "object",
    "properties": {
      "owner": _TEXT,
      "repo": _TEXT,
      "title": _TEXT,
      "body": _TEXT,
      "assignees": {"type": "array", "items": _TEXT},
      "milestone": {"type": "number"},
      "labels": {"type": "array", "items": _TEXT},
    },
    "required": ["owner", "repo", "title"],
  },
  # As Pydantic writes a model with a nested model and optional fields.
  "book_flight": {
    "$defs": {
      "Passenger": {
        "title": "Passenger",
        "type": "object",
        "properties": {
          "name": {"title": "Name", "type": "string", "maxLength": 12},
          "seat": {
            "title": "Seat",
            "anyOf": [
              {"type": "string", "pattern": "^[0-9]{1,2}[A-F]$"},
              {"type": "null"},
            ],
            "default": None,
          },
        },
        "required": ["name"],
      }
    },
    "title": "BookFlight",
    "type": "object",
    "properties": {
      "date": {"title": "Date", "type": "string", "format": "date"},
      "passengers": {
        "title": "Passengers",
        "type": "array",
        "items": {"$ref": "#/$defs/Passenger"},
        "minItems": 1,
        "maxItems": 2,
      },
    },
    "required": ["date", "passengers"],
  },
}
