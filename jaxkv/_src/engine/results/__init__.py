"""The results of a rollout."""
