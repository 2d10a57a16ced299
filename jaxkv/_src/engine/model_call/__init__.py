"""A call of the model: its tokens, and what it records."""
