"""Advantages, divergences and losses for policies trained on rollouts."""
