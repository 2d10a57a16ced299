"""The engine object: a rollout that lives on, for prompts and callers."""
