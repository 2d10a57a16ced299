"""Advantages, ratios and losses for policies trained on rollouts."""
