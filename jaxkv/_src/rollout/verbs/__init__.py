"""What changes a rollout between steps, by the numbers of sequences."""
