"""Functions that change a rollout between calls of `generate`."""
