"""Functions that change a rollout between steps, by sequence id."""
