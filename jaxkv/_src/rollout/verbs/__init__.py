"""Functions that change a rollout between steps; they take sequence ids."""
