"""Log-probabilities of completions that are given."""
